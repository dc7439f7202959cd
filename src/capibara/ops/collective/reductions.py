"""All-reduce of lists of arrays: the implementations behind ``async_all_reduce``.

Each runs where its axis is bound (inside ``shard_map``) and returns the same array on all devices, typed accordingly
(``shard_map(check_vma=True)`` accepts it for ``out_specs`` without the axis).

An all-reduce is a reduce-scatter and an all-gather: each device is responsible for one chunk. The arrays are put
into *buckets*, flat vectors of one dtype; the last arrays come first, because a backward pass finishes the last
layer's gradients first, and a bucket can be transferred while the gradients of the next are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.collective import quantise, rings
from capibara.ops.one_device import typed_as

__all__ = ["ReduceProblem", "by_collectives", "by_gathering", "by_int8", "by_rings", "exact", "zeros"]

COMBINE: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": jnp.add,
    "mean": jnp.add,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "product": jnp.multiply,
}
REDUCE: dict[str, Callable[..., jax.Array]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "product": jnp.prod,
}


@dataclass(frozen=True)
class ReduceProblem:
    """The description of an all-reduce: everything that determines how it runs."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    reduction_op: str
    use_compression: bool
    overlap_compute: bool
    axis_name: rings.Axis | None
    block_size: int
    bucket_bytes: int
    implementation: str


def _buckets(problem: ReduceProblem) -> list[list[int]]:
    """Positions of the arrays of each bucket; arrays without elements are in none."""
    limit = problem.bucket_bytes if problem.overlap_compute else math.inf
    whole: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    filled: dict[str, int] = {}
    for i in reversed(range(len(problem.shapes))):
        size = math.prod(problem.shapes[i])
        if size == 0:
            continue
        kind = problem.dtypes[i]
        filling.setdefault(kind, []).append(i)
        filled[kind] = filled.get(kind, 0) + size * jnp.dtype(kind).itemsize
        if filled[kind] >= limit:
            whole.append(filling.pop(kind))
            del filled[kind]
    return whole + list(filling.values())


def _pack(arrays: Sequence[jax.Array], multiple: int, rows: int, dtype: Any = None) -> jax.Array:
    """The arrays as one ``[rows, columns]``; each starts at a multiple of ``multiple``, columns are one as well."""
    flat = []
    for x in arrays:
        x = x.reshape(-1) if dtype is None else x.reshape(-1).astype(dtype)
        flat.append(jnp.pad(x, (0, -x.size % multiple)))
    joined = jnp.concatenate(flat) if len(flat) > 1 else flat[0]
    return jnp.pad(joined, (0, -joined.size % (rows * multiple))).reshape(rows, -1)


def _unpack(packed: jax.Array, like: Sequence[jax.Array], multiple: int) -> list[jax.Array]:
    packed, start, out = packed.reshape(-1), 0, []
    for x in like:
        out.append(packed[start : start + x.size].reshape(x.shape))
        start += x.size + -x.size % multiple
    return out


def _result(problem: ReduceProblem, x: jax.Array, devices: int) -> jax.Array:
    return x / devices if problem.reduction_op == "mean" else x


def exact(problem: ReduceProblem, x: jax.Array) -> jax.Array:
    """XLA's sum or mean of one array."""
    axis = problem.axis_name
    assert axis is not None
    return _result(problem, lax.psum(x, axis), lax.axis_size(axis))


def zeros(problem: ReduceProblem, x: jax.Array) -> jax.Array:
    """Zeros with the type of the result for ``x``: for arrays without elements the result, and nothing is sent."""
    (aval,) = jax.make_jaxpr(lambda x: exact(problem, x))(x).out_avals
    return typed_as(aval, jnp.zeros(aval.shape, aval.dtype))


def by_collectives(problem: ReduceProblem, *arrays: jax.Array) -> list[jax.Array]:
    """XLA's all-reduce; a maximum, minimum or product as all-to-all, reduction and all-gather.

    (The latter move the same bytes as an all-reduce and have a gradient, unlike ``lax.pmax``.)
    """
    axis = problem.axis_name
    assert axis is not None
    if problem.reduction_op in ("sum", "mean"):
        return [exact(problem, x) if x.size else zeros(problem, x) for x in arrays]

    def reduce(rows: jax.Array) -> jax.Array:
        received = lax.all_to_all(rows, axis, 0, 0, tiled=True)
        return REDUCE[problem.reduction_op](received, axis=0).astype(rows.dtype)

    return _bucketed(problem, arrays, reduce)


def by_rings(problem: ReduceProblem, *arrays: jax.Array) -> list[jax.Array]:
    """A ring of permutes for each bucket, then an all-gather."""
    axis, combine = problem.axis_name, COMBINE[problem.reduction_op]
    assert axis is not None

    def reduce(rows: jax.Array) -> jax.Array:
        return rings.reduce_chunks(
            lambda i: lax.dynamic_index_in_dim(rows, i, 0, keepdims=False), axis, combine
        )

    return _bucketed(problem, arrays, reduce)


def _bucketed(
    problem: ReduceProblem, arrays: Sequence[jax.Array], reduce: Callable[[jax.Array], jax.Array]
) -> list[jax.Array]:
    axis = problem.axis_name
    assert axis is not None
    devices = lax.axis_size(axis)
    out: list[Any] = [None] * len(arrays)
    for bucket in _buckets(problem):
        chosen = [arrays[i] for i in bucket]
        chunk = _result(problem, reduce(_pack(chosen, 1, devices)), devices)
        whole = rings.to_all(chunk, axis)
        for i, x in zip(bucket, _unpack(whole, chosen, 1), strict=True):
            out[i] = x
    return [zeros(problem, x) if y is None else y for x, y in zip(arrays, out, strict=True)]


def by_gathering(problem: ReduceProblem, *arrays: jax.Array) -> list[jax.Array]:
    """The oracle: gather everything everywhere, then reduce."""
    axis, reduce = problem.axis_name, REDUCE[problem.reduction_op]
    assert axis is not None
    out = []
    for x in arrays:
        if x.size == 0:
            out.append(zeros(problem, x))
            continue
        y = reduce(rings.to_all(x, axis), axis=0)
        out.append(y if problem.reduction_op == "mean" else y.astype(x.dtype))
    return out


def by_int8(problem: ReduceProblem, *arrays: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sum or mean with int8 on the wire; the first half of ``arrays`` is reduced, the second are residuals.

    Returns the reduced arrays, and the new residuals in the residuals' dtypes.

    An element is rounded twice: by the device that has it and, as part of a sum, by the device that is responsible
    for its chunk. Each adds its rounding error to *its* residual, so that nothing is lost over the steps.
    """
    axis = problem.axis_name
    assert axis is not None
    count, block = len(arrays) // 2, problem.block_size
    values, residuals = arrays[:count], arrays[count:]
    devices, place = lax.axis_size(axis), lax.axis_index(axis)
    floating = [jnp.issubdtype(jnp.dtype(kind), jnp.floating) for kind in problem.dtypes]
    reduced: list[Any] = [None] * count
    lost: list[Any] = [None] * count
    for bucket in _buckets(problem):
        if not floating[bucket[0]]:
            continue
        chosen = [values[i] for i in bucket]
        dtype = jnp.promote_types(chosen[0].dtype, jnp.float32)
        rows = _pack(chosen, block, devices, dtype) + _pack(
            [residuals[i] for i in bucket], block, devices, dtype
        )
        message = quantise.encode(rows, block)
        if problem.overlap_compute:
            received = rings.exchange(message, axis)
        else:
            received = lax.all_to_all(message, axis, 0, 0, tiled=True)
        total = jnp.sum(quantise.decode(received, block, dtype), axis=0)
        sent = quantise.encode(total, block)
        whole = quantise.decode(rings.to_all(sent, axis), block, dtype)

        missing = rows - quantise.decode(message, block, dtype)
        missed = total - quantise.decode(sent, block, dtype)
        own = lax.dynamic_index_in_dim(missing, place, 0, keepdims=False)
        missing = lax.dynamic_update_index_in_dim(missing, own + missed, place, 0)
        missing = jnp.where(jnp.isfinite(missing), missing, 0)  # a step that overflowed is not remembered

        whole = _unpack(_result(problem, whole, devices), chosen, block)
        for i, total_i, missing_i in zip(bucket, whole, _unpack(missing, chosen, block), strict=True):
            reduced[i] = total_i.astype(values[i].dtype)
            lost[i] = missing_i.astype(residuals[i].dtype)
    for i, x in enumerate(values):
        if reduced[i] is None:  # integers are exact
            reduced[i] = exact(problem, x) if x.size else zeros(problem, x)
            lost[i] = residuals[i]
    return reduced, lost
