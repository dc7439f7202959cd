"""A curated table of JAX's removals and deprecations, read from ``history.toml``.

The installed JAX determines *whether* a name exists; the table adds what it cannot know: when a name was removed, its
replacement, and which names will be removed in a later release.
"""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Any

__all__ = ["Change", "History", "Notice", "parse_version"]


@dataclass(frozen=True, slots=True)
class Change:
    """A deprecation or removal.

    Attributes:
        name: dotted name, keyword, config option or attribute.
        deprecated: first release that warned about it, or empty when it never did (or still does not).
        removed: first release without it, or empty when it is still there.
        replacement: what to write instead, or empty.
        effect: for keywords: ``"gone"``, ``"raises"`` or ``"warns"``.
        distinctive: for array attributes: the name alone says that the receiver is a JAX array.
    """

    name: str
    deprecated: str = ""
    removed: str = ""
    replacement: str = ""
    effect: str = ""
    distinctive: bool = False

    def removed_by(self, version: tuple[int, ...]) -> bool:
        """Whether the given release lacks it."""
        return bool(self.removed) and parse_version(self.removed) <= version

    @property
    def fix(self) -> str:
        if self.replacement.startswith("nothing: "):
            return f"leave it out: {self.replacement.removeprefix('nothing: ')}"
        return f"use {self.replacement}" if self.replacement else ""


@dataclass(frozen=True, slots=True)
class Notice:
    """A name that still exists but no longer behaves as older code expects."""

    name: str
    since: str
    message: str
    fix: str
    unless_keyword: str = ""
    unless_positional: int = 0


@dataclass(frozen=True, slots=True)
class History:
    """The whole table, indexed for lookup."""

    names: dict[str, Change]
    modules: dict[str, Change]
    keywords: dict[tuple[str, str], Change]
    options: dict[str, Change]
    attributes: dict[str, Change]
    notices: dict[str, Notice]

    @classmethod
    @functools.cache
    def load(cls) -> History:
        """Read the packaged table (once)."""
        text = resources.files("capibara.migrate").joinpath("history.toml").read_text(encoding="utf-8")
        data = tomllib.loads(text)
        return cls(
            names={
                change.name: change
                for group in data["change"]
                for change in _changes(group, prefix=group["module"] + ".")
            },
            modules=_index(data["module"]),
            keywords={
                (function, change.name): change
                for group in data["keyword"]
                for function in group["functions"]
                for change in _changes(group)
            },
            options=_index(data["option"]),
            attributes=_index(data["attribute"]),
            notices={entry["name"]: Notice(**entry) for entry in data["notice"]},
        )

    def find(self, path: str) -> Change | None:
        """The entry for a dotted name, or for the nearest module around it that is listed as a whole."""
        if path in self.names:
            return self.names[path]
        while path:
            if path in self.modules:
                return self.modules[path]
            path = path.rpartition(".")[0]
        return None

    def exact(self, path: str) -> Change | None:
        """The entry for exactly this name or module."""
        return self.names.get(path) or self.modules.get(path)


def _index(groups: list[dict[str, Any]]) -> dict[str, Change]:
    return {change.name: change for group in groups for change in _changes(group)}


def _changes(group: dict[str, Any], prefix: str = "") -> list[Change]:
    return [
        Change(
            name=prefix + name,
            deprecated=group.get("deprecated", ""),
            removed=group.get("removed", ""),
            replacement=replacement,
            effect=group.get("effect", ""),
            distinctive=group.get("distinctive", False),
        )
        for name, replacement in group["names"].items()
    ]


def parse_version(text: str) -> tuple[int, ...]:
    """``"0.4.31"`` as ``(0, 4, 31)``."""
    return tuple(int(part) for part in text.split("."))
