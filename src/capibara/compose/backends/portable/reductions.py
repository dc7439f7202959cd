"""Reductions: see :mod:`capibara.compose.backends.jax_ops.reductions`, which means the same."""

from __future__ import annotations

import builtins
import math
from typing import Any

from capibara.compose.backends.portable.space import as_arrays, space
from capibara.compose.errors import InputError

Array = Any
Axis = int | tuple[int, ...] | None


def _same(x: Array, what: str) -> tuple[Any, Array]:
    xp, x = as_arrays(x)
    if xp.is_bool(x):
        raise InputError(f"the {what} of an array of bools is not defined: use Cast('int32') before it")
    return xp, x


def _count(x: Array, axis: Axis) -> int:
    if axis is None:
        return math.prod(x.shape)
    return math.prod(x.shape[a] for a in ((axis,) if isinstance(axis, int) else axis))


def sum(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    xp, x = _same(x, "sum")
    return xp.sum(x, axis, keepdims)


def mean(x: Array, axis: Axis, keepdims: bool = False, dtype: str | None = None) -> Array:
    xp = space(x)
    if dtype is not None:
        x = xp.astype(x, dtype)
    count = xp.constant(_count(x, axis), x)
    return xp.divide(xp.sum(x, axis, keepdims), count)


def prod(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    xp, x = _same(x, "product")
    return xp.prod(x, axis, keepdims)


def max(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return space(x).amax(x, axis, keepdims)


def min(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return space(x).amin(x, axis, keepdims)


def any(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return space(x).any(x, axis, keepdims)


def all(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return space(x).all(x, axis, keepdims)


def variance(x: Array, axis: Axis, correction: int, keepdims: bool = False) -> Array:
    xp = space(x)
    away = x - mean(x, axis, True)
    count = xp.constant(builtins.max(_count(x, axis) - correction, 0), x)
    return xp.divide(xp.sum(away * away, axis, keepdims), count)


def argmax(x: Array, axis: int | None, keepdims: bool = False) -> Array:
    return space(x).argmax(x, axis, keepdims)


def argmin(x: Array, axis: int | None, keepdims: bool = False) -> Array:
    return space(x).argmin(x, axis, keepdims)
