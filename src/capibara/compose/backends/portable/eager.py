"""Functions for a backend's methods, beside the operations of models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from capibara.compose.backends import philox
from capibara.compose.backends.portable import reductions
from capibara.compose.backends.portable.elementwise import divide, log_softmax, reciprocal, sqrt
from capibara.compose.backends.portable.space import as_arrays, space

__all__ = [
    "argsort",
    "average",
    "choose",
    "cumulative_sum",
    "expm1",
    "is_finite",
    "is_infinite",
    "log1p",
    "log2",
    "log_softmax",
    "outer",
    "product",
    "reverse",
    "round_even",
    "rsqrt",
    "sort",
    "split_key",
    "tangent",
    "top_k",
    "total",
    "transform_vmap",
    "true_divide",
    "unique_values",
]

Array = Any


def tangent(x: Array) -> Array:
    xp = space(x)
    return xp.divide(xp.sin(x), xp.cos(x))


def expm1(x: Array) -> Array:
    return space(x).expm1(x)


def log1p(x: Array) -> Array:
    return space(x).log1p(x)


def log2(x: Array) -> Array:
    return space(x).log(x) * 1.4426950408889634


def rsqrt(x: Array) -> Array:
    return reciprocal(sqrt(x))


def round_even(x: Array) -> Array:
    return space(x).round(x)


def is_infinite(x: Array) -> Array:
    return space(x).isinf(x)


def is_finite(x: Array) -> Array:
    xp = space(x)
    return xp.logical_not(xp.logical_or(xp.isinf(x), xp.isnan(x)))


def product(left: Array, right: Array) -> Array:
    return space(left, right).matmul(left, right)


def outer(left: Array, right: Array) -> Array:
    return left[:, None] * right[None, :]


def true_divide(left: Array, right: Array, dtype: str) -> Array:
    xp, left, right = as_arrays(left, right)
    return divide(left, right, None if xp.is_float(left) or xp.is_float(right) else dtype)


def total(x: Array, axis: Any, keepdims: bool) -> Array:
    xp, x = as_arrays(x)
    return xp.sum(xp.astype(x, "int32") if xp.is_bool(x) else x, axis, keepdims)


def average(x: Array, axis: Any, keepdims: bool, dtype: str) -> Array:
    xp, x = as_arrays(x)
    return reductions.mean(x, axis, keepdims, None if xp.is_float(x) else dtype)


def cumulative_sum(x: Array, axis: int) -> Array:
    xp = space(x)
    return xp.cumsum(xp.astype(x, "int32") if xp.is_bool(x) else x, axis)


def sort(x: Array, axis: int, descending: bool) -> Array:
    xp = space(x)
    return xp.take_along_axis(x, xp.argsort(xp.stop(x), axis, descending), axis)


def argsort(x: Array, axis: int, descending: bool) -> Array:
    return space(x).argsort(x, axis, descending)


def top_k(x: Array, k: int) -> Array:
    return sort(x, -1, True)[..., :k]


def reverse(x: Array, axis: int) -> Array:
    return space(x).getitem(x, (*(slice(None),) * axis, slice(None, None, -1)))


def unique_values(x: Array, inverse: bool, counts: bool) -> Any:
    values, where, often = space(x).unique(x)
    extra = ((where,) if inverse else ()) + ((often,) if counts else ())
    return (values, *extra) if extra else values


def split_key(key: Any, num: int) -> Any:
    return philox.split(key, num)


def choose(probs: Array, uniform: Array, count: int, replacement: bool) -> Array:
    xp = space(probs)
    from capibara.compose.backends.portable.elementwise import clip

    noise = -xp.log(-xp.log(clip(uniform, 1e-20, 1 - 6e-8)))
    logs = xp.log(xp.astype(probs, "float32"))
    if replacement:
        return xp.argmax(xp.reshape(logs, (*logs.shape[:-1], 1, logs.shape[-1])) + noise, -1)
    return xp.argsort(logs + noise, -1, True)[..., :count]


def transform_vmap(fn: Callable[..., Any]) -> Callable[..., Any]:
    from capibara.compose.backends.portable.creation import at, stacked

    def run(*args: Any) -> Any:
        count = _length(args)
        return stacked([fn(*(at(a, i) for a in args)) for i in range(count)])

    return run


def _length(tree: Any) -> int:
    while isinstance(tree, dict | tuple | list):
        tree = next(iter(tree.values() if isinstance(tree, dict) else tree))
    return tree.shape[0]
