"""Transforms along a dimension that is sharded over devices.

A device has a block of the signal. There are two ways to distribute the transform:

* if another dimension can be sharded instead: one all-to-all before and one after, with whole transforms between them
  (*slabs*);
* a single long signal ``n = r · s`` is a matrix of ``r`` rows. Columns are transformed, multiplied with roots of
  unity, then rows: three all-to-alls, of which the last one puts the spectrum in order.

If neither divides evenly (or a long signal has more than 2²⁸ elements), every device gathers the whole signal and
keeps its block of the spectrum.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.collective.rings import Axis
from capibara.ops.fft.matmul import MOST_LENGTH
from capibara.ops.fft.plan import roots

__all__ = ["along_split", "way"]

# (parts, axis) → parts, transformed along one whole axis
_Local = Callable[[list[jax.Array], int], list[jax.Array]]


def way(shape: tuple[int, ...], axis: int, devices: int) -> tuple[str, int]:
    """How to transform ``axis`` of the parts of ``shape``: ``slabs`` and the other dimension, ``matrix`` and the number
    of its rows, or ``gather``."""
    if devices == 1:
        return "gather", 0
    for other in range(len(shape)):
        if other != axis and shape[other] and shape[other] % devices == 0:
            return "slabs", other
    n = shape[axis] * devices
    if n % devices**2 or n > MOST_LENGTH:
        return "gather", 0
    # Rows and columns are multiples of the devices, and about as many of the one as of the other.
    rest = n // devices**2
    a = max(d for d in range(1, math.isqrt(rest) + 1) if rest % d == 0)
    return "matrix", devices * a


def along_split(
    parts: list[jax.Array], axis: int, names: Axis, inverse: bool, local: _Local
) -> list[jax.Array]:
    """Transform ``axis``, of which each device has a block; each gets its block of the result. In ``shard_map``."""
    devices = lax.axis_size(names)
    shape = parts[0].shape
    kind, detail = way(shape, axis, devices)
    if kind == "slabs":
        parts = [lax.all_to_all(x, names, detail, axis, tiled=True) for x in parts]
        return [lax.all_to_all(x, names, axis, detail, tiled=True) for x in local(parts, axis)]
    if kind == "gather":
        parts = local([lax.all_gather(x, names, axis=axis, tiled=True) for x in parts], axis)
        start = lax.axis_index(names) * shape[axis]
        return [lax.dynamic_slice_in_dim(x, start, shape[axis], axis) for x in parts]
    n = shape[axis] * devices
    matrix = (*shape[:axis], detail // devices, n // detail, *shape[axis + 1 :])
    parts = [lax.all_to_all(x.reshape(matrix), names, axis + 1, axis, tiled=True) for x in parts]
    parts = _turn(local(parts, axis), axis, names, n, inverse)
    parts = [lax.all_to_all(x, names, axis, axis + 1, tiled=True) for x in parts]
    parts = local(parts, axis + 1)
    # Frequency k1 + rows · k2 stands at [k1, k2], and the device has some of the k1.
    parts = [lax.all_to_all(x, names, axis + 1, axis, tiled=True) for x in parts]
    return [jnp.swapaxes(x, axis, axis + 1).reshape(shape) for x in parts]


def _turn(parts: list[jax.Array], axis: int, names: Axis, n: int, inverse: bool) -> list[jax.Array]:
    """Times the root of unity to the power of (frequency) · (column); the device has some of the columns."""
    rows, columns = parts[0].shape[axis : axis + 2]
    wide = jnp.promote_types(parts[0].real.dtype, jnp.float32)
    k = lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    j = (
        lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        + lax.axis_index(names).astype(jnp.int32) * columns
    )
    c, s = roots(k * j, n, jnp, wide)
    s = s if inverse else -s
    c, s = (v.reshape(rows, columns, *(1,) * (parts[0].ndim - axis - 2)) for v in (c, s))
    if len(parts) == 1:
        return [parts[0] * lax.complex(c, s)]
    re, im = (x.astype(wide) for x in parts)
    return [(re * c - im * s).astype(parts[0].dtype), (re * s + im * c).astype(parts[0].dtype)]
