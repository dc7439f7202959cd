"""Attention as plain XLA loops over blocks of queries and keys: any platform, memory linear in the sequence.

The online softmax of FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithms 1 and 4): a running
maximum and a running sum per row, so that only one block of scores is live at a time. Blocks that a causal mask or a
window hides completely are skipped at run time. The backward pass recomputes the scores from the saved log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR, AttentionProblem, from_bhsd, to_bhsd
from capibara.ops.attention.sinks import sinks_gradient, with_sinks
from capibara.ops.one_device import alike

__all__ = ["backward", "forward"]

DEFAULT_BLOCK = 256


class _Blocks(NamedTuple):
    rows: int
    keys: int
    row_blocks: int
    key_blocks: int


def _blocks(problem: AttentionProblem) -> _Blocks:
    size = problem.block_size or DEFAULT_BLOCK
    rows, keys = min(size, problem.q_len), min(size, problem.kv_len)
    return _Blocks(rows, keys, -(-problem.q_len // rows), -(-problem.kv_len // keys))


def _pad(x: jax.Array, axis: int, length: int) -> jax.Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)


class _Prepared(NamedTuple):
    """Padded to whole blocks: query [b, kv, group, rows, d] (scaled), key and value [b, kv, keys, d]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    query_ids: jax.Array | None
    key_ids: jax.Array | None


def _narrow(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    return x if problem.operand_dtype is None else x.astype(problem.operand_dtype)


def _dot(problem: AttentionProblem, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(
        spec,
        _narrow(problem, a),
        _narrow(problem, b),
        precision=problem.precision,
        preferred_element_type=problem.accumulate_dtype,
    )


def _heads(problem: AttentionProblem, x: jax.Array, rows: int) -> jax.Array:
    """[batch, heads, q_len, …] → [batch, kv_heads, group, rows, …], padded."""
    x = _pad(x, 2, rows)
    return x.reshape(x.shape[0], problem.kv_heads, problem.group, *x.shape[2:])


def _prepare(problem: AttentionProblem, blocks: _Blocks, arrays: tuple[Any, ...]) -> _Prepared:
    query, key, value, bias, query_ids, key_ids, _sinks = arrays
    rows, keys = blocks.rows * blocks.row_blocks, blocks.keys * blocks.key_blocks
    q = _heads(problem, to_bhsd(query, problem.layout), rows)
    k, v = (_pad(to_bhsd(x, problem.layout), 2, keys) for x in (key, value))
    if bias is not None:
        bias = bias if bias.shape[2] == 1 else _pad(bias, 2, rows)
        bias = bias if bias.shape[3] == 1 else _pad(bias, 3, keys)
        heads = (problem.kv_heads, problem.group) if bias.shape[1] > 1 else (1, 1)
        bias = bias.reshape(bias.shape[0], *heads, *bias.shape[2:])
    if query_ids is not None:
        query_ids, key_ids = _pad(query_ids, 1, rows), _pad(key_ids, 1, keys)
    return _Prepared(q, k, v, bias, query_ids, key_ids)


def _at(x: jax.Array, index: Any, size: int, axis: int) -> jax.Array:
    if x.shape[axis] == 1 and size != 1:
        return x  # a broadcast axis of the bias
    return lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _scores(
    problem: AttentionProblem, blocks: _Blocks, p: _Prepared, i: Any, j: Any, q: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """Scores of row block ``i`` on key block ``j`` [b, kv, group, rows, keys], and softcap's slope."""
    wide = problem.accumulate_dtype
    s = problem.scale * _dot(problem, "bhgqd,bhkd->bhgqk", q, k)
    slope = None
    if problem.softcap is not None:
        bent = jnp.tanh(s / problem.softcap)
        slope = 1.0 - bent * bent
        s = problem.softcap * bent
    if p.bias is not None:
        bias = p.bias
        bias = bias if bias.shape[3] == 1 else _at(bias, i, blocks.rows, 3)
        bias = bias if bias.shape[4] == 1 else _at(bias, j, blocks.keys, 4)
        s = s + bias.astype(wide)
    rows = i * blocks.rows + lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.keys), 0)
    columns = j * blocks.keys + lax.broadcasted_iota(jnp.int32, (blocks.rows, blocks.keys), 1)
    visible = columns < problem.kv_len
    if problem.left is not None:
        visible &= columns >= rows - problem.left
    if problem.right is not None:
        visible &= columns <= rows + problem.right
    visible = visible[None]
    if p.query_ids is not None and p.key_ids is not None:
        a, b = _at(p.query_ids, i, blocks.rows, 1), _at(p.key_ids, j, blocks.keys, 1)
        visible = visible & (a[:, :, None] == b[:, None, :])
    return s + jnp.where(visible, 0.0, HIDDEN).astype(wide)[:, None, None], slope


def _when_visible(
    problem: AttentionProblem, blocks: _Blocks, i: Any, j: Any, work: Callable[[Any], Any], carry: Any
) -> Any:
    """``work(carry)`` where row block ``i`` sees any key of block ``j``, else ``carry``."""
    if problem.left is None and problem.right is None:
        return work(carry)
    first, last = i * blocks.rows, (i + 1) * blocks.rows - 1
    seen = jnp.asarray(True)
    if problem.right is not None:
        seen &= j * blocks.keys <= last + problem.right
    if problem.left is not None:
        seen &= (j + 1) * blocks.keys - 1 >= first - problem.left
    return lax.cond(seen, work, lambda c: c, carry)


def _rows_back(problem: AttentionProblem, x: jax.Array) -> jax.Array:
    """[row_blocks, b, kv, group, rows, …] → [b, heads, q_len, …]."""
    x = jnp.moveaxis(x, 0, 3)
    x = x.reshape(x.shape[0], problem.heads, -1, *x.shape[5:])
    return x[:, :, : problem.q_len]


def forward(problem: AttentionProblem, *arrays: Any) -> tuple[jax.Array, jax.Array]:
    """The output in the caller's layout, and the log-sum-exp of each row's scores [batch, heads, q_len]."""
    blocks = _blocks(problem)
    wide = problem.accumulate_dtype
    p = _prepare(problem, blocks, arrays)
    lead = (problem.batch, problem.kv_heads, problem.group, blocks.rows)

    def row_block(i: Any) -> tuple[jax.Array, jax.Array]:
        q = _at(p.query, i, blocks.rows, 3)

        def key_block(carry: Any, j: Any) -> tuple[Any, None]:
            def work(carry: Any) -> Any:
                best, total, acc = carry
                s, _ = _scores(problem, blocks, p, i, j, q, _at(p.key, j, blocks.keys, 2))
                # The results do not depend on it. Its derivative would divide by how many scores equal it, which is
                # none where the compiler has computed the scores twice and rounded them differently.
                new_best = jnp.maximum(best, jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True))
                weights = jnp.exp(s - new_best)
                shrink = jnp.exp(best - new_best)
                values = _at(p.value, j, blocks.keys, 2)
                acc = acc * shrink + _dot(problem, "bhgqk,bhkd->bhgqd", weights.astype(values.dtype), values)
                return new_best, total * shrink + jnp.sum(weights, axis=-1, keepdims=True), acc

            return _when_visible(problem, blocks, i, j, work, carry), None

        start = (
            jnp.full((*lead, 1), ROW_FLOOR, wide),
            jnp.zeros((*lead, 1), wide),
            jnp.zeros((*lead, problem.value_dim), wide),
        )
        (best, total, acc), _ = lax.scan(
            key_block, alike(start, p), jnp.arange(blocks.key_blocks, dtype=jnp.int32)
        )
        safe = jnp.where(total == 0, 1.0, total)
        return (acc / safe).astype(problem.dtype), (best + jnp.log(safe))[..., 0]

    out, logsumexp = lax.map(row_block, jnp.arange(blocks.row_blocks, dtype=jnp.int32))
    out, logsumexp = from_bhsd(_rows_back(problem, out), problem.layout), _rows_back(problem, logsumexp)
    sinks: jax.Array | None = arrays[6]
    return (out, logsumexp) if sinks is None else with_sinks(problem, sinks, out, logsumexp)


def backward(
    problem: AttentionProblem,
    arrays: tuple[Any, ...],
    out: jax.Array,
    logsumexp: jax.Array,
    out_grad: jax.Array,
) -> tuple[Any, ...]:
    """Gradients of query, key, value, bias and sinks (``None`` without them), in the caller's layout and dtype."""
    blocks = _blocks(problem)
    wide = problem.accumulate_dtype
    p = _prepare(problem, blocks, arrays)
    rows = blocks.rows * blocks.row_blocks
    do = to_bhsd(out_grad, problem.layout).astype(wide)
    delta = jnp.sum(do * to_bhsd(out, problem.layout).astype(wide), axis=-1)
    # The products below want the gradient in the operands' own dtype.
    do = _heads(problem, do.astype(problem.dtype), rows)
    delta, lse = _heads(problem, delta, rows), _heads(problem, logsumexp, rows)
    bias = arrays[3]

    def row_block(carry: Any, i: Any) -> tuple[Any, jax.Array]:
        q, g, d, z = (_at(x, i, blocks.rows, 3) for x in (p.query, do, delta, lse))

        def key_block(carry: Any, j: Any) -> tuple[Any, None]:
            def work(carry: Any) -> Any:
                dq, dk, dv, dbias = carry
                k, v = (_at(x, j, blocks.keys, 2) for x in (p.key, p.value))
                s, slope = _scores(problem, blocks, p, i, j, q, k)
                weights = jnp.exp(s - z[..., None])
                ds = weights * (_dot(problem, "bhgqd,bhkd->bhgqk", g, v) - d[..., None])
                if dbias is not None:
                    dbias = _add_bias_gradient(dbias, blocks, i, j, ds)
                if slope is not None:
                    ds = ds * slope
                narrow, w = ds.astype(k.dtype), weights.astype(v.dtype)
                dq = dq + _dot(problem, "bhgqk,bhkd->bhgqd", narrow, k)
                dk = _add_at(dk, j, _dot(problem, "bhgqk,bhgqd->bhkd", narrow, q), 2)
                dv = _add_at(dv, j, _dot(problem, "bhgqk,bhgqd->bhkd", w, g), 2)
                return dq, dk, dv, dbias

            return _when_visible(problem, blocks, i, j, work, carry), None

        start = (jnp.zeros(q.shape, wide), *carry)
        (dq, *carry), _ = lax.scan(
            key_block, alike(start, p, do), jnp.arange(blocks.key_blocks, dtype=jnp.int32)
        )
        return tuple(carry), dq

    start = (
        jnp.zeros(p.key.shape, wide),
        jnp.zeros(p.value.shape, wide),
        None if p.bias is None else jnp.zeros(p.bias.shape, wide),
    )
    (dk, dv, dbias), dq = lax.scan(
        row_block, alike(start, p, do), jnp.arange(blocks.row_blocks, dtype=jnp.int32)
    )
    dq = _rows_back(problem, dq) * problem.scale
    grads = [dq, dk[:, :, : problem.kv_len] * problem.scale, dv[:, :, : problem.kv_len]]
    grads = [from_bhsd(x.astype(problem.dtype), problem.layout) for x in grads]
    if dbias is not None:
        dbias = dbias.reshape(dbias.shape[0], -1, *dbias.shape[3:])
        dbias = dbias[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    sinks: jax.Array | None = arrays[6]
    of_sinks = None if sinks is None else sinks_gradient(problem, sinks, out, logsumexp, out_grad)
    return *grads, dbias, of_sinks


def _add_at(x: jax.Array, index: Any, more: jax.Array, axis: int) -> jax.Array:
    size = more.shape[axis]
    old = lax.dynamic_slice_in_dim(x, index * size, size, axis)
    return lax.dynamic_update_slice_in_dim(x, old + more, index * size, axis)


def _add_bias_gradient(grad: jax.Array, blocks: _Blocks, i: Any, j: Any, ds: jax.Array) -> jax.Array:
    """Add one block's score gradients to the gradient of the (broadcastable, padded) bias."""
    ds = jnp.sum(ds, axis=tuple(a for a in range(5) if grad.shape[a] == 1), keepdims=True)
    zero = jnp.zeros((), jnp.int32)
    row = zero if grad.shape[3] == 1 else i * blocks.rows
    column = zero if grad.shape[4] == 1 else j * blocks.keys
    where = (zero, zero, zero, row, column)
    return lax.dynamic_update_slice(grad, lax.dynamic_slice(grad, where, ds.shape) + ds, where)
