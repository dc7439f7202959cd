"""A logical model as a text table: its blocks, connections, shapes, kinds, numbers of parameters.

It shows the model's current state; unknown sizes are shown by their name or as ``?``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.block import Block, Primitive
from capibara.compose.logical.connections import Port
from capibara.compose.logical.regions import Region, Repeat
from capibara.compose.logical.settings import Settings
from capibara.compose.logical.wires import Wire

__all__ = ["summary"]


def summary(
    block: Block,
    *,
    shapes: bool = True,
    types: bool = False,
    depth: int | None = 0,
    verbose: bool = True,
) -> str:
    """The table of :meth:`Block.summary`."""
    for key, flag in (("shapes", shapes), ("types", types), ("verbose", verbose)):
        if not isinstance(flag, bool):
            raise WiringError(f"{key}={flag!r} must be True or False")
    whole("depth", depth, 0, optional=True)
    names = _Names(block)
    header = ["block", "port", "connection"]
    header += ["shape"] if shapes else []
    header += ["type"] if types else []
    header += ["parameters"]
    rows: list[list[str] | None] = [header, None]

    def add(label: str, port: str, joined: str, wire: Wire, count: str) -> None:
        row = [label, port, joined]
        row += [names.shape(wire)] if shapes else []
        row += [wire.kind.find().value or "?"] if types else []
        rows.append([*row, count])

    for label, part in _parts(block, depth):
        first = True
        for direction, key in _ports(part):
            wire = part.wires[key].find()
            add(
                f"{label} ({title(part)})" if first else "",
                f"{direction} {key}",
                "" if part is block else names.joined(part, wire, direction),
                wire,
                _count(part) if first else "",
            )
            first = False
        if first:
            rows.append([f"{label} ({title(part)})", *[""] * (len(header) - 2), _count(part)])
    widths = [max(len(row[i]) for row in rows if row is not None) for i in range(len(header))]
    lines = []
    for row in rows:
        if row is None:
            lines.append("  ".join("-" * width for width in widths))
            continue
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[-1] = row[-1].rjust(widths[-1])
        lines.append("  ".join(cells).rstrip())
    text = "\n".join([*lines, "", f"parameters: {_count(block) or 0}"])
    if verbose:
        print(text)
    return text


def title(block: Block) -> str:
    """The block's title: its class, or the name of its operation or function."""
    if isinstance(block, Repeat):
        return f"Repeat × {block.count}"
    if isinstance(block, Primitive) and block.registered:
        return f"op {block.op}"
    return vars(block).get("title") or type(block).__name__


def _parts(block: Block, depth: int | None) -> Iterator[tuple[str, Block]]:
    """The block, then those in it down to ``depth`` further levels, each with its place."""
    yield block.name or "model", block
    stack: list[tuple[str, Block, int]] = [
        (name, child, 0) for name, child in reversed(list(_children(block)))
    ]
    while stack:
        label, part, level = stack.pop()
        yield label, part
        if depth is None or level < depth:
            stack.extend(
                (f"{label}.{name}" if name else label, child, level + 1)
                for name, child in reversed(list(_children(part)))
            )


def _children(block: Block) -> Iterator[tuple[str, Block]]:
    if isinstance(block, Region):
        yield from _children(block.body)
    elif isinstance(block, Settings):
        yield from ((child.name, child.block) for child in block.children)


def _ports(block: Block) -> Iterator[tuple[str, str]]:
    inputs = block.ports_in if isinstance(block, Primitive) else block.input_keys
    outputs = block.output_keys
    for key in inputs:
        yield "in ", key
    for key, wire in block.wires.items():
        role = wire.find().role
        if key not in inputs and key not in outputs and role in ("param", "state") and _own(block, wire):
            yield role, key
    for key in outputs:
        yield "out", key


def _own(block: Block, wire: Wire) -> bool:
    """Whether a parameter was declared in this block, not in one inside of it or around it."""
    if not isinstance(block, Settings):
        return False
    root = wire.find()
    parent = block.parent
    return not (isinstance(parent, Settings) and any(w.find() is root for w in parent.wires.values()))


class _Names:
    """How values and sizes are called, the same everywhere in one table."""

    def __init__(self, block: Block) -> None:
        self.of: dict[int, str] = {}
        if isinstance(block, Settings):
            for key, wire in block.wires.items():
                self.of.setdefault(id(wire.find()), key)
        self._whole = block
        self._within: dict[int, dict[int, str]] = {}

    def joined(self, block: Block, wire: Wire, direction: str) -> str:
        if id(wire) in self.of:
            return self.of[id(wire)]
        if wire.role == "constant":
            text = repr(wire.constant)
            return text if len(text) <= 24 and "\n" not in text else type(wire.constant).__name__
        if wire.role is not None:
            return wire.role
        if wire.producer is not None and direction != "out":
            source, key = wire.producer
            return self._outermost(source, wire, key)
        around = block.parent
        if isinstance(around, Settings) and id(wire) in (names := self._inside(around)):
            return names[id(wire)]
        return "(open)" if wire.producer is None and direction == "in " else ""

    def _inside(self, block: Block) -> dict[int, str]:
        """The names that a nested model has for its values."""
        if id(block) not in self._within:
            own: dict[int, str] = {}
            for key, wire in block.wires.items():
                own.setdefault(id(wire.find()), key)
            self._within[id(block)] = own
        return self._within[id(block)]

    def _outermost(self, source: Any, wire: Wire, key: str) -> str:
        """The producer as seen from the model: the block in it that gives the value out."""
        block = source
        while block.parent is not None and block.parent is not self._whole:
            outer = self._inside(block.parent).get(id(wire))
            if outer is None:
                break
            block, key = block.parent, outer
        text = repr(Port(block, key))
        prefix = f"{self._whole.label}." if self._whole.parent is not None else ""
        return text.removeprefix(prefix)

    def shape(self, wire: Wire) -> str:
        prefix, rest, suffix = wire.find().shape.resolve()
        parts = [self._size(d) for d in prefix]
        if rest is not None:
            parts.append("…" if rest.name is None else repr(rest))
        parts += [self._size(d) for d in suffix]
        return "(" + ", ".join(parts) + ("," if len(parts) == 1 else "") + ")"

    def _size(self, dim: Any) -> str:
        root = dim.find()
        return str(root.size) if root.size is not None else (root.name or "?")


def _count(block: Block) -> str:
    """The number of trained numbers in a block, each once; ``+ ?`` where a size is not known yet."""
    total, open_, found = 0, False, False
    seen: set[int] = set()
    stack: list[tuple[Block, int]] = [(block, 1)]
    while stack:
        part, times = stack.pop()
        if isinstance(part, Region):
            stack.append((part.body, times * (part.count if isinstance(part, Repeat) else 1)))
            continue
        for wire in part.wires.values():
            root = wire.find()
            if root.role != "param" or id(root) in seen:
                continue
            seen.add(id(root))
            found = True
            sizes = root.shape.known
            if sizes is None or None in sizes:
                open_ = True
            else:
                total += times * math.prod(n or 0 for n in sizes)
        if isinstance(part, Settings):
            stack.extend((child.block, times) for child in part.children)
    if not found:
        return ""
    return f"{total:,}" + (" + ?" if open_ else "") if total or not open_ else "?"
