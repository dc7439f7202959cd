"""Attention for CPUs: dense tiles that skip hidden keys and stay in cache.

The form follows the strengths of XLA's CPU compiler. It fuses ``dot → add mask → row maximum → exp`` into one kernel
only if the maximum has no other use; so the forward pass stores the row *sums* for the backward pass instead of the
log-sum-exp, and the backward pass recomputes the maximum. Products with a transposed small operand are fast, and with
a transposed large one slow; so the gradients of key and value are computed transposed, ``dKᵀ = Qᵀ dS``. Memory beyond
the caches is slow, and newly allocated memory even slower (each new page is a fault); so the batch is split into
groups whose scores fit a fixed budget.

The mathematics is that of FlashAttention (Dao et al. 2022, arXiv:2205.14135) without its rescaling: a tile of
rows sees all its keys at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR, AttentionProblem, from_bhsd, to_bhsd
from capibara.ops.attention.tiling import Group, Tile, cut_group, cut_tiles
from capibara.ops.one_device import alike

__all__ = ["backward", "check", "forward"]

# Scores of one tile of one group, spread over the cores. Measured inside a training step on two Zen 4 cores
# with 1 MiB of second-level cache each: with much more, every product and every exponential waits for
# memory; with much less, the kernels become too short to be shared out.
SCORE_BYTES = 2 << 20
# One block of one head's scores may not pass this; beyond, the looped form of xla.py is the right one.
MOST_BLOCK_BYTES = 64 << 20


class _Arrays(NamedTuple):
    """One group's arrays: query [n, group, q_len, d] (scaled), key and value [n, kv_len, d]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    query_ids: jax.Array | None
    key_ids: jax.Array | None
    sinks: jax.Array | None  # [n, group]


def _rows(problem: AttentionProblem) -> int:
    if problem.block_size is not None:
        return problem.block_size
    return 64 if problem.q_len <= 512 else 128


def check(problem: AttentionProblem) -> None:
    need = 4 * problem.group * max(t.rows * t.keys for t in cut_tiles(problem, _rows(problem)))
    if need > MOST_BLOCK_BYTES:
        raise NotImplementedError(
            f"one block of scores would take {need >> 20} MiB, more than its {MOST_BLOCK_BYTES >> 20} MiB"
        )


def _dot(
    problem: AttentionProblem, a: jax.Array, b: jax.Array, contract_a: int, contract_b: int
) -> jax.Array:
    return lax.dot_general(a, b, (((contract_a,), (contract_b,)), ((0,), (0,))), precision=problem.precision)


def _widen(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    if problem.operand_dtype is not None:
        # Rounded to the narrow type, multiplied in the wide one: what a unit with wide accumulation computes.
        x = x.astype(problem.operand_dtype)
    return x.astype(problem.accumulate_dtype)


def _slice(x: jax.Array, starts: dict[int, Any], sizes: dict[int, int]) -> jax.Array:
    for axis, start in starts.items():
        if sizes[axis] != x.shape[axis]:
            x = lax.dynamic_slice_in_dim(x, start, sizes[axis], axis)
    return x


def _take(
    problem: AttentionProblem, group: Group, b: Any, h: Any, x: jax.Array, per_kv_head: int
) -> jax.Array:
    """The group's part of ``x`` (in the caller's layout) as [batch·kv_heads, per_kv_head, sequence, dim]."""
    axis = 1 if problem.layout == "bhsd" else 2
    heads = group.kv_heads * per_kv_head
    x = _slice(x, {0: b * group.batch, axis: h * heads}, {0: group.batch, axis: heads})
    x = to_bhsd(x, problem.layout)
    return x.reshape(group.batch * group.kv_heads, per_kv_head, *x.shape[2:])


def _gather(problem: AttentionProblem, group: Group, b: Any, h: Any, arrays: tuple[Any, ...]) -> _Arrays:
    query, key, value, bias, query_ids, key_ids, sinks = arrays
    q = _widen(problem, _take(problem, group, b, h, query, problem.group)) * problem.scale
    k = _widen(problem, _take(problem, group, b, h, key, 1))[:, 0]
    v = _widen(problem, _take(problem, group, b, h, value, 1))[:, 0]
    if bias is not None:
        sizes = {
            0: group.batch if bias.shape[0] > 1 else 1,
            1: group.kv_heads * problem.group if bias.shape[1] > 1 else 1,
        }
        bias = _slice(bias, {0: b * group.batch, 1: h * sizes[1]}, sizes)
    if query_ids is not None:
        query_ids = _slice(query_ids, {0: b * group.batch}, {0: group.batch})
        key_ids = _slice(key_ids, {0: b * group.batch}, {0: group.batch})
    if sinks is not None:
        heads = group.kv_heads * problem.group
        sinks = _slice(sinks.astype(problem.accumulate_dtype), {0: h * heads}, {0: heads})
        sinks = jnp.tile(sinks.reshape(group.kv_heads, problem.group), (group.batch, 1))
    return _Arrays(q, k, v, bias, query_ids, key_ids, sinks)


def _flat(x: jax.Array) -> jax.Array:
    """[n, group, rows, …] → [n, group·rows, …]."""
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])


def _bias_block(arrays: _Arrays, tile: Tile, start: Any, group: Group, heads_per_kv: int) -> jax.Array | None:
    """The bias of one block as [batch|1, kv_heads|1, group|1, rows|1, keys|1]."""
    if arrays.bias is None:
        return None
    bias = arrays.bias
    if bias.shape[2] > 1:
        bias = lax.dynamic_slice_in_dim(bias, start, tile.rows, 2)
    if bias.shape[3] > 1:
        bias = bias[..., tile.key_start : tile.key_stop]
    heads = (group.kv_heads, heads_per_kv) if bias.shape[1] > 1 else (1, 1)
    return bias.reshape(bias.shape[0], *heads, *bias.shape[2:])


def _hide(
    problem: AttentionProblem, group: Group, arrays: _Arrays, tile: Tile, start: Any, scores: jax.Array
) -> jax.Array:
    """Add the bias and the mask to ``scores`` [n, group·rows, keys]; the first row may be traced."""
    wide = scores.dtype
    shape = (group.batch, group.kv_heads, problem.group, tile.rows, tile.keys)
    bias = _bias_block(arrays, tile, start, group, problem.group)
    if bias is not None:
        scores = (scores.reshape(shape) + bias.astype(wide)).reshape(scores.shape)
    if arrays.query_ids is not None and arrays.key_ids is not None:
        rows = lax.dynamic_slice_in_dim(arrays.query_ids, start, tile.rows, 1)
        keys = arrays.key_ids[:, tile.key_start : tile.key_stop]
        other = jnp.where(rows[:, :, None] == keys[:, None, :], 0.0, HIDDEN).astype(wide)
        scores = (scores.reshape(shape) + other[:, None, None]).reshape(scores.shape)
    last_row = tile.stop - 1
    left_cuts = problem.left is not None and tile.key_start < last_row - problem.left
    right_cuts = problem.right is not None and tile.key_stop - 1 > tile.start + problem.right
    if left_cuts or right_cuts:
        rows = start + lax.broadcasted_iota(jnp.int32, (tile.rows, tile.keys), 0)
        columns = tile.key_start + lax.broadcasted_iota(jnp.int32, (tile.rows, tile.keys), 1)
        visible = jnp.ones((tile.rows, tile.keys), bool)
        if problem.left is not None:
            visible &= columns >= rows - problem.left
        if problem.right is not None:
            visible &= columns <= rows + problem.right
        # Added, not selected: an addition fuses with the product before it and the maximum after it.
        mask = jnp.where(visible, 0.0, HIDDEN).astype(wide)
        scores = scores + jnp.tile(mask, (problem.group, 1))[None]
    return scores


def _weights(
    problem: AttentionProblem, group: Group, arrays: _Arrays, tile: Tile, start: Any
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The unnormalised weights ``exp(score - row maximum)`` of one block, softcap's derivative, weights of sinks.

    A sink counts for the maximum, which then has another use: blocks with sinks do without the fused kernel.
    """
    q = _flat(lax.dynamic_slice_in_dim(arrays.query, start, tile.rows, 2))
    scores = _dot(problem, q, arrays.key[:, tile.key_start : tile.key_stop], 2, 2)
    slope = None
    if problem.softcap is not None:
        bent = jnp.tanh(scores / problem.softcap)
        slope = 1.0 - bent * bent
        scores = problem.softcap * bent
    scores = _hide(problem, group, arrays, tile, start, scores)
    best = jnp.maximum(jnp.max(lax.stop_gradient(scores), axis=-1, keepdims=True), ROW_FLOOR)
    if arrays.sinks is None:
        return jnp.exp(scores - best), slope, None
    sinks = jnp.repeat(arrays.sinks, tile.rows, axis=1)[..., None]
    best = jnp.maximum(best, lax.stop_gradient(sinks))
    return jnp.exp(scores - best), slope, jnp.exp(sinks - best)


def _inverse(total: jax.Array) -> jax.Array:
    return jnp.where(total == 0, 0.0, 1.0 / jnp.where(total == 0, 1.0, total))


def _over_blocks(tile: Tile, carry: Any, block: Callable[[Any, Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Run ``block(carry, start)`` over a tile's blocks; results join along axis 2 (the query rows)."""
    if tile.blocks == 1:
        return block(carry, tile.start)
    carry, ys = lax.scan(block, carry, tile.start + tile.rows * jnp.arange(tile.blocks, dtype=jnp.int32))

    def join(y: jax.Array) -> jax.Array:
        y = jnp.moveaxis(y, 0, 2)
        return y.reshape(*y.shape[:2], -1, *y.shape[4:])

    return carry, jax.tree.map(join, ys)


def _over_groups(
    group: Group, carry: Any, one: Callable[[Any, Any, Any], tuple[Any, Any]]
) -> tuple[Any, Any]:
    if group.count == 1:
        carry, ys = one(carry, 0, 0)
        return carry, jax.tree.map(lambda y: y[None], ys)
    return lax.scan(
        lambda c, i: one(c, i // group.grid_heads, i % group.grid_heads),
        carry,
        jnp.arange(group.count, dtype=jnp.int32),
    )


def _assemble(group: Group, x: jax.Array, head_axis: int) -> jax.Array:
    """Join per-group results [count, batch, …heads at head_axis…] into the whole array."""
    x = x.reshape(group.grid_batch, group.grid_heads, *x.shape[1:])
    x = jnp.moveaxis(x, 1, head_axis + 1)
    x = x.reshape(group.grid_batch * group.batch, *x.shape[2:])
    return x.reshape(*x.shape[:head_axis], -1, *x.shape[head_axis + 2 :])


def forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output in the caller's layout, and the rows' sums of unnormalised weights [batch, heads, q_len]."""
    tiles = cut_tiles(problem, _rows(problem))
    group = cut_group(problem, tiles, SCORE_BYTES)

    def one(_: None, b: Any, h: Any) -> tuple[None, tuple[jax.Array, jax.Array]]:
        part = _gather(problem, group, b, h, arrays)
        outs, totals = [], []
        for tile in tiles:

            def block(__: None, start: Any, tile: Tile = tile) -> tuple[None, tuple[jax.Array, jax.Array]]:
                weights, _slope, of_sinks = _weights(problem, group, part, tile, start)
                total = jnp.sum(weights, axis=-1, keepdims=True)
                total = total if of_sinks is None else total + of_sinks
                values = part.value[:, tile.key_start : tile.key_stop]
                out = _dot(problem, weights, values, 2, 1) * _inverse(total)
                shape = (out.shape[0], problem.group, tile.rows)
                return None, (out.reshape(*shape, -1), total.reshape(shape))

            _carry, (out, total) = _over_blocks(tile, None, block)
            outs.append(out)
            totals.append(total)
        heads = group.kv_heads * problem.group
        out = jnp.concatenate(outs, axis=2).astype(problem.dtype)
        out = from_bhsd(out.reshape(group.batch, heads, problem.q_len, -1), problem.layout)
        return None, (out, jnp.concatenate(totals, axis=2).reshape(group.batch, heads, problem.q_len))

    _carry, (out, total) = _over_groups(group, None, one)
    return _assemble(group, out, 1 if problem.layout == "bhsd" else 2), _assemble(group, total, 1)


def _sum_pieces(pieces: list[tuple[int, int, jax.Array]], length: int) -> jax.Array:
    """Sum arrays [n, d, stop - start] that each cover a range of the last axis, into [n, d, length]."""
    edges = sorted({0, length, *(p[0] for p in pieces), *(p[1] for p in pieces)})
    chunks = []
    for low, high in itertools.pairwise(edges):
        parts = [x[..., low - a : high - a] for a, b, x in pieces if a <= low and high <= b]
        if parts:
            chunks.append(sum(parts[1:], parts[0]))
        else:
            first = pieces[0][2]
            chunks.append(jnp.zeros((*first.shape[:2], high - low), first.dtype))
    return jnp.concatenate(chunks, axis=-1)


def _bias_gradient(
    grad: jax.Array,
    problem: AttentionProblem,
    group: Group,
    tile: Tile,
    b: Any,
    h: Any,
    start: Any,
    ds: jax.Array,
) -> jax.Array:
    """Add one block's score gradients to the bias' gradient (of the bias' own, broadcastable shape)."""
    ds = ds.reshape(group.batch, group.kv_heads * problem.group, tile.rows, tile.keys)
    ds = jnp.sum(ds, axis=tuple(a for a in range(4) if grad.shape[a] == 1), keepdims=True)
    where = tuple(
        0 if grad.shape[a] == 1 else s
        for a, s in enumerate((b * group.batch, h * group.kv_heads * problem.group, start, tile.key_start))
    )
    where = tuple(jnp.asarray(w, jnp.int32) for w in where)
    old = lax.dynamic_slice(grad, where, ds.shape)
    return lax.dynamic_update_slice(grad, old + ds, where)


def backward(
    problem: AttentionProblem, arrays: tuple[Any, ...], out: jax.Array, total: jax.Array, out_grad: jax.Array
) -> tuple[Any, ...]:
    """Gradients of query, key, value, bias and sinks (``None`` without them), in the caller's layout and dtype."""
    tiles = cut_tiles(problem, _rows(problem))
    group = cut_group(problem, tiles, SCORE_BYTES)
    wide = problem.accumulate_dtype
    bias: jax.Array | None = arrays[3]
    used = (*arrays, out, total, out_grad)

    def one(dbias: Any, b: Any, h: Any) -> tuple[Any, tuple[jax.Array, ...]]:
        part = _gather(problem, group, b, h, arrays)
        do = _take(problem, group, b, h, out_grad, problem.group).astype(wide)
        o = _take(problem, group, b, h, out, problem.group).astype(wide)
        heads = group.kv_heads * problem.group
        sums = _slice(total, {0: b * group.batch, 1: h * heads}, {0: group.batch, 1: heads})
        # The rows' normalisation goes into the (small) output gradients, not into the (large) weights.
        do = do * _inverse(sums).reshape(*do.shape[:3], 1)
        # Three axes: the CPU compiler reduces [n, 1, rows, dim] four times slower.
        delta = jnp.sum(_flat(do * o), axis=-1, keepdims=True).reshape(*do.shape[:3], 1)
        dqs, dks, dvs, dsinks = [], [], [], []
        for tile in tiles:

            def block(carry: Any, start: Any, tile: Tile = tile) -> tuple[Any, tuple[jax.Array, Any]]:
                dbias, dk, dv = carry
                q, g, d = (
                    _flat(lax.dynamic_slice_in_dim(x, start, tile.rows, 2)) for x in (part.query, do, delta)
                )
                k = part.key[:, tile.key_start : tile.key_stop]
                v = part.value[:, tile.key_start : tile.key_stop]
                weights, slope, of_sinks = _weights(problem, group, part, tile, start)
                ds = weights * (_dot(problem, g, v, 2, 2) - d)
                if dbias is not None:
                    dbias = _bias_gradient(dbias, problem, group, tile, b, h, start, ds)
                if slope is not None:
                    ds = ds * slope
                dq = _dot(problem, ds, k, 2, 1).reshape(q.shape[0], problem.group, tile.rows, -1)
                more_k, more_v = _dot(problem, q, ds, 1, 1), _dot(problem, g, weights, 1, 1)
                dk, dv = (more_k, more_v) if dk is None else (dk + more_k, dv + more_v)
                dsink = None if of_sinks is None else (-of_sinks * d).reshape(*dq.shape[:3], 1)
                return (dbias, dk, dv), (dq, dsink)

            start_k = start_v = None
            if tile.blocks > 1:
                n = part.key.shape[0]
                # Inside shard_map a loop's carry has to vary over the mesh axes that its results vary over.
                start_k, start_v = alike(
                    (
                        jnp.zeros((n, problem.head_dim, tile.keys), wide),
                        jnp.zeros((n, problem.value_dim, tile.keys), wide),
                    ),
                    *used,
                )
            (dbias, dk, dv), (dq, dsink) = _over_blocks(tile, (dbias, start_k, start_v), block)
            dqs.append(dq)
            dsinks.append(dsink)
            dks.append((tile.key_start, tile.key_stop, dk))
            dvs.append((tile.key_start, tile.key_stop, dv))

        dq = (jnp.concatenate(dqs, axis=2) * problem.scale).astype(problem.dtype)
        grads = [from_bhsd(dq.reshape(group.batch, heads, problem.q_len, -1), problem.layout)]
        for pieces in (dks, dvs):
            x = jnp.swapaxes(_sum_pieces(pieces, problem.kv_len), 1, 2).astype(problem.dtype)
            x = x.reshape(group.batch, group.kv_heads, problem.kv_len, -1)
            grads.append(from_bhsd(x, problem.layout))
        if part.sinks is not None:
            grads.append(jnp.concatenate(dsinks, axis=2).reshape(group.batch, heads, problem.q_len, 1))
        return dbias, tuple(grads)

    dbias = None if bias is None else alike(jnp.zeros(bias.shape, wide), *used)
    dbias, grads = _over_groups(group, dbias, one)
    head_axis = 1 if problem.layout == "bhsd" else 2
    dq, dk, dv = (_assemble(group, g, head_axis) for g in grads[:3])
    of_bias = None if bias is None else dbias.astype(bias.dtype)
    sinks: jax.Array | None = arrays[6]
    of_sinks = (
        None if sinks is None else jnp.sum(_assemble(group, grads[3], 1), axis=(0, 2, 3)).astype(sinks.dtype)
    )
    return dq, dk, dv, of_bias, of_sinks
