"""Operations that change a shape and no value."""

from __future__ import annotations

import math
from typing import Any

from capibara.compose.backends.conversion import place_of
from capibara.compose.backends.portable.space import as_arrays, space
from capibara.compose.errors import InputError

Array = Any


def concat(*arrays: Any, axis: int | None) -> Array:
    return space(*arrays).concatenate(arrays, axis)


def stack(*arrays: Any, axis: int) -> Array:
    return space(*arrays).stack(arrays, axis)


def split(x: Array, count: int, axis: int) -> Any:
    size = x.shape[axis] // count
    before = (slice(None),) * place_of(axis, x.ndim)
    xp = space(x)
    parts = tuple(xp.getitem(x, (*before, slice(i * size, (i + 1) * size))) for i in range(count))
    return parts if count > 1 else parts[0]


def unstack(x: Array, count: int, axis: int) -> Any:
    before = (slice(None),) * place_of(axis, x.ndim)
    parts = tuple(space(x).getitem(x, (*before, i)) for i in range(count))
    return parts if count > 1 else parts[0]


def reshape(x: Array, shape: tuple[int, ...]) -> Array:
    xp, x = as_arrays(x)
    return xp.reshape(x, shape)


def flatten(x: Array, start: int, end: int) -> Array:
    xp = space(x)
    if x.ndim == 0:
        return xp.reshape(x, (1,))
    start, end = place_of(start, x.ndim), place_of(end, x.ndim)
    return xp.reshape(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]))


def transpose(x: Array, axes: tuple[int, ...] | None) -> Array:
    return space(x).transpose(x, axes)


def swap_axes(x: Array, first: int, second: int) -> Array:
    return space(x).swapaxes(x, first, second)


def squeeze(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    if axis is None:
        gone = {i for i, n in enumerate(x.shape) if n == 1}
    else:
        gone = {place_of(a, x.ndim) for a in ((axis,) if isinstance(axis, int) else axis)}
        for a in gone:
            if x.shape[a] != 1:
                raise InputError(f"squeeze: dimension {a} of shape {tuple(x.shape)} is not 1")
    return space(x).reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in gone))


def expand_dims(x: Array, axis: int | tuple[int, ...]) -> Array:
    xp, x = as_arrays(x)
    places = (axis,) if isinstance(axis, int) else axis
    rank = x.ndim + len(places)
    new = {place_of(a, rank) for a in places}
    sizes = iter(x.shape)
    return xp.reshape(x, tuple(1 if i in new else next(sizes) for i in range(rank)))


def broadcast_to(x: Array, shape: tuple[int, ...]) -> Array:
    xp, x = as_arrays(x)
    return xp.broadcast_to(x, shape)


def pad(x: Array, widths: tuple[tuple[int, int], ...], value: float) -> Array:
    xp = space(x)
    for axis, pair in enumerate(widths):
        if pair == (0, 0):
            continue
        rows = [x]
        for place, width in zip((0, 1), pair, strict=True):
            if width:
                shape = tuple(width if i == axis else n for i, n in enumerate(x.shape))
                rows.insert(place * len(rows), xp.full(shape, value, xp.dtype_of(x), x))
        x = xp.concatenate(rows, axis)
    return x


def item(x: Array) -> Array:
    if math.prod(x.shape) != 1:
        raise InputError(f"an array of shape {tuple(x.shape)} has not one element: reduce it before Item()")
    return space(x).reshape(x, ())


def at_least_1d(x: Array) -> Array:
    xp, x = as_arrays(x)
    return xp.reshape(x, (1,)) if x.ndim == 0 else x


def to_tensor(x: Any) -> Array:
    return space(x).asarray(x)


def _shape(x: Any) -> tuple[int, ...]:
    return tuple(getattr(x, "shape", ()))


def shape_of(x: Array) -> Array:
    return _whole(x, list(_shape(x)))


def _whole(x: Array, value: Any) -> Array:
    return space(x).asarray(value, "int32", x)


def size_of(x: Array, axis: int | tuple[int, ...] | None) -> Array:
    shape = _shape(x)
    axes = range(len(shape)) if axis is None else (axis,) if isinstance(axis, int) else axis
    return _whole(x, math.prod(shape[i] for i in axes))
