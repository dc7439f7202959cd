"""Text of generated source: places in nested dicts, and nested dicts."""

from __future__ import annotations

from typing import Any

from capibara.compose.physical.graph import Path

__all__ = ["lookup", "nested"]


def lookup(root: str, path: Path) -> str:
    return root + "".join(f"[{key!r}]" for key in path)


def nested(values: dict[Path, str]) -> str:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value

    def text(tree: dict[str, Any]) -> str:
        return (
            "{" + ", ".join(f"{k!r}: {text(v) if isinstance(v, dict) else v}" for k, v in tree.items()) + "}"
        )

    return text(tree)
