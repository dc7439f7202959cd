"""Convolutions, pooling and normalisation of images and signals: ``[batch, channels, *space]``.

``padding`` has (before, after) for each dimension of space; strides, windows and dilations one number each.
"""

from __future__ import annotations

import math
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.compose.backends.batches import any_batch

__all__ = [
    "avg_pool",
    "batch_norm",
    "channel_add",
    "channel_multiply",
    "convolution",
    "group_norm",
    "max_pool",
]

Array = jax.Array
Row = tuple[int, ...]
Pairs = tuple[tuple[int, int], ...]


def convolution(
    x: Array, weight: Array, stride: Row, padding: Pairs, dilation: Row, groups: int, accumulate: str
) -> Array:
    """``x [n, in, *s]``, ``weight [out, in / groups, *k]``: cross-correlation, as in other libraries."""
    space = "HWD"[: x.ndim - 2]
    layout = ("NC" + space, "OI" + space, "NC" + space)
    # Both operands in one dtype: the gradient of a mixed product is not defined.
    wide = jnp.promote_types(x.dtype, accumulate)
    out = lax.conv_general_dilated(
        x.astype(wide),
        weight.astype(wide),
        stride,
        padding,
        rhs_dilation=dilation,
        dimension_numbers=layout,
        feature_group_count=groups,
    )
    return out.astype(x.dtype)


def _per_channel(values: Array, rank: int) -> Array:
    return values.reshape(-1, *(1,) * (rank - 2))


def channel_add(x: Array, values: Array) -> Array:
    return x + _per_channel(values, x.ndim)


def channel_multiply(x: Array, values: Array) -> Array:
    return x * _per_channel(values, x.ndim)


def _windows(x: Array, kernel: Row, stride: Row, padding: Pairs, dilation: Row, fill: float) -> Array:
    """Every window's elements along a new first dimension, in the order of the kernel."""
    padded = jnp.pad(x, ((0, 0), (0, 0), *padding), constant_values=fill)
    space = padded.shape[2:]
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(space, kernel, dilation, stride, strict=True)]
    picked = []
    for offset in product(*map(range, kernel)):
        start = [o * d for o, d in zip(offset, dilation, strict=True)]
        stop = [b + (n - 1) * s + 1 for b, n, s in zip(start, out, stride, strict=True)]
        picked.append(
            lax.slice(padded, (0, 0, *start), (*padded.shape[:2], *stop), (1, 1, *stride)),
        )
    return jnp.stack(picked)


@any_batch
def max_pool(x: Array, kernel: Row, stride: Row, padding: Pairs, dilation: Row) -> Array:
    """The largest of each window, the first of several; padding counts as minus infinity."""
    if all(d == 1 for d in dilation):
        low = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
        pads = ((0, 0), (0, 0), *padding)
        return lax.reduce_window(x, np.asarray(low, x.dtype), lax.max, (1, 1, *kernel), (1, 1, *stride), pads)
    windows = _windows(x, kernel, stride, padding, dilation, -np.inf)
    return jnp.take_along_axis(windows, jnp.argmax(windows, axis=0)[None], axis=0)[0]


@any_batch
def avg_pool(x: Array, kernel: Row, stride: Row, padding: Pairs, dilation: Row, count_padding: bool) -> Array:
    total = jnp.sum(_windows(x, kernel, stride, padding, dilation, 0), axis=0)
    if count_padding:
        return total / math.prod(kernel)
    one = jnp.ones((1, 1, *x.shape[2:]), x.dtype)
    return total / jnp.sum(_windows(one, kernel, stride, padding, dilation, 0), axis=0)


def group_norm(x: Array, groups: int, epsilon: float, accumulate: str) -> Array:
    wide = x.astype(accumulate).reshape(x.shape[0], groups, -1)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return wide.reshape(x.shape).astype(x.dtype)


def batch_norm(
    x: Array, mean: Array, variance: Array, momentum: float, epsilon: float, accumulate: str, train: bool
) -> tuple[Array, Array, Array]:
    """In training the batch's own statistics, and their moving averages; otherwise the given ones."""
    wide = x.astype(accumulate)
    centre, spread = mean.astype(accumulate), variance.astype(accumulate)
    if train:
        axes = (0, *range(2, x.ndim))
        centre = jnp.mean(wide, axis=axes)
        spread = jnp.mean(jnp.square(wide - _per_channel(centre, x.ndim)), axis=axes)
        count = x.size // x.shape[1]
        unbiased = spread * (count / max(count - 1, 1))
        fresh = lax.stop_gradient((centre, unbiased))
        mean, variance = (
            old + (new.astype(old.dtype) - old) * momentum
            for old, new in zip((mean, variance), fresh, strict=True)
        )
    scaled = (wide - _per_channel(centre, x.ndim)) * _per_channel(lax.rsqrt(spread + epsilon), x.ndim)
    return scaled.astype(x.dtype), mean, variance
