"""Picking elements, and arrays made from nothing but a shape.

Indices that lie outside of an array are clipped (``take``, ``permute``), except those written in the model itself,
which are refused when the shape is known.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose.errors import InputError

__all__ = [
    "arange",
    "eye",
    "eye_complement",
    "full",
    "full_like",
    "indexer",
    "one_hot",
    "permute_tensor",
    "positional_encoding",
    "randint",
    "randn",
    "random_uniform",
    "scatter",
    "scatter_along_axis",
    "take",
    "take_along_axis",
    "trapezoid",
    "unique",
]

Array = jax.Array


def indexer(x: Array, index: tuple[Any, ...]) -> Array:
    """``index``: an int, ``None``, ``...`` or ``("slice", start, stop, step)`` for each place."""
    return x[tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in index)]


def _counted(indices: Array, size: int) -> Array:
    """Negative indices count from the end, as in NumPy; JAX's "clip" alone would make them 0."""
    return jnp.where(indices < 0, indices + size, indices)


def take(x: Array, indices: Array, axis: int) -> Array:
    return jnp.take(x, _counted(indices, x.shape[axis]), axis=axis, mode="clip")


def permute_tensor(x: Array, indices: Array) -> Array:
    return take(x, indices, 0)


def take_along_axis(x: Array, indices: Array, axis: int) -> Array:
    return jnp.take_along_axis(x, _counted(indices, x.shape[axis]), axis=axis, mode="clip")


def _put(x: Array, index: tuple[Any, ...], updates: Array, add: bool) -> Array:
    at = x.at[index]
    return at.add(updates) if add else at.set(updates)


def _inside(indices: Array, size: int) -> Array:
    return jnp.clip(_counted(indices, size), 0, size - 1)


def scatter(x: Array, indices: Array, updates: Array, axis: int, add: bool) -> Array:
    before = (slice(None),) * (axis % x.ndim)
    return _put(x, (*before, _inside(jnp.asarray(indices), x.shape[axis])), updates, add)


def scatter_along_axis(x: Array, indices: Array, updates: Array, axis: int, add: bool) -> Array:
    place, indices = axis % x.ndim, jnp.asarray(indices)
    grid = [jax.lax.broadcasted_iota(jnp.int32, indices.shape, i) for i in range(x.ndim)]
    grid[place] = _inside(indices, x.shape[axis])
    return _put(x, tuple(grid), updates, add)


def arange(start: float, stop: float, step: float, dtype: str) -> Array:
    return jnp.arange(start, stop, step, dtype=dtype)


def eye(rows: int, columns: int, dtype: str) -> Array:
    return jnp.eye(rows, columns, dtype=dtype)


def eye_complement(rows: int, columns: int, dtype: str) -> Array:
    return 1 - jnp.eye(rows, columns, dtype=dtype)


def full(shape: tuple[int, ...], value: float, dtype: str) -> Array:
    return jnp.full(shape, value, dtype)


def full_like(x: Array, value: float) -> Array:
    return jnp.full_like(x, value)


def one_hot(x: Array, depth: int, dtype: str) -> Array:
    return jax.nn.one_hot(x, depth, dtype=jnp.dtype(dtype))


def positional_encoding(x: Array, base: float) -> Array:
    """Sines in the even and cosines in the odd places of the last dimension, added to x."""
    length, size = x.shape[-2:]
    wide = jnp.promote_types(x.dtype, jnp.float32)  # positions past 256 are not exact in bfloat16
    rate = jnp.asarray(base, wide) ** (-jnp.arange(0, size, 2, dtype=wide) / size)
    angle = jnp.arange(length, dtype=wide)[:, None] * rate
    table = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1).reshape(length, -1)[:, :size]
    return (x.astype(wide) + table).astype(x.dtype)


def _needed(key: Array | None, what: str) -> Array:
    if key is None:
        raise InputError(f"a model with {what} needs randomness: pass key=jax.random.key(…)")
    return key


def randn(shape: tuple[int, ...], dtype: str, key: Array | None) -> Array:
    return jax.random.normal(_needed(key, "Randn"), shape, jnp.dtype(dtype))


def random_uniform(shape: tuple[int, ...], low: float, high: float, dtype: str, key: Array | None) -> Array:
    return jax.random.uniform(_needed(key, "RandomUniform"), shape, jnp.dtype(dtype), low, high)


def randint(shape: tuple[int, ...], low: int, high: int, key: Array | None) -> Array:
    return jax.random.randint(_needed(key, "RandInt"), shape, low, high, jnp.int32)


def trapezoid(y: Array, x: Array, axis: int) -> Array:
    return jnp.trapezoid(y, x, axis=axis)


def unique(x: Array, size: int, fill: float) -> tuple[Array, Array, Array]:
    """The ``size`` smallest different values in rising order (then ``fill``), their counts, how many there are."""
    values, counts = jnp.unique(x, size=size, fill_value=fill, return_counts=True)
    return values, counts.astype(jnp.int32), jnp.sum(counts > 0, dtype=jnp.int32)
