"""Convolutions, pooling and normalisation of images and signals: ``[batch, channels, *space]``.

A convolution is a sum over the kernel's places, each one matrix product with the input shifted by that place.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

from capibara.compose.backends.batches import any_batch
from capibara.compose.backends.portable.space import space

Array = Any
Row = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def _padded(x: Array, padding: Pairs, fill: float) -> Array:
    from capibara.compose.backends.portable.shaping import pad

    return pad(x, ((0, 0), (0, 0), *padding), fill)


def _views(padded: Array, kernel: Row, stride: Row, dilation: Row) -> list[Array]:
    """For each place of the kernel the elements that it meets, one a window."""
    room = padded.shape[2:]
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(room, kernel, dilation, stride, strict=True)]
    views = []
    for offset in product(*map(range, kernel)):
        index = tuple(
            slice(o * d, o * d + (n - 1) * s + 1, s)
            for o, d, n, s in zip(offset, dilation, out, stride, strict=True)
        )
        views.append(space(padded).getitem(padded, (slice(None), slice(None), *index)))
    return views


def convolution(
    x: Array, weight: Array, stride: Row, padding: Pairs, dilation: Row, groups: int, accumulate: str
) -> Array:
    """``x [n, in, *s]``, ``weight [out, in / groups, *k]``: cross-correlation."""
    xp = space(x)
    wide = xp.wide(x, accumulate)
    kernel = tuple(weight.shape[2:])
    views = _views(_padded(xp.astype(x, wide), padding, 0), kernel, stride, dilation)
    room = views[0].shape[2:]
    batch, channels = x.shape[:2]
    features = weight.shape[0]
    each, own = channels // groups, features // groups
    # [n, g, taps · in, positions] against [g, out, taps · in]: one product for the whole kernel.
    columns = xp.stack([xp.reshape(v, (batch, groups, each, math.prod(room))) for v in views], 2)
    columns = xp.reshape(columns, (batch, groups, len(views) * each, math.prod(room)))
    taps = xp.reshape(xp.astype(weight, wide), (groups, own, each, len(views)))
    taps = xp.reshape(xp.swapaxes(taps, 2, 3), (groups, own, len(views) * each))
    out = xp.matmul(taps, columns)
    return xp.astype(xp.reshape(out, (batch, features, *room)), xp.dtype_of(x))


def _per_channel(values: Array, rank: int) -> Array:
    return space(values).reshape(values, (-1, *(1,) * (rank - 2)))


def channel_add(x: Array, values: Array) -> Array:
    return x + _per_channel(values, x.ndim)


def channel_multiply(x: Array, values: Array) -> Array:
    return x * _per_channel(values, x.ndim)


@any_batch
def max_pool(x: Array, kernel: Row, stride: Row, padding: Pairs, dilation: Row) -> Array:
    """The largest of each window, the first of several; padding counts as minus infinity."""
    xp = space(x)
    low = -math.inf if xp.is_float(x) else -(2**31)
    windows = xp.stack(_views(_padded(x, padding, low), kernel, stride, dilation), 0)
    first = xp.argmax(windows, 0, True)
    return xp.getitem(xp.take_along_axis(windows, first, 0), 0)


@any_batch
def avg_pool(x: Array, kernel: Row, stride: Row, padding: Pairs, dilation: Row, count_padding: bool) -> Array:
    xp = space(x)
    total = xp.sum(xp.stack(_views(_padded(x, padding, 0), kernel, stride, dilation), 0), 0)
    if count_padding:
        return total / math.prod(kernel)
    one = xp.full((1, 1, *x.shape[2:]), 1, xp.dtype_of(x), x)
    return total / xp.sum(xp.stack(_views(_padded(one, padding, 0), kernel, stride, dilation), 0), 0)


def group_norm(x: Array, groups: int, epsilon: float, accumulate: str) -> Array:
    xp = space(x)
    wide = xp.reshape(xp.astype(x, accumulate), (x.shape[0], groups, -1))
    count = wide.shape[-1]
    wide = wide - xp.sum(wide, -1, True) / count
    wide = wide / xp.sqrt(xp.sum(wide * wide, -1, True) / count + epsilon)
    return xp.astype(xp.reshape(wide, x.shape), xp.dtype_of(x))


def batch_norm(
    x: Array, mean: Array, variance: Array, momentum: float, epsilon: float, accumulate: str, train: bool
) -> tuple[Array, Array, Array]:
    xp = space(x)
    wide = xp.astype(x, accumulate)
    centre, spread = xp.astype(mean, accumulate), xp.astype(variance, accumulate)
    if train:
        axes = (0, *range(2, x.ndim))
        count = math.prod(x.shape) // x.shape[1]
        centre = xp.sum(wide, axes) / count
        away = wide - _per_channel(centre, x.ndim)
        spread = xp.sum(away * away, axes) / count
        unbiased = xp.stop(spread) * (count / max(count - 1, 1))
        mean, variance = (
            old + (xp.astype(new, xp.dtype_of(old)) - old) * momentum
            for old, new in ((mean, xp.stop(centre)), (variance, unbiased))
        )
    scale = 1 / xp.sqrt(spread + epsilon)
    out = (wide - _per_channel(centre, x.ndim)) * _per_channel(scale, x.ndim)
    return xp.astype(out, xp.dtype_of(x)), mean, variance
