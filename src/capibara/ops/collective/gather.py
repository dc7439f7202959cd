"""Gather, scatter and exchange, by XLA's own collectives or by rings of permutes."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.errors import did_you_mean
from capibara.ops.collective import placement, reductions, rings
from capibara.ops.collective.rings import Axis
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError

__all__ = ["all_to_all", "optimized_all_gather", "reduce_scatter"]


def _array(name: str, x: Any) -> Any:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise OpTypeError(f"{name}: x must be an array, got {type(x).__name__}")
    return x


def _flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise OpTypeError(f"{name}: use_ring_algorithm must be True or False, got {value!r}")


def _dimension(name: str, argument: str, value: Any, x: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OpTypeError(f"{name}: {argument} must be an int, a dimension of x; got {value!r}")
    value, rank = operator.index(value), len(x.shape)
    if not -rank <= value < rank:
        raise OpShapeError(f"{name}: {argument} must be a dimension of x {tuple(x.shape)}, got {value}")
    return value % rank


def _divisible(name: str, x: Any, dimension: int, devices: int) -> None:
    if x.shape[dimension] % devices:
        raise OpShapeError(
            f"{name}: dimension {dimension} of x {tuple(x.shape)} must be a multiple of the {devices} devices"
        )


def optimized_all_gather(
    x: jax.Array, axis: int = 0, use_ring_algorithm: bool = False, *, axis_name: Axis | None = None
) -> jax.Array:
    """Concatenate every device's ``x`` along dimension ``axis``, on every device.

    Inside ``jax.shard_map`` each device passes its own ``x``. Outside, ``x`` is an array on a mesh: the result has
    the same values, no longer sharded along dimension ``axis`` (over ``axis_name``, if given). Differentiable; the
    derivative of a ring is a ring.

    Args:
      x: Any shape with at least one dimension, any dtype; shape and dtype are the same on all devices.
      axis: The dimension to join along.
      use_ring_algorithm: By ``ppermute`` in both directions of a ring, ``devices / 2`` steps: asynchronous on TPUs,
        so it overlaps with arithmetic that does not need the result. If a matrix product follows, use
        ``all_gather_matmul``, which overlaps with it. False: XLA's all-gather.
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call, or, outside, those
        that the dimension is sharded over.

    Returns:
      ``x.shape`` with dimension ``axis`` times the number of devices (inside ``shard_map``; typed as varying).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Equivalent JAX: ``lax.all_gather(x, axis_name, axis=axis, tiled=True)``.
    """
    name = "optimized_all_gather"
    _array(name, x)
    _flag(name, use_ring_algorithm)
    axis = _dimension(name, "axis", axis, x)
    names = placement.check_axis_name(name, axis_name)
    bound = placement.bound_axis(name, names, needed=False)
    if bound is not None:
        return _gather(jnp.asarray(x), bound, axis, use_ring_algorithm)
    found = placement.split_over(name, x, names, axis)
    if found is None:
        return x
    sharding, over = found
    # Of several axes that split a dimension only the last ones, the fastest, can be joined in place.
    order = placement.shard_axes(sharding, axis)
    over_names = (over,) if isinstance(over, str) else over
    if order[len(order) - len(over_names) :] != over_names:
        raise OpValueError(
            f"{name}: dimension {axis} is split over {order}; {over_names} can't be joined before the axes after it"
        )
    return placement.over_shards(
        lambda shard: _gather(shard, over, axis, use_ring_algorithm),
        [x],
        sharding.mesh,
        sharding.spec,
        placement.without(sharding, over, axis),
    )


def _gather(x: jax.Array, axis_name: Axis, dimension: int, ring: bool) -> jax.Array:
    if not x.shape[dimension]:
        return x  # any number of nothing; XLA's all-gather refuses it
    if ring:
        return rings.gather(x, axis_name, dimension)
    return lax.all_gather(x, axis_name, axis=dimension, tiled=True)


def reduce_scatter(
    x: jax.Array,
    axis: int = 0,
    reduction_op: str = "sum",
    use_ring_algorithm: bool = False,
    *,
    axis_name: Axis | None = None,
) -> jax.Array:
    """Reduce ``x`` over all devices; device ``i`` gets the ``i``-th part along dimension ``axis``.

    Only inside ``jax.shard_map``. Differentiable.

    Args:
      x: Dimension ``axis`` is a multiple of the number of devices.
      axis: The dimension to split.
      reduction_op: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"product"``.
      use_ring_algorithm: By ``ppermute``, asynchronous on TPUs; partial results are rounded to the dtype of ``x`` at
        each of the ``devices - 1`` steps. False: XLA's reduce-scatter (for a maximum, minimum or product, all-to-all
        and a reduction).
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Equivalent JAX, for a sum: ``lax.psum_scatter(x, axis_name, scatter_dimension=axis, tiled=True)``.
    """
    name = "reduce_scatter"
    _array(name, x)
    _flag(name, use_ring_algorithm)
    axis = _dimension(name, "axis", axis, x)
    if reduction_op not in reductions.REDUCE:
        raise OpValueError(
            f"{name}: reduction_op must be one of {', '.join(reductions.REDUCE)}, got {reduction_op!r}."
            f"{did_you_mean(str(reduction_op), reductions.REDUCE)}"
        )
    if not (jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)):
        raise OpTypeError(f"{name}: x must be floating point or integer, got {x.dtype}")
    names = placement.bound_axis(name, placement.check_axis_name(name, axis_name), needed=True)
    assert names is not None
    devices = lax.axis_size(names)
    _divisible(name, x, axis, devices)
    x, length = jnp.asarray(x), x.shape[axis] // devices
    if use_ring_algorithm:
        total = rings.reduce_chunks(
            lambda i: lax.dynamic_slice_in_dim(x, i * length, length, axis),
            names,
            reductions.COMBINE[reduction_op],
        )
    elif reduction_op in ("sum", "mean"):
        total = lax.psum_scatter(x, names, scatter_dimension=axis, tiled=True)
    else:
        rest = (n for i, n in enumerate(x.shape) if i != axis)
        rows = jnp.moveaxis(x, axis, 0).reshape(devices, length, *rest)
        received = lax.all_to_all(rows, names, 0, 0, tiled=True)
        total = jnp.moveaxis(reductions.REDUCE[reduction_op](received, axis=0).astype(x.dtype), 0, axis)
    return total / devices if reduction_op == "mean" else total


def all_to_all(
    x: jax.Array,
    split_axis: int = 0,
    concat_axis: int = 0,
    use_ring_algorithm: bool = False,
    *,
    axis_name: Axis | None = None,
) -> jax.Array:
    """Device ``i`` sends the ``j``-th part of its ``x`` to device ``j``, and concatenates what it receives, in order.

    Only inside ``jax.shard_map``. Differentiable. Used to route tokens to experts, or to change the dimension along
    which an array is sharded.

    Args:
      x: Dimension ``split_axis`` is a multiple of the number of devices. Any dtype.
      split_axis: The dimension to split.
      concat_axis: The dimension to join along.
      use_ring_algorithm: By ``devices - 1`` independent ``ppermute``, asynchronous on TPUs. False: XLA's all-to-all.
      axis_name: The mesh axis or axes; by default all axes of the ``shard_map`` around the call.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Equivalent JAX: ``lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=True)``.
    """
    name = "all_to_all"
    _array(name, x)
    _flag(name, use_ring_algorithm)
    split = _dimension(name, "split_axis", split_axis, x)
    concat = _dimension(name, "concat_axis", concat_axis, x)
    names = placement.bound_axis(name, placement.check_axis_name(name, axis_name), needed=True)
    assert names is not None
    devices = lax.axis_size(names)
    _divisible(name, x, split, devices)
    x = jnp.asarray(x)
    if not use_ring_algorithm:
        return lax.all_to_all(x, names, split, concat, tiled=True)
    rows = jnp.stack(jnp.split(x, devices, axis=split))
    received = rings.exchange(rows, names)
    return jnp.concatenate(list(received), axis=concat)
