"""Collectives built from ``ppermute``: in each step, each device sends one chunk to one other device.

A TPU runs collective-permutes asynchronously, so the steps overlap with arithmetic that does not depend on them; an
all-reduce or (without compiler flags) an all-gather blocks. Every function runs inside ``shard_map`` with ``axis`` an
axis name or a tuple of names. Steps are unrolled: a program grows with the number of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.jax_versions import varying_axes

__all__ = ["Axis", "exchange", "gather", "reduce_chunks", "shift", "to_all", "visitors"]

Axis = str | tuple[str, ...]


def shift(x: Any, axis: Axis, distance: int) -> Any:
    """``x`` of the device ``distance`` places before this one on the ring."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + distance) % size) for i in range(size)])


def to_all(x: jax.Array, axis: Axis) -> jax.Array:
    """``lax.all_gather(x, axis)``, inside ``shard_map(check_vma=True)`` typed as the same on all devices.

    Only with such types does the transpose know that a cotangent is the same everywhere. Without them
    (``check_vma=False``, ``vmap``) it has to sum over the devices, like that of ``lax.psum``.
    """
    names = {axis} if isinstance(axis, str) else set(axis)
    typed = names <= varying_axes(jax.typeof(lax.axis_index(axis)))
    return lax.all_gather(x, axis, to="invarying" if typed else "varying")


def visitors(x: jax.Array, axis: Axis) -> Iterator[tuple[int, jax.Array]]:
    """``(d, x of the device d places before this one)`` for each device, each ``d`` once; negative is after.

    Two streams, one in each direction: the links of a torus work both ways, so it takes half the steps. The next
    step's transfers are issued before a piece is yielded: they do not depend on its use.
    """
    size = lax.axis_size(axis)
    back = (size - 1) // 2
    ahead = size - 1 - back
    forward = backward = x
    pieces = [(0, x)]
    for step in range(1, ahead + 1):
        forward = shift(forward, axis, 1)
        coming = [(step, forward)]
        if step <= back:
            backward = shift(backward, axis, -1)
            coming.append((-step, backward))
        yield from pieces
        pieces = coming
    yield from pieces


def gather(x: jax.Array, axis: Axis, dimension: int) -> jax.Array:
    """``lax.all_gather(x, axis, axis=dimension, tiled=True)`` by two rings."""
    size, place, length = lax.axis_size(axis), lax.axis_index(axis), x.shape[dimension]
    shape = list(x.shape)
    shape[dimension] *= size
    whole = jnp.zeros(shape, x.dtype)
    for distance, piece in visitors(x, axis):
        start = ((place - distance) % size) * length
        whole = lax.dynamic_update_slice_in_dim(whole, piece, start, dimension)
    return whole


def reduce_chunks(
    chunk: Callable[[jax.Array], jax.Array],
    axis: Axis,
    combine: Callable[[jax.Array, jax.Array], jax.Array] = jnp.add,
) -> jax.Array:
    """Reduce-scatter by a ring: device ``i`` gets ``chunk(i)`` of all devices, combined.

    ``chunk(index)`` is computed at the step that needs it, while the partial result is transferred: if it is a matrix
    product, it overlaps with the transfer.
    """
    size, place = lax.axis_size(axis), lax.axis_index(axis)
    total = chunk((place - 1) % size)
    for step in range(2, size + 1):
        coming = shift(total, axis, 1)
        total = combine(coming, chunk((place - step) % size))
    return total


def exchange(x: jax.Array, axis: Axis) -> jax.Array:
    """``x [devices, …]``, row ``j`` for device ``j`` → row ``i`` from device ``i``: an all-to-all by permutes."""
    size, place = lax.axis_size(axis), lax.axis_index(axis)
    own = lax.dynamic_index_in_dim(x, place, 0)
    out = lax.dynamic_update_slice_in_dim(jnp.zeros_like(x), own, place, 0)
    for distance in range(1, size):
        row = lax.dynamic_index_in_dim(x, (place + distance) % size, 0)
        out = lax.dynamic_update_slice_in_dim(out, shift(row, axis, distance), (place - distance) % size, 0)
    return out
