"""The TPU kernel of attention's three gradients at once, for sequences whose sums fit into on-chip memory (VMEM).

The kernels of ``pallas_tpu_kernels`` compute the scores twice, for the query's gradient and for those of key and value:
seven products per block, where this one needs five. A block of queries iterates over its blocks of keys; besides its
own gradient, the sums for all keys of a head stay in VMEM, in float32, until the last block of queries has added to
them: 8 bytes per key and element of a head. Scores are transposed, as in the kernel for key and value, and so is the
sum of the query's gradient: transposing a block of keys and that sum costs less than transposing each block of
scores.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from capibara.ops.attention.pallas_plan import Plan, bend
from capibara.ops.attention.pallas_tpu_kernels import (
    LANES,
    LOG2_E,
    _call,
    _cost,
    _dot,
    _lanes,
    _of_keys,
    _of_rows,
    _parts,
    _row,
    _sizes,
    _steps,
    _vmem,
    _wide,
)
from capibara.ops.attention.problem import HIDDEN
from capibara.ops.one_device import kernel_results

__all__ = ["gradients", "vmem_bytes"]


def vmem_bytes(plan: Plan, keys: int, size: int, dim: int, value_dim: int) -> int:
    """The maximum memory of the kernel: operands and results twice, sums, and scores.

    Args:
      keys: length of key and value, in whole blocks.
      size: bytes of an element of the operands.
    """
    dim, value_dim = (-(-n // LANES) * LANES for n in (dim, value_dim))
    part = max(part.stop - part.start for part in _parts(plan.rows))
    result = jnp.dtype(plan.dtype).itemsize
    of_output = 2 if plan.heads is None else 4  # with heads side by side the output is an operand, too
    rows = plan.rows * (2 * (size + result) * dim + of_output * size * value_dim) + 4 * plan.rows * dim
    blocks = 2 * (size + result) * plan.keys * (dim + value_dim)
    return rows + blocks + 4 * keys * (dim + value_dim) + (3 * 4 + 2 * size) * plan.keys * part


def _gradients_kernel(plan: Plan, blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[6:8] if segments else ()
    query, key, value, out_grad, stat, delta = refs[:6]
    query_grad, key_grad, value_grad, query_acc, key_acc, value_acc, *made = refs[6 + len(ids) :]
    out, delta = (delta, made[0]) if made else (None, delta)
    head, i, step = (pl.program_id(axis) for axis in (2, 3, 4))
    reach = plan.key_blocks(blocks)

    @pl.when((head == 0) & (i == 0) & (step == 0))
    def _start() -> None:
        key_acc[...] = jnp.zeros(key_acc.shape, jnp.float32)
        value_acc[...] = jnp.zeros(value_acc.shape, jnp.float32)

    @pl.when(step == 0)
    def _start_rows() -> None:
        query_acc[...] = jnp.zeros(query_acc.shape, jnp.float32)
        if out is not None:
            both = out_grad[...].astype(jnp.float32) * out[...].astype(jnp.float32)
            delta[...] = _row(jnp.sum(both, axis=1, keepdims=True))

    def work(masked: bool) -> None:
        j = reach.at(i, step)
        at = pl.ds(pl.multiple_of(j * plan.keys, plan.keys), plan.keys)
        turned = jnp.transpose(key[...])
        seen = None
        if masked:
            seen = plan.visible(i, j, transposed=True)
            if segments:
                seen &= _wide(_lanes(ids[1][...]), plan.rows) == ids[0][...]
        for part in _parts(plan.rows):
            scores, slope = bend(plan, _dot(plan, key[...], query[part, :], transpose_b=True), LOG2_E)
            if seen is not None:
                scores = scores + jnp.where(seen[:, part], 0.0, HIDDEN)
            weights = jnp.exp2(scores - stat[:, part] * LOG2_E)
            change = _dot(plan, value[...], out_grad[part, :], transpose_b=True)
            change = weights * (change - delta[:, part])
            if slope is not None:
                change = change * slope
            change = change.astype(query.dtype)
            # In about this order products are scheduled.
            key_acc[at, :] += _dot(plan, change, query[part, :])
            query_acc[:, part] += _dot(plan, turned, change)
            value_acc[at, :] += _dot(plan, weights.astype(out_grad.dtype), out_grad[part, :])

    _steps(plan, i, reach.at(i, step), reach.live(i, step), segments, work)

    @pl.when(step == pl.num_programs(4) - 1)
    def _finish_rows() -> None:
        query_grad[...] = (jnp.transpose(query_acc[...]) * plan.scale).astype(query_grad.dtype)

    # Step s of the last block of queries multiplies keys of block s or of a later one: so block s is complete.
    @pl.when((head == pl.num_programs(2) - 1) & (i == pl.num_programs(3) - 1))
    def _finish() -> None:
        at = pl.ds(pl.multiple_of(step * plan.keys, plan.keys), plan.keys)
        key_grad[...] = (key_acc[at, :] * plan.scale).astype(key_grad.dtype)
        value_grad[...] = value_acc[at, :].astype(value_grad.dtype)


def gradients(
    plan: Plan, query: Any, key: Any, value: Any, out_grad: Any, stat: Any, delta: Any, *ids: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of query, key and value, the latter two summed over the group of query heads that read them.

    A block of queries must reach as many blocks of keys as there are (``plan.key_blocks(blocks).steps == blocks``).

    Args:
      delta: ``sum(out · out_grad)`` of each row, ``[batch, kv_heads, group, 1, rows]``; or the output, like
        ``out_grad``, from which the kernel computes it.
    """
    batch, heads, group, row_blocks, key_blocks, dim, value_dim = _sizes(plan, query, value)
    reach = plan.key_blocks(key_blocks)

    from_output = delta.shape == out_grad.shape

    def of_rows(last: int) -> pl.BlockSpec:
        return _of_rows(plan, last, lambda b, h, g, i, s: (b, h, g, i))

    def of_keys(last: int) -> pl.BlockSpec:
        return _of_keys(plan, last, lambda b, h, g, i, s: (b, h, reach.at(i, s)))

    def at_last(last: int) -> pl.BlockSpec:
        # One block, which is not written before the index changes, and in the end each block once.
        def place(b: Any, h: Any, g: Any, i: Any, s: Any) -> tuple[Any, ...]:
            return b, h, jnp.where((g == group - 1) & (i == row_blocks - 1), s, 0)

        return _of_keys(plan, last, place)

    row = pl.BlockSpec((None, None, None, 1, plan.rows), lambda b, h, g, i, s: (b, h, g, 0, i))
    ids_specs = [
        pl.BlockSpec((None, 1, plan.rows), lambda b, h, g, i, s: (b, 0, i)),
        pl.BlockSpec((None, 1, plan.keys), lambda b, h, g, i, s: (b, 0, reach.at(i, s))),
    ]
    size, result = query.dtype.itemsize, jnp.dtype(plan.dtype).itemsize
    pairs = group * reach.pairs(row_blocks)
    return _call(
        functools.partial(_gradients_kernel, plan, key_blocks, bool(ids)),
        plan,
        (batch, heads, group, row_blocks, reach.steps),
        3,
        in_specs=[
            of_rows(dim),
            of_keys(dim),
            of_keys(value_dim),
            of_rows(value_dim),
            row,
            of_rows(value_dim) if from_output else row,
            *(ids_specs if ids else []),
        ],
        out_specs=[of_rows(dim), at_last(dim), at_last(value_dim)],
        out_shape=kernel_results(
            (query, key, value, out_grad, delta, *ids),
            (query.shape, plan.dtype),
            (key.shape, plan.dtype),
            (value.shape, plan.dtype),
        ),
        scratch_shapes=[
            _vmem(dim, plan.rows),
            _vmem(key_blocks * plan.keys, dim),
            _vmem(key_blocks * plan.keys, value_dim),
            *([_vmem(1, plan.rows)] if from_output else []),
        ],
        cost_estimate=_cost(
            plan,
            batch * heads,
            pairs,
            3 * dim + 2 * value_dim,
            group
            * row_blocks
            * plan.rows
            * ((size + result) * dim + size * value_dim + (4 + size * value_dim if from_output else 8))
            + pairs * plan.keys * size * (dim + value_dim)
            + key_blocks * plan.keys * result * (dim + value_dim),
        ),
    )(query, key, value, out_grad, stat, delta, *ids)
