"""Attention in its plain form, with all scores at once: the oracle of the other implementations."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR, AttentionProblem, from_bhsd, to_bhsd

__all__ = ["attention"]


def attention(
    problem: AttentionProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    query_ids: jax.Array | None,
    key_ids: jax.Array | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """``softmax(softcap(q kᵀ · scale) + bias, without hidden keys) v``, quadratic in memory.

    Sinks are a last column of scores, whose weights are dropped.
    """
    q, k, v = (to_bhsd(x, problem.layout) for x in (query, key, value))
    k, v = (jnp.repeat(x, problem.group, axis=1) for x in (k, v))
    wide = problem.accumulate_dtype
    if problem.operand_dtype is not None:
        q, k, v = (x.astype(problem.operand_dtype) for x in (q, k, v))
    scores = problem.scale * jnp.einsum(
        "bhqd,bhkd->bhqk", q, k, precision=problem.precision, preferred_element_type=wide
    )
    if problem.softcap is not None:
        scores = problem.softcap * jnp.tanh(scores / problem.softcap)
    if bias is not None:
        scores = scores + bias.astype(wide)
    rows = jnp.arange(problem.q_len)[:, None]
    columns = jnp.arange(problem.kv_len)[None, :]
    visible = jnp.ones((1, 1, problem.q_len, problem.kv_len), bool)
    if problem.left is not None:
        visible &= columns >= rows - problem.left
    if problem.right is not None:
        visible &= columns <= rows + problem.right
    if query_ids is not None and key_ids is not None:
        visible &= (query_ids[:, :, None] == key_ids[:, None, :])[:, None]
    scores = scores + jnp.where(visible, 0.0, HIDDEN).astype(wide)
    if sinks is not None:
        column = jnp.broadcast_to(sinks.astype(wide)[:, None, None], (*scores.shape[:3], 1))
        scores = jnp.concatenate([scores, column], axis=-1)
    best = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), ROW_FLOOR))
    weights = jnp.exp(scores - best)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = (weights / jnp.where(total == 0, 1.0, total))[..., : problem.kv_len]
    if problem.operand_dtype is not None:
        weights = weights.astype(problem.operand_dtype)
    out = jnp.einsum("bhqk,bhkd->bhqd", weights, v, precision=problem.precision, preferred_element_type=wide)
    return from_bhsd(out.astype(query.dtype), problem.layout)
