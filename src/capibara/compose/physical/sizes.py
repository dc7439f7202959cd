"""Sizes that follow from shapes, as expressions of Python in the generated source.

An operation such as ``x.reshape((x.shape[0], 4, -1))`` needs the integers themselves when it is traced or run, not an
array of them. They are found from the blocks that make them (shapes, indexing, arithmetic) and written down as what
they are: ``ops.reshape(x, shape=(x.shape[0], 4, -1))``. That is an integer for NumPy and PyTorch, one that is known
while JAX traces, and a symbol where ``jax.export`` or ``torch.export`` leaves the size open.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from capibara.compose.errors import CompileError
from capibara.compose.logical.block import Primitive, SizeFrom
from capibara.compose.logical.values import Numbers
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.constants import Code
from capibara.compose.physical.graph import Graph, Node

__all__ = ["filled", "resolve_sizes"]

DEEPEST = 64
"""Of the arithmetic in one size: Python reads no more than a hundred nested brackets."""

Size = int | tuple[Any, ...]
"""A number; ``("axis", i, axis)``: of ``node.inputs[i]``; ``("+", left, right)`` …; ``("row", i)``: its whole shape."""


_ARITHMETIC = {"add": "+", "subtract": "-", "multiply": "*", "floor_divide": "//", "modulo": "%"}
_CHOICES = {"minimum": "min", "maximum": "max"}
_COMPUTE: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "min": min,
    "max": max,
}
_SAME = {"buffer", "to_tensor", "item", "at_least_1d"}


def resolve_sizes(graph: Graph) -> None:
    """Say of every operation with sizes how they follow from the shapes of arrays, in the graph and its regions.

    Raises:
        CompileError: a size follows from values that are known only when the model runs.
    """
    for part in (graph, *(node.region for node in graph.walk() if node.region is not None)):
        makers = {id(wire): (node, place) for node in part.nodes for place, wire in enumerate(node.outputs)}
        for node in part.nodes:
            if isinstance(node.block, Primitive) and node.block.sizes:
                _resolve(node, makers)


def _resolve(node: Node, makers: dict[int, tuple[Node, int]]) -> None:
    block = node.block
    assert isinstance(block, Primitive)
    by_key = dict(zip(block.ports_in, node.inputs, strict=True))
    arrays = [w for k, w in by_key.items() if k not in block.sizes]
    node.inputs, node.arrays = arrays, len(arrays)

    def leaf(wire: Wire) -> int:
        for i, other in enumerate(node.inputs[len(arrays) :], len(arrays)):
            if other is wire:
                return i
        node.inputs.append(wire)
        return len(node.inputs) - 1

    for key in block.sizes:
        try:
            row = _row(by_key[key].find(), makers, leaf)
        except _Unknown as reason:
            raise CompileError(
                f"{node.label}: its size {key!r} {reason}: sizes follow from shapes and constants (x.shape[0] * 2); "
                "give an input that is a size by constant_keys"
            ) from None
        node.sizes[key] = row if by_key[key].find().shape.dims() else row[0]


class _Unknown(Exception):
    pass


def _row(wire: Wire, makers: dict[int, tuple[Node, int]], leaf: Callable[[Wire], int]) -> Any:
    """The sizes in an array of integers, or ``("row", i)`` for a shape of unknown length. Deep chains are walked."""
    # Iterative: x.shape[0] + 1 + 1 + … may be as long as any chain of operators.
    known: dict[int, Any] = {}
    stack = [wire]
    while stack:
        top = stack[-1].find()
        if id(top) in known:
            stack.pop()
            continue
        have = _known(top)
        if have is not None:
            known[id(top)] = have
            continue
        if id(top) not in makers:
            raise _Unknown("is given when the model is called" if top.role is None else f"is a {top.role}")
        node = makers[id(top)][0]
        op = getattr(node.block, "op", "")
        if node.region is not None or getattr(node.block, "registered", False):
            raise _Unknown(f"comes out of {node.label}")
        if op in ("shape_of", "size_of"):
            known[id(top)] = _of_array(node, op, leaf)
            continue
        if op not in (*_SAME, *_ARITHMETIC, *_CHOICES, "indexer", "stack", "concat", "negate", "cast"):
            raise _Unknown(f"is computed by {node.label} ({op})")
        missing = [w.find() for w in node.inputs if id(w.find()) not in known]
        if missing:
            stack.extend(missing)
            continue
        known[id(top)] = _result(node, op, [known[id(w.find())] for w in node.inputs])
    return known[id(wire.find())]


def _known(wire: Wire) -> list[Size] | None:
    if wire.role != "constant":
        return None
    value = wire.constant
    data = np.asarray(value.values if isinstance(value, Numbers) else value)
    if data.dtype.kind not in "iu" or data.ndim > 1:
        raise _Unknown(f"is {value!r:.40}, which is not an integer")
    return [int(n) for n in data.ravel()]


def _of_array(node: Node, op: str, leaf: Callable[[Wire], int]) -> Any:
    source = node.inputs[0].find()
    dims = source.shape.dims()
    assert isinstance(node.block, Primitive)
    axis = node.block.attributes.get("axis") if op == "size_of" else None
    axes = (axis,) if isinstance(axis, int) else axis
    if axes is None:
        if dims is None and op == "shape_of":
            return ("row", leaf(source))
        if dims is None:
            raise _Unknown("is the number of elements of an array whose rank is not known")
        axes = tuple(range(len(dims)))

    def one(place: int) -> Size:
        size = None if dims is None else dims[place].find().size
        return ("axis", leaf(source), place) if size is None else size

    row = [one(place) for place in axes]
    return row if op == "shape_of" else [reduce(lambda a, b: _joined("*", a, b), row, 1)]


def _joined(sign: str, left: Size, right: Size) -> Size:
    if sign in ("//", "%") and right == 0:
        raise _Unknown("is divided by 0")
    if isinstance(left, int) and isinstance(right, int):
        return _COMPUTE[sign](left, right)
    if sign == "*" and 1 in (left, right):
        return right if left == 1 else left
    return (sign, left, right)


def _result(node: Node, op: str, rows: list[Any]) -> Any:
    first = rows[0]
    if op in _SAME or op == "cast":
        return first
    if op == "indexer":
        assert isinstance(node.block, Primitive)
        entries = node.block.attributes["index"]
        if len(entries) != 1 or not isinstance(entries[0], int | tuple):
            raise _Unknown(f"is indexed by {entries!r}")
        entry = entries[0]
        if isinstance(first, tuple):  # the shape of an array whose rank is not known
            if not isinstance(entry, int):
                raise _Unknown("is a part of the shape of an array whose rank is not known")
            return [("axis", first[1], entry)]
        return [first[entry]] if isinstance(entry, int) else first[slice(*entry[1:])]
    if any(isinstance(row, tuple) for row in rows):
        raise _Unknown("is computed from the shape of an array whose rank is not known")
    if op in ("stack", "concat"):
        return [n for row in rows for n in row]
    if op == "negate":
        return [_joined("*", n, -1) for n in first]
    count = max(map(len, rows))
    left, right = (row * count if len(row) == 1 else row for row in rows)
    sign = _ARITHMETIC.get(op) or _CHOICES[op]
    return [_joined(sign, a, b) for a, b in zip(left, right, strict=True)]


def filled(value: Any, node: Node, read: Callable[[Wire], str] | None) -> Any:
    """An attribute with the sizes in the place of the ports that they come from: numbers, or source."""
    if isinstance(value, SizeFrom):
        return _written(node.sizes[value.port], node, read)
    if isinstance(value, tuple) and node.sizes:
        return tuple(filled(v, node, read) for v in value)
    return value


def _written(size: Any, node: Node, read: Callable[[Wire], str] | None) -> Any:
    if isinstance(size, list):
        return tuple(_written(n, node, read) for n in size)
    if isinstance(size, int):
        return size
    assert read is not None  # what is computed while compiling has shapes that are known
    return Code(_source(size, node, read, 0))


def _source(size: Size, node: Node, read: Callable[[Wire], str], depth: int) -> str:
    if depth > DEEPEST:
        raise CompileError(f"{node.label}: a size is computed in more than {DEEPEST} steps")
    outer = depth == 0
    if isinstance(size, int):
        return repr(size) if size >= 0 or outer else f"({size})"
    kind = size[0]
    if kind == "row":
        return f"{read(node.inputs[size[1]])}.shape"
    if kind == "axis":
        return f"{read(node.inputs[size[1]])}.shape[{size[2]}]"
    left, right = (_source(n, node, read, depth + 1) for n in size[1:])
    if kind in ("min", "max"):
        return f"{kind}({left}, {right})"
    text = f"{left} {kind} {right}"
    return text if outer else f"({text})"
