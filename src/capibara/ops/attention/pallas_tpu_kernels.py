"""The TPU kernels of attention, in Pallas: one for the output, one for the query's gradient, one for key and value.

All three see ``query [batch, kv_heads, group, rows, dim]`` and ``key``/``value`` ``[batch, kv_heads, keys, dim]``,
padded to whole blocks; or, with ``plan.heads``, ``[batch, rows, heads * dim]``, as a projection writes them, for heads
of whole tiles of 128 lanes: then nothing is transposed around the kernels. A grid step multiplies one block of queries
with one block of keys; the last grid axes run in order on one core and accumulate in its memory (VMEM). Blocks that a
causal mask or a window hides completely are neither fetched nor computed, and only partially hidden blocks are masked.

Values per row (the log-sum-exp, and in the backward pass ``sum(out · out_grad)``) are stored as a row vector ``[…, 1,
rows]``: a column would be padded to 128 lanes. The kernel for key and value works on transposed scores, and uses the
row vector directly; the other two transpose it once per block of queries, and keep such values as ``[rows, 128]``,
repeated in all lanes of the row: so they can be added to scores and multiplied with sums directly, while a column
would have to be broadcast over the lanes in each block. The running sum of the forward pass consists of 128 partial
sums per row, which are added once at the end. Scores are in units of ``ln 2``, since chips compute powers of 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.attention.pallas_plan import Plan, bend
from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.one_device import kernel_results

__all__ = ["LANES", "Plan", "key_value_gradients", "output", "query_gradient"]

LANES = 128
LOG2_E = 1 / math.log(2)
# Columns of scores that the backward pass computes together: more do not fit beside the operands.
PART = 512
SHORT = 256


def _lanes(row: jax.Array) -> jax.Array:
    """[1, n] → [n, 128], each value in all lanes of its row."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def _row(column: jax.Array) -> jax.Array:
    """[n, 1] → [1, n]."""
    return jnp.transpose(jnp.broadcast_to(column, (column.shape[0], LANES)))[:1]


def _dot(plan: Plan, a: jax.Array, b: jax.Array, *, transpose_b: bool = False) -> jax.Array:
    contract = (((1,), (1 if transpose_b else 0,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=plan.precision, preferred_element_type=jnp.float32)


def _steps(plan: Plan, i: Any, j: Any, live: Any, always: bool, work: Callable[[bool], None]) -> None:
    """``work(masked)`` on the block if it is reached at all."""
    if always:
        pl.when(live)(lambda: work(True))
        return
    hides = plan.hides(i, j)
    pl.when(live & hides)(lambda: work(True))
    pl.when(live & jnp.logical_not(hides))(lambda: work(False))


def _parts(length: int) -> list[slice]:
    """Of at most ``PART``, in whole tiles of 128, as equal as can be."""
    count = -(-length // PART)
    size = -(-length // (count * LANES)) * LANES
    return [slice(at, min(at + size, length)) for at in range(0, length, size)]


def _wide(lanes: jax.Array, width: int) -> jax.Array:
    """[n, 128], each row of one value, as [n, width]."""
    if width <= LANES:
        return lanes[:, :width]
    return jnp.concatenate([lanes] * (-(-width // LANES)), axis=1)[:, :width]


def _output_kernel(plan: Plan, blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[3:5] if segments else ()
    query, key, value = refs[:3]
    out, stat, best, total, acc, *column = refs[3 + len(ids) :]
    i, step = pl.program_id(3), pl.program_id(4)
    reach = plan.key_blocks(blocks)

    @pl.when(step == 0)
    def _start() -> None:
        best[...] = jnp.full(best.shape, ROW_FLOOR, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        if segments:
            column[0][...] = _lanes(ids[0][...])

    def work(masked: bool) -> None:
        raw = _dot(plan, query[...], key[...], transpose_b=True)
        scores, _ = bend(plan, raw, LOG2_E)
        if masked:
            seen = plan.visible(i, reach.at(i, step), transposed=False)
            if segments:
                seen &= _wide(column[0][...], plan.keys) == ids[1][...]
            scores = scores + jnp.where(seen, 0.0, HIDDEN)
        most = jnp.max(scores, axis=1, keepdims=True)
        if plan.keys <= SHORT and not masked and plan.softcap is None and plan.scale > 0:
            # The same: but in a short block all waits for the maximum, which so is one product nearer.
            most = jnp.max(raw, axis=1, keepdims=True) * (plan.scale * LOG2_E)
        before = best[...]
        new = jnp.maximum(before, most)
        weights = jnp.exp2(scores - _wide(new, plan.keys))
        shrink = jnp.exp2(before - new)
        best[...] = new
        lanes = (weights[:, at : at + LANES] for at in range(0, plan.keys, LANES))
        total[...] = total[...] * shrink + functools.reduce(jnp.add, lanes)
        more = _dot(plan, weights.astype(value.dtype), value[...])
        acc[...] = acc[...] * _wide(shrink, acc.shape[1]) + more

    _steps(plan, i, reach.at(i, step), reach.live(i, step), segments, work)

    @pl.when(step == pl.num_programs(4) - 1)
    def _finish() -> None:
        whole = jnp.sum(total[...], axis=1, keepdims=True)
        whole = jnp.where(whole == 0, 1.0, whole)
        out[...] = (acc[...] / whole).astype(out.dtype)
        stat[...] = _row(best[...][:, :1] * (1 / LOG2_E) + jnp.log(whole))


def _query_kernel(plan: Plan, blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[6:8] if segments else ()
    query, key, value, out_grad, stat, delta = refs[:6]
    grad, acc, stat_lanes, delta_lanes, *column = refs[6 + len(ids) :]
    i, step = pl.program_id(3), pl.program_id(4)
    reach = plan.key_blocks(blocks)

    @pl.when(step == 0)
    def _start() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        stat_lanes[...] = _lanes(stat[...] * LOG2_E)
        delta_lanes[...] = _lanes(delta[...])
        if segments:
            column[0][...] = _lanes(ids[0][...])

    def work(masked: bool) -> None:
        seen = None
        if masked:
            seen = plan.visible(i, reach.at(i, step), transposed=False)
            if segments:
                seen &= _wide(column[0][...], plan.keys) == ids[1][...]
        for part in _parts(plan.keys):
            scores, slope = bend(plan, _dot(plan, query[...], key[part, :], transpose_b=True), LOG2_E)
            if seen is not None:
                scores = scores + jnp.where(seen[:, part], 0.0, HIDDEN)
            weights = jnp.exp2(scores - _wide(stat_lanes[...], scores.shape[1]))
            change = _dot(plan, out_grad[...], value[part, :], transpose_b=True)
            change = weights * (change - _wide(delta_lanes[...], scores.shape[1]))
            if slope is not None:
                change = change * slope
            acc[...] += _dot(plan, change.astype(key.dtype), key[part, :])

    _steps(plan, i, reach.at(i, step), reach.live(i, step), segments, work)

    @pl.when(step == pl.num_programs(4) - 1)
    def _finish() -> None:
        grad[...] = (acc[...] * plan.scale).astype(grad.dtype)


def _key_value_kernel(plan: Plan, blocks: int, segments: bool, *refs: Any) -> None:
    ids: Any = refs[6:8] if segments else ()
    query, key, value, out_grad, stat, delta = refs[:6]
    key_grad, value_grad, key_acc, value_acc, *column = refs[6 + len(ids) :]
    j, head, step = pl.program_id(2), pl.program_id(3), pl.program_id(4)
    reach = plan.row_blocks(blocks)

    @pl.when((head == 0) & (step == 0))
    def _start() -> None:
        key_acc[...] = jnp.zeros(key_acc.shape, jnp.float32)
        value_acc[...] = jnp.zeros(value_acc.shape, jnp.float32)
        if segments:
            column[0][...] = _lanes(ids[1][...])

    def work(masked: bool) -> None:
        seen = None
        if masked:
            seen = plan.visible(reach.at(j, step), j, transposed=True)
            if segments:
                seen &= _wide(column[0][...], plan.rows) == ids[0][...]
        # The compiler schedules products in about this order. In large blocks of wide heads weights are multiplied at
        # once, before other scores need their room; elsewhere the products that make scores come first.
        at_once = plan.rows > SHORT and value.shape[1] > LANES
        for part in _parts(plan.rows):
            scores, slope = bend(plan, _dot(plan, key[...], query[part, :], transpose_b=True), LOG2_E)
            if seen is not None:
                scores = scores + jnp.where(seen[:, part], 0.0, HIDDEN)
            weights = jnp.exp2(scores - stat[:, part] * LOG2_E)
            if at_once:
                value_acc[...] += _dot(plan, weights.astype(out_grad.dtype), out_grad[part, :])
            change = _dot(plan, value[...], out_grad[part, :], transpose_b=True)
            change = weights * (change - delta[:, part])
            if slope is not None:
                change = change * slope
            if not at_once:
                value_acc[...] += _dot(plan, weights.astype(out_grad.dtype), out_grad[part, :])
            key_acc[...] += _dot(plan, change.astype(query.dtype), query[part, :])

    _steps(plan, reach.at(j, step), j, reach.live(j, step), segments, work)

    @pl.when((head == pl.num_programs(3) - 1) & (step == pl.num_programs(4) - 1))
    def _finish() -> None:
        key_grad[...] = (key_acc[...] * plan.scale).astype(key_grad.dtype)
        value_grad[...] = value_acc[...].astype(value_grad.dtype)


def _cost(plan: Plan, calls: int, pairs: int, products: int, moved: int) -> pl.CostEstimate:
    """What a kernel says it costs, for compilers and planners: the pairs of blocks that it multiplies and fetches.

    Args:
      calls: batches and heads, each with ``pairs`` pairs of blocks.
      products: sum of the third sizes of the matrix products of a pair.
      moved: bytes from and to memory of one call.
    """
    scores = calls * pairs * plan.rows * plan.keys
    return pl.CostEstimate(flops=2 * scores * products, transcendentals=scores, bytes_accessed=calls * moved)


def _call(
    kernel: Callable[..., None], plan: Plan, grid: tuple[int, ...], ordered: int, **options: Any
) -> Any:
    kinds: Any = ("parallel",) * (len(grid) - ordered) + ("arbitrary",) * ordered
    return pl.pallas_call(
        kernel,
        grid=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=kinds),
        interpret=plan.interpret,
        name=f"capibara_attention{kernel.func.__name__.removesuffix('_kernel')}",  # pyright: ignore[reportFunctionMemberAccess]
        **options,
    )


def _sizes(plan: Plan, query: jax.Array, value: jax.Array) -> tuple[Any, ...]:
    if plan.heads is not None:
        (heads, group), (batch, length, wide) = plan.heads, query.shape
        dims = wide // (heads * group), value.shape[2] // heads
        return batch, heads, group, length // plan.rows, value.shape[1] // plan.keys, *dims
    batch, heads, group, length, dim = query.shape
    return batch, heads, group, length // plan.rows, value.shape[2] // plan.keys, dim, value.shape[3]


def _of_rows(plan: Plan, last: int, place: Callable[..., tuple[Any, Any, Any, Any]]) -> pl.BlockSpec:
    """Blocks of queries; ``place`` of a grid step: batch, key head, query head of it, block."""
    if plan.heads is None:
        return pl.BlockSpec((None, None, None, plan.rows, last), lambda *at: (*place(*at), 0))
    group = plan.heads[1]

    def beside(*at: Any) -> tuple[Any, Any, Any]:
        b, h, g, i = place(*at)
        return b, i, h * group + g

    return pl.BlockSpec((None, plan.rows, last), beside)


def _of_keys(plan: Plan, last: int, place: Callable[..., tuple[Any, Any, Any]]) -> pl.BlockSpec:
    """Blocks of keys; ``place`` of a grid step: batch, key head, block."""
    if plan.heads is None:
        return pl.BlockSpec((None, None, plan.keys, last), lambda *at: (*place(*at), 0))

    def beside(*at: Any) -> tuple[Any, Any, Any]:
        b, h, j = place(*at)
        return b, j, h

    return pl.BlockSpec((None, plan.keys, last), beside)


def _vmem(*shape: int, dtype: Any = jnp.float32) -> Any:
    return pltpu.VMEM(shape, dtype)


def output(plan: Plan, query: Any, key: Any, value: Any, *ids: Any) -> tuple[jax.Array, jax.Array]:
    """The output, like the query, and the rows' log-sum-exp ``[batch, kv_heads, group, 1, rows]``."""
    batch, heads, group, row_blocks, key_blocks, dim, value_dim = _sizes(plan, query, value)
    reach = plan.key_blocks(key_blocks)
    length = row_blocks * plan.rows
    like_query = (batch, heads, group, length) if plan.heads is None else (batch, length)
    last = value_dim if plan.heads is None else heads * group * value_dim

    def of_rows(last: int) -> pl.BlockSpec:
        return _of_rows(plan, last, lambda b, h, g, i, s: (b, h, g, i))

    def of_keys(last: int) -> pl.BlockSpec:
        return _of_keys(plan, last, lambda b, h, g, i, s: (b, h, reach.at(i, s)))

    stat = pl.BlockSpec((None, None, None, 1, plan.rows), lambda b, h, g, i, s: (b, h, g, 0, i))
    ids_specs = [
        pl.BlockSpec((None, 1, plan.rows), lambda b, h, g, i, s: (b, 0, i)),
        pl.BlockSpec((None, 1, plan.keys), lambda b, h, g, i, s: (b, 0, reach.at(i, s))),
    ]
    scratch = [_vmem(plan.rows, LANES), _vmem(plan.rows, LANES), _vmem(plan.rows, value_dim)]
    if ids:
        scratch.append(_vmem(plan.rows, LANES, dtype=jnp.int32))
    return _call(
        functools.partial(_output_kernel, plan, key_blocks, bool(ids)),
        plan,
        (batch, heads, group, row_blocks, reach.steps),
        1,
        in_specs=[of_rows(dim), of_keys(dim), of_keys(value_dim), *(ids_specs if ids else [])],
        out_specs=[of_rows(value_dim), stat],
        out_shape=kernel_results(
            (query, key, value, *ids),
            ((*like_query, last), plan.dtype),
            ((batch, heads, group, 1, length), jnp.float32),
        ),
        scratch_shapes=scratch,
        cost_estimate=_cost(
            plan,
            batch * heads * group,
            reach.pairs(row_blocks),
            dim + value_dim,
            row_blocks
            * plan.rows
            * (query.dtype.itemsize * dim + jnp.dtype(plan.dtype).itemsize * value_dim + 4)
            + reach.pairs(row_blocks)
            * plan.keys
            * (key.dtype.itemsize * dim + value.dtype.itemsize * value_dim),
        ),
    )(query, key, value, *ids)


def query_gradient(
    plan: Plan, query: Any, key: Any, value: Any, out_grad: Any, stat: Any, delta: Any, *ids: Any
) -> jax.Array:
    """The gradient of the query."""
    batch, heads, group, row_blocks, key_blocks, dim, value_dim = _sizes(plan, query, value)
    reach = plan.key_blocks(key_blocks)

    def of_rows(last: int) -> pl.BlockSpec:
        return _of_rows(plan, last, lambda b, h, g, i, s: (b, h, g, i))

    def of_keys(last: int) -> pl.BlockSpec:
        return _of_keys(plan, last, lambda b, h, g, i, s: (b, h, reach.at(i, s)))

    row = pl.BlockSpec((None, None, None, 1, plan.rows), lambda b, h, g, i, s: (b, h, g, 0, i))
    ids_specs = [
        pl.BlockSpec((None, 1, plan.rows), lambda b, h, g, i, s: (b, 0, i)),
        pl.BlockSpec((None, 1, plan.keys), lambda b, h, g, i, s: (b, 0, reach.at(i, s))),
    ]
    scratch = [_vmem(plan.rows, dim), _vmem(plan.rows, LANES), _vmem(plan.rows, LANES)]
    if ids:
        scratch.append(_vmem(plan.rows, LANES, dtype=jnp.int32))
    return _call(
        functools.partial(_query_kernel, plan, key_blocks, bool(ids)),
        plan,
        (batch, heads, group, row_blocks, reach.steps),
        1,
        in_specs=[
            of_rows(dim),
            of_keys(dim),
            of_keys(value_dim),
            of_rows(value_dim),
            row,
            row,
            *(ids_specs if ids else []),
        ],
        out_specs=of_rows(dim),
        out_shape=kernel_results((query, key, value, out_grad, *ids), (query.shape, plan.dtype))[0],
        scratch_shapes=scratch,
        cost_estimate=_cost(
            plan,
            batch * heads * group,
            reach.pairs(row_blocks),
            2 * dim + value_dim,
            row_blocks
            * plan.rows
            * (
                (query.dtype.itemsize + jnp.dtype(plan.dtype).itemsize) * dim
                + out_grad.dtype.itemsize * value_dim
                + 8
            )
            + reach.pairs(row_blocks)
            * plan.keys
            * (key.dtype.itemsize * dim + value.dtype.itemsize * value_dim),
        ),
    )(query, key, value, out_grad, stat, delta, *ids)


def key_value_gradients(
    plan: Plan, query: Any, key: Any, value: Any, out_grad: Any, stat: Any, delta: Any, *ids: Any
) -> tuple[jax.Array, jax.Array]:
    """The gradients of key and value, summed over the group of query heads that read them."""
    batch, heads, group, row_blocks, key_blocks, dim, value_dim = _sizes(plan, query, value)
    reach = plan.row_blocks(row_blocks)

    def of_rows(last: int) -> pl.BlockSpec:
        return _of_rows(plan, last, lambda b, h, j, g, s: (b, h, g, reach.at(j, s)))

    def of_keys(last: int) -> pl.BlockSpec:
        return _of_keys(plan, last, lambda b, h, j, g, s: (b, h, j))

    row = pl.BlockSpec((None, None, None, 1, plan.rows), lambda b, h, j, g, s: (b, h, g, 0, reach.at(j, s)))
    ids_specs = [
        pl.BlockSpec((None, 1, plan.rows), lambda b, h, j, g, s: (b, 0, reach.at(j, s))),
        pl.BlockSpec((None, 1, plan.keys), lambda b, h, j, g, s: (b, 0, j)),
    ]
    scratch = [_vmem(plan.keys, dim), _vmem(plan.keys, value_dim)]
    if ids:
        scratch.append(_vmem(plan.keys, LANES, dtype=jnp.int32))
    return _call(
        functools.partial(_key_value_kernel, plan, row_blocks, bool(ids)),
        plan,
        (batch, heads, key_blocks, group, reach.steps),
        2,
        in_specs=[
            of_rows(dim),
            of_keys(dim),
            of_keys(value_dim),
            of_rows(value_dim),
            row,
            row,
            *(ids_specs if ids else []),
        ],
        out_specs=[of_keys(dim), of_keys(value_dim)],
        out_shape=kernel_results(
            (query, key, value, out_grad, *ids), (key.shape, plan.dtype), (value.shape, plan.dtype)
        ),
        scratch_shapes=scratch,
        cost_estimate=_cost(
            plan,
            batch * heads,
            group * reach.pairs(key_blocks),
            2 * (dim + value_dim),
            key_blocks * plan.keys * (key.dtype.itemsize + jnp.dtype(plan.dtype).itemsize) * (dim + value_dim)
            + group
            * reach.pairs(key_blocks)
            * plan.rows
            * (query.dtype.itemsize * dim + out_grad.dtype.itemsize * value_dim + 8),
        ),
    )(query, key, value, out_grad, stat, delta, *ids)
