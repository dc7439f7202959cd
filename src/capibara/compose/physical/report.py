"""A compiled model as text: what goes in, what comes out, what it holds, what was simplified."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.physical.specs import ArraySpec, shape_text

if TYPE_CHECKING:
    from capibara.compose.physical.compiled import CompiledModel

__all__ = ["summary"]

_DONE = {
    "identities": "identities removed",
    "constants": "computed now",
    "common": "shared",
    "dead": "not needed",
}


def summary(compiled: CompiledModel) -> str:
    """The table that ``compiled.summary()`` gives and ``compile(verbose=True)`` prints."""
    rows: list[tuple[str, ...]] = [("", "name", "shape", "dtype", "numbers")]
    groups: list[tuple[str, Mapping[Any, ArraySpec]]] = [
        ("input", compiled.inputs),
        ("parameter", compiled.params),
        ("state", compiled.states),
        ("output", compiled.outputs),
    ]
    for what, specs in groups:
        for key, spec in specs.items():
            name = key if isinstance(key, str) else ".".join(key)
            shape = "?" if spec.shape is None else shape_text(spec.shape)
            rows.append((what, name, shape, spec.dtype, _numbers(spec) if what == "parameter" else ""))
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    lines = [repr(compiled), ""]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths, strict=False)]
        lines.append("  ".join([*cells, row[-1].rjust(widths[-1])]).rstrip())
    if compiled.fixed:
        lines.append(f"\nfixed inputs: {', '.join(compiled.fixed)}")
    if compiled._program.parts:
        axes = ", ".join(f"{name} {size}" for name, size in compiled.backend.mesh.shape.items())
        lines.append(f"\nover the mesh ({axes}):")
        lines += [f"  {line}" for line in compiled._program.parts]
    effects = compiled.effects
    done = [f"{effects[key]} {text}" for key, text in _DONE.items() if effects.get(key)]
    if effects:
        text = f" ({', '.join(done)})" if done else ""
        lines.append(f"\noperations: {effects['operations']}, after simplifying {effects['left']}{text}")
    return "\n".join(lines)


def _numbers(spec: ArraySpec) -> str:
    sizes = spec.shape
    if sizes is None or any(isinstance(n, str) for n in sizes):
        return "?"
    return f"{math.prod(n for n in sizes if isinstance(n, int)):,}"
