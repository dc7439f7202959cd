"""Matrix products overlapped with a collective: each step multiplies one piece while the next one is transferred."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.checks import check_precision
from capibara.ops.collective import placement, rings
from capibara.ops.collective.rings import Axis
from capibara.ops.errors import OpShapeError, OpTypeError

__all__ = ["all_gather_matmul", "matmul_reduce_scatter"]


def _check(name: str, x: Any, weight: Any, precision: Any) -> None:
    for label, array in (("x", x), ("weight", weight)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"{name}: {label} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OpTypeError(f"{name}: {label} must be floating point, got {array.dtype}")
    if len(x.shape) < 2 or len(weight.shape) != 2 or x.shape[-1] != weight.shape[0]:
        raise OpShapeError(
            f"{name}: expected x [..., rows, inner] and weight [inner, columns], got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    check_precision(name, precision)


def _product(x: jax.Array, weight: jax.Array, precision: Any) -> jax.Array:
    """``x @ weight`` with sums of at least float32."""
    wide = jnp.promote_types(jnp.promote_types(x.dtype, weight.dtype), jnp.float32)
    return jnp.matmul(x, weight, precision=precision, preferred_element_type=wide)


def all_gather_matmul(
    x: jax.Array, weight: jax.Array, *, axis_name: Axis | None = None, precision: Any = None
) -> jax.Array:
    """All rows of ``x``, gathered from all devices, times this device's ``weight``, overlapped.

    Only inside ``jax.shard_map``. The first half of a tensor-parallel layer whose activations are sharded by rows.
    The pieces travel along a ring in both directions; each is multiplied while the next is transferred.
    Differentiable: the derivative uses the corresponding rings.

    Args:
      x: ``[..., rows, inner]``, this device's rows.
      weight: ``[inner, columns]``, this device's columns.
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call.
      precision: As in ``jnp.matmul``.

    Returns:
      ``[..., devices * rows, columns]``, in the promoted dtype; sums are float32 (float64 for float64).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Equivalent JAX: ``lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ weight``.
    Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition", ASPLOS.
    """
    name = "all_gather_matmul"
    _check(name, x, weight, precision)
    names = placement.bound_axis(name, placement.check_axis_name(name, axis_name), needed=True)
    assert names is not None
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    devices, place, rows = lax.axis_size(names), lax.axis_index(names), x.shape[-2]
    dtype = jnp.promote_types(x.dtype, weight.dtype)
    out = jnp.zeros((*x.shape[:-2], devices * rows, weight.shape[1]), dtype)
    for distance, piece in rings.visitors(x, names):
        part = _product(piece, weight, precision).astype(dtype)
        out = lax.dynamic_update_slice_in_dim(out, part, ((place - distance) % devices) * rows, out.ndim - 2)
    return out


def matmul_reduce_scatter(
    x: jax.Array, weight: jax.Array, *, axis_name: Axis | None = None, precision: Any = None
) -> jax.Array:
    """``x @ weight`` summed over the devices, device ``i`` with the ``i``-th part of the rows, overlapped.

    Only inside ``jax.shard_map``. The second half of a tensor-parallel layer: ``inner`` is sharded over the devices.
    A device multiplies the rows of one device at a time, while the sum for the others travels along a ring.
    Differentiable.

    Args:
      x: ``[..., devices * rows, inner]``, this device's part of the inner dimension.
      weight: ``[inner, columns]``, the same part of it.
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call.
      precision: As in ``jnp.matmul``.

    Returns:
      ``[..., rows, columns]``, in the promoted dtype. Products are summed in float32 (float64 for float64); partial
      sums are rounded to the promoted dtype when sent.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Equivalent JAX: ``lax.psum_scatter(x @ weight, axis_name, scatter_dimension=x.ndim - 2, tiled=True)``.
    Source: Wang et al. 2023, "Overlap communication with dependent computation via decomposition", ASPLOS.
    """
    name = "matmul_reduce_scatter"
    _check(name, x, weight, precision)
    names = placement.bound_axis(name, placement.check_axis_name(name, axis_name), needed=True)
    assert names is not None
    x, weight = jnp.asarray(x), jnp.asarray(weight)
    devices, dimension = lax.axis_size(names), x.ndim - 2
    if x.shape[-2] % devices:
        raise OpShapeError(
            f"{name}: the rows of x {tuple(x.shape)} must be a multiple of the {devices} devices"
        )
    rows = x.shape[-2] // devices
    dtype = jnp.promote_types(x.dtype, weight.dtype)

    def chunk(index: jax.Array) -> jax.Array:
        return _product(lax.dynamic_slice_in_dim(x, index * rows, rows, dimension), weight, precision)

    def combine(coming: jax.Array, own: jax.Array) -> jax.Array:
        return (coming.astype(own.dtype) + own).astype(dtype)

    # The first partial sum is rounded for the wire too, so that every step sends the same dtype.
    place = lax.axis_index(names)
    total = chunk((place - 1) % devices).astype(dtype)
    for step in range(2, devices + 1):
        coming = rings.shift(total, names, 1)
        total = combine(coming, chunk((place - step) % devices))
    return total
