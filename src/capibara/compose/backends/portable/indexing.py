"""Picking elements, and arrays made like others. Indices outside are clipped, as on JAX."""

from __future__ import annotations

import math
from typing import Any

from capibara.compose.backends.portable.space import as_arrays, space

Array = Any


def indexer(x: Array, index: tuple[Any, ...]) -> Array:
    """``index``: an int, ``None``, ``...`` or ``("slice", start, stop, step)`` for each place."""
    return space(x).getitem(x, tuple(slice(*i[1:]) if isinstance(i, tuple) else i for i in index))


def _counted(x: Array, indices: Array, axis: int) -> Array:
    """Negative indices count from the end, as in NumPy."""
    return indices + (indices < 0) * x.shape[axis]


def take(x: Array, indices: Array, axis: int) -> Array:
    return space(x).take(x, _counted(x, indices, axis), axis)


def permute_tensor(x: Array, indices: Array) -> Array:
    return take(x, indices, 0)


def take_along_axis(x: Array, indices: Array, axis: int) -> Array:
    return space(x).take_along_axis(x, _counted(x, indices, axis), axis)


def scatter(x: Array, indices: Array, updates: Array, axis: int, add: bool) -> Array:
    xp, x = as_arrays(x)
    return xp.scatter(x, _counted(x, indices, axis), xp.asarray(updates, None, x), axis, add)


def scatter_along_axis(x: Array, indices: Array, updates: Array, axis: int, add: bool) -> Array:
    xp, x = as_arrays(x)
    updates = xp.asarray(updates, None, x)
    return xp.scatter_along_axis(x, _counted(x, indices, axis), updates, axis, add)


def full_like(x: Array, value: float) -> Array:
    xp = space(x)
    return xp.full(x.shape, value, xp.dtype_of(x), x)


def one_hot(x: Array, depth: int, dtype: str) -> Array:
    xp = space(x)
    return xp.astype(xp.reshape(x, (*x.shape, 1)) == xp.arange(0, depth, 1, "int32", x), dtype)


def positional_encoding(x: Array, base: float) -> Array:
    """Sines in the even and cosines in the odd places of the last dimension, added to x."""
    xp = space(x)
    length, size = x.shape[-2:]
    wide = xp.wide(x)
    places = xp.arange(0, size, 2, wide, x)
    rate = xp.exp(places * (-math.log(base) / size))
    angle = xp.reshape(xp.arange(0, length, 1, wide, x), (length, 1)) * rate
    table = xp.reshape(xp.stack([xp.sin(angle), xp.cos(angle)], -1), (length, -1))[:, :size]
    return xp.astype(xp.astype(x, wide) + table, xp.dtype_of(x))


def trapezoid(y: Array, x: Array, axis: int) -> Array:
    xp = space(y)
    axis %= y.ndim
    if x.ndim == 1:
        x = xp.reshape(x, tuple(-1 if i == axis else 1 for i in range(y.ndim)))
    before = (slice(None),) * axis
    low, high = (*before, slice(None, -1)), (*before, slice(1, None))
    # x may have one size along other dimensions, but has its own along this one.
    step = xp.getitem(x, high) - xp.getitem(x, low)
    return xp.sum(step * (xp.getitem(y, high) + xp.getitem(y, low)) / 2, axis)


def unique(x: Array, size: int, fill: float) -> tuple[Array, Array, Array]:
    """The ``size`` smallest different values in rising order (then ``fill``), their counts, how many there are."""
    xp = space(x)
    values, _, counts = xp.unique(xp.stop(x))
    values, counts = values[:size], counts[:size]
    missing = size - values.shape[0]
    values = xp.concatenate([values, xp.full((missing,), fill, xp.dtype_of(values), values)], 0)
    counts = xp.concatenate([counts, xp.full((missing,), 0, "int32", values)], 0)
    return values, counts, xp.sum(xp.astype(counts > 0, "int32"))
