"""Fast paths for the operations that small models call most.

A portable operation determines the library of its arrays before it calls the library's function, which takes longer
than that function for small arrays. Here the usual case, arrays of one library and dtype, is recognised by comparing
types; all others (scalars, traced arrays, other dtypes) use the general path.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose.backends.portable import operations

__all__ = ["dense", "one", "two"]

Function = Callable[..., Any]


def one(array: type, function: Function, usual: Function) -> Function:
    """An operation on one array."""

    def run(x: Any) -> Any:
        if type(x) is array and x.ndim:  # without dimensions NumPy gives numbers, not arrays
            return function(x)
        return usual(x)

    return run


def two(array: type, function: Function, usual: Function) -> Function:
    """An operation on two arrays of one dtype."""

    def run(left: Any, right: Any) -> Any:
        if type(left) is array and type(right) is array and left.dtype == right.dtype and left.ndim:
            return function(left, right)
        return usual(left, right)

    return run


def dense(array: type, product: Function, fits: Callable[[Any, str], bool]) -> Function:
    """``x [*b, k] @ w [k, n]``; ``fits``: whether x has the dtype that sums are kept in."""

    def run(x: Any, weight: Any, accumulate: str) -> Any:
        if (
            type(x) is array
            and type(weight) is array
            and x.ndim == 2
            and x.dtype == weight.dtype
            and fits(x, accumulate)
        ):
            return product(x, weight)
        return operations.dense(x, weight, accumulate)

    return run
