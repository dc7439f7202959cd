"""Rules between shapes that several primitives share, and checks of what primitives are made with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.broadcasting import broadcast_rule
from capibara.compose.logical.shapes import Dim, Rest, Shape, set_size, unify

__all__ = [
    "axes_of",
    "axis_of",
    "broadcast3_rule",
    "broadcast_rule",
    "fix",
    "placed",
    "product",
    "reduced",
    "scalar",
    "sizes",
]

Rule = Callable[..., bool]


def scalar(name: str, value: Any, *, optional: bool = False) -> None:
    """``value`` is a finite Python number (no bool).

    Raises:
        WiringError: it is not.
    """
    if optional and value is None:
        return
    big = isinstance(value, int) and abs(value) > 1e300  # more than a float holds
    if isinstance(value, bool) or not isinstance(value, int | float) or big or not math.isfinite(value):
        raise WiringError(f"{name}={value!r} must be a finite number" + (" or None" if optional else ""))


def sizes(name: str, value: Any, low: int = 0) -> tuple[int, ...]:
    """``value`` as a tuple of integers of at least ``low``.

    Raises:
        WiringError: it is something else.
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise WiringError(f"{name}={value!r} must be a row of sizes, such as (3, 4)")
    row = tuple(value)
    for size in row:
        if isinstance(size, bool) or not isinstance(size, int) or size < low:
            raise WiringError(f"{name}={value!r}: {size!r} must be an integer of at least {low}")
    return row


def axes_of(axis: Any, *, optional: bool = True) -> int | tuple[int, ...] | None:
    """``axis`` as an int, a tuple of different ints, or None."""
    if isinstance(axis, list | tuple):
        for i in axis:
            whole("axis", i, None)
        if len(set(axis)) != len(axis):
            raise WiringError(f"axis={axis!r} names a dimension twice")
        return tuple(axis)
    whole("axis", axis, None, optional=optional)
    return axis


def axis_of(axis: int, rank: int) -> int:
    """``axis`` counted from the front.

    Raises:
        ShapeError: there is no such dimension.
    """
    if not -rank <= axis < rank:
        raise ShapeError(f"axis={axis} is outside an array of {rank} dimensions")
    return axis % rank


def placed(axis: int | tuple[int, ...] | None, rank: int) -> set[int]:
    """The dimensions that ``axis`` names, all of them for None."""
    if axis is None:
        return set(range(rank))
    names = (axis,) if isinstance(axis, int) else axis
    found = {axis_of(i, rank) for i in names}
    if len(found) != len(names):
        raise ShapeError(f"axis={axis} names a dimension of {rank} twice")
    return found


def reduced(axis: int | tuple[int, ...] | None, keepdims: bool = False) -> Rule:
    """(input, output): the named dimensions are gone, or of size 1."""

    def rule(full: Shape, result: Shape) -> bool:
        dims = full.dims()
        if dims is None:
            if axis is None and not keepdims:
                unify(result, Shape())
                return True
            return False
        gone = placed(axis, len(dims))
        kept = [Dim(1) if i in gone else d for i, d in enumerate(dims) if keepdims or i not in gone]
        unify(result, Shape(kept))
        return True

    return rule


def broadcast3_rule() -> Rule:
    """(a, b, c, output): the three broadcast together."""
    middle = Shape([Rest()])

    def rule(a: Shape, b: Shape, c: Shape, output: Shape) -> bool:
        first = broadcast_rule(a, b, middle)
        return broadcast_rule(middle, c, output) and first

    return rule


def product(dims: Iterable[Dim]) -> int | None:
    """The product of sizes, or None while one is unknown."""
    total = 1
    for dim in dims:
        size = dim.find().size
        if size is None:
            return None
        total *= size
    return total


def fix(dim: Dim, size: int | None) -> bool:
    """Give a dimension its size if that is known; whether it was."""
    if size is None:
        return False
    set_size(dim, size)
    return True
