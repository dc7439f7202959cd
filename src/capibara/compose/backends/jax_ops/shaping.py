"""Operations that change a shape and no value."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose.backends.conversion import place_of
from capibara.compose.errors import InputError

__all__ = [
    "at_least_1d",
    "broadcast_to",
    "concat",
    "expand_dims",
    "flatten",
    "item",
    "pad",
    "reshape",
    "shape_of",
    "size_of",
    "split",
    "squeeze",
    "stack",
    "swap_axes",
    "to_tensor",
    "transpose",
    "unstack",
]

Array = jax.Array


def concat(*arrays: Any, axis: int | None) -> Array:
    return jnp.concatenate(arrays, axis=axis)


def stack(*arrays: Any, axis: int) -> Array:
    return jnp.stack(arrays, axis=axis)


def split(x: Array, count: int, axis: int) -> Any:
    parts = tuple(jnp.split(x, count, axis=axis))
    return parts if count > 1 else parts[0]


def unstack(x: Array, count: int, axis: int) -> Any:
    parts = tuple(jnp.squeeze(part, axis) for part in jnp.split(x, count, axis=axis))
    return parts if count > 1 else parts[0]


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.reshape(x, shape)


def flatten(x: Array, start: int, end: int) -> Array:
    if x.ndim == 0:
        return jnp.reshape(x, (1,))
    start, end = place_of(start, x.ndim), place_of(end, x.ndim)
    count = 1
    for size in x.shape[start : end + 1]:
        count *= size
    return jnp.reshape(x, (*x.shape[:start], count, *x.shape[end + 1 :]))


def transpose(x: Array, axes: tuple[int, ...] | None) -> Array:
    return jnp.transpose(x, axes)


def swap_axes(x: Array, first: int, second: int) -> Array:
    return jnp.swapaxes(x, first, second)


def squeeze(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    return jnp.squeeze(x, axis)


def expand_dims(x: Array, axis: int | tuple[int, ...]) -> Array:
    return jnp.expand_dims(x, axis)


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(x, shape)


def pad(x: Array, widths: tuple[tuple[int, int], ...], value: float) -> Array:
    return jnp.pad(x, widths, constant_values=jnp.asarray(value, x.dtype))


def item(x: Array) -> Array:
    if x.size != 1:
        raise InputError(f"an array of shape {x.shape} has not one element: reduce it before Item()")
    return jnp.reshape(x, ())


def at_least_1d(x: Array) -> Array:
    return jnp.atleast_1d(x)


def to_tensor(x: Any) -> Array:
    return jnp.asarray(x)


def shape_of(x: Array) -> Array:
    return jnp.asarray(jnp.shape(x), jnp.int32)


def size_of(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    shape = jnp.shape(x)
    axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    count = 1
    for i in axes:
        count *= shape[i]
    return jnp.asarray(count, jnp.int32)
