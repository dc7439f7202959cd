"""Sizes that are connections: rows of sizes with gaps in them, and what arithmetic does to the sizes in integers.

An integer that comes from a shape stands for a dimension (:attr:`.wires.Wire.value`). The rules here hand that on
from ``x.shape[0] * 2`` to the shape that the result is used in, so that shapes are inferred through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.block import SizeFrom
from capibara.compose.logical.shapes import Dim, Shape, product_of, quotient, unify
from capibara.compose.primitives.rules import sizes

__all__ = ["PASSED_ON", "SIZE_RULES", "SizeRow", "indexed_sizes", "joined_sizes", "product_dim"]

Rule = Callable[..., bool]


class SizeRow:
    """The sizes that a block is made with: integers, and None for those that come from a connection.

    Attributes:
        row: what stands in the operation's attribute. ports: the inputs for the open sizes, ``size_0`` for the first
            place of the row, or ``shape`` for all of them where the whole row is None.
    """

    def __init__(self, name: str, shape: Iterable[Any] | None, low: int = 0) -> None:
        self.given: tuple[int | None, ...] | None = None
        if shape is None:
            self.row: Any = SizeFrom("shape")
            self.ports: dict[str, Any] = {"shape": (("rank",), "int")}
            return
        if isinstance(shape, str) or not isinstance(shape, Iterable):
            raise WiringError(f"{name}={shape!r} must be a row of sizes, such as (3, 4)")
        given = tuple(shape)
        sizes(name, [n for n in given if n is not None], low)
        self.given = given
        keys = {i: f"size_{i}" for i, n in enumerate(given) if n is None}
        self.row = tuple(SizeFrom(keys[i]) if n is None else n for i, n in enumerate(given))
        self.ports = dict.fromkeys(keys.values(), ((), "int"))

    @property
    def keys(self) -> tuple[str, ...]:
        """Of the ports, for the ``sizes`` of a primitive."""
        return tuple(self.ports)

    @property
    def values(self) -> tuple[str, ...]:
        """The same for its constraints."""
        return tuple(f"#{key}" for key in self.ports)

    def shape(self, values: tuple[Shape, ...]) -> Shape:
        """The shape that the row says, with ``values``: of its ports; a fresh dimension for -1."""
        if self.given is None:
            return values[0]
        found = iter(values)
        return Shape(next(found).items[0] if n is None else Dim(None if n == -1 else n) for n in self.given)


def product_dim(dims: list[Dim]) -> Dim:
    """The product of dimensions as one."""
    known, unknown = product_of(dims)
    if not unknown:
        return Dim(known)
    if len(unknown) == 1 and known == 1:
        return unknown[0]
    one = Dim()
    one.factors = tuple(dims)
    return one


def _pairs(left: Shape, right: Shape) -> list[tuple[Dim, Dim]] | None:
    a, b = left.dims(), right.dims()
    if a is None or b is None or (len(a) != len(b) and 1 not in (len(a), len(b))):
        return None
    count = max(len(a), len(b))
    return list(zip(a if len(a) == count else a * count, b if len(b) == count else b * count, strict=True))


def _by_number(compute: Callable[[int, int], int]) -> Rule:
    def rule(left: Shape, right: Shape, out: Shape) -> bool:
        pairs = _pairs(left, right)
        if pairs is None:
            return False
        numbers = [(a.size, b.size) for a, b in pairs]
        if any(a is None or b is None for a, b in numbers):
            return False
        row = [compute(a, b) for a, b in numbers if a is not None and b is not None]
        if min(row, default=0) >= 0:
            unify(out, Shape(Dim(n) for n in row))
        return True

    return rule


def _multiplied(left: Shape, right: Shape, out: Shape) -> bool:
    pairs = _pairs(left, right)
    if pairs is None:
        return False
    row = [product_dim([a, b]) for a, b in pairs]
    unify(out, Shape(row))
    return all(d.find().size is not None for d in row)


def _divided(left: Shape, right: Shape, out: Shape) -> bool:
    pairs = _pairs(left, right)
    if pairs is None:
        return False
    if all(a.size is not None and b.size for a, b in pairs):
        unify(out, Shape(Dim((a.size or 0) // (b.size or 1)) for a, b in pairs))
        return True
    if any(b.size == 0 or a.size is not None for a, b in pairs):
        return False
    row = [quotient([a], [b]) for a, b in pairs]
    if any(d is None for d in row):
        return False
    unify(out, Shape(d for d in row if d is not None))
    return False


SIZE_RULES: dict[str, Rule] = {
    "add": _by_number(lambda a, b: a + b),
    "subtract": _by_number(lambda a, b: a - b),
    "multiply": _multiplied,
    "floor_divide": _divided,
    "modulo": _by_number(lambda a, b: a % b if b else -1),
    "minimum": _by_number(min),
    "maximum": _by_number(max),
}
"""What arithmetic does to sizes, by operation: a rule of ``(#left, #right, #output)``."""


def _same(before: Shape, after: Shape) -> bool:
    unify(before, after)
    return True


PASSED_ON: tuple[Rule, tuple[str, str]] = (_same, ("#input", "#output"))
"""The constraint of operations that leave integers as they are."""


def indexed_sizes(entries: tuple[Any, ...]) -> Rule:
    """The rule of ``(#input, #output)`` for a place, or a slice, of a row of sizes."""

    def rule(before: Shape, after: Shape) -> bool:
        dims = before.dims()
        if dims is None:
            return False
        if len(entries) == 1 and isinstance(entries[0], int) and -len(dims) <= entries[0] < len(dims):
            unify(after, Shape([dims[entries[0]]]))
        elif (
            len(entries) == 1
            and isinstance(entries[0], tuple)
            and all(n is None or isinstance(n, int) for n in entries[0][1:])
        ):
            unify(after, Shape(dims[slice(*entries[0][1:])]))
        return True

    return rule


def joined_sizes(*shapes: Shape) -> bool:
    """The rule of ``(#input_0, …, #output)``: sizes side by side."""
    rows = [s.dims() for s in shapes[:-1]]
    if any(r is None for r in rows):
        return False
    unify(shapes[-1], Shape(d for r in rows for d in r or ()))
    return True
