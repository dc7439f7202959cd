"""Attention sinks: a logit of each query head that only adds to the softmax's denominator (gpt-oss, arXiv:2508.10925).

A row whose scores have the log-sum-exp ``z`` has ``z' = log(exp z + exp b)`` with the sink ``b`` beside them, and its
output ``o`` becomes ``o' = o exp(z - z')``. Weights are ``exp(s - z')``, and a score's gradient is its weight times
``do · v - do · o'``: so the usual backward pass, given ``o'`` and ``z'``, returns the gradients of query, key, value
and bias. The sink is a score whose value is zero: its gradient is the sum of ``-exp(b - z') do · o'``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.ops.attention.problem import AttentionProblem, to_bhsd

__all__ = ["sinks_gradient", "with_sinks"]

_LOG2_E = 1.4426950408889634


def with_sinks(
    problem: AttentionProblem, sinks: jax.Array, out: jax.Array, stat: jax.Array, *, binary: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The output (in the caller's layout) and the log-sum-exp of rows with the sinks beside their scores.

    Args:
      sinks: ``[heads]``. out, stat: of the same call without sinks; ``stat`` is ``[batch, heads, q_len]``.
      binary: ``stat`` is the log2-sum-exp2 of scores times log2 e.
    """
    logits = _logits(sinks, stat, binary)
    joined = (jnp.logaddexp2 if binary else jnp.logaddexp)(stat, logits)
    factor = (jnp.exp2 if binary else jnp.exp)(stat - joined)
    if binary:
        # The compiled kernels' statistic of a row that sees no key, whose output is zero.
        factor = jnp.where(stat == jnp.inf, 0.0, factor)
    factor = to_bhsd(factor[..., None], problem.layout)  # its own inverse
    return (out * factor).astype(out.dtype), joined


def sinks_gradient(
    problem: AttentionProblem,
    sinks: jax.Array,
    out: jax.Array,
    stat: jax.Array,
    out_grad: jax.Array,
    *,
    binary: bool = False,
) -> jax.Array:
    """The gradient of the sinks, in their dtype; ``out`` and ``stat`` are those of :func:`with_sinks`."""
    wide = problem.accumulate_dtype
    delta = jnp.sum(out_grad.astype(wide) * out.astype(wide), axis=-1)
    delta = delta if problem.layout == "bhsd" else jnp.swapaxes(delta, 1, 2)
    weights = (jnp.exp2 if binary else jnp.exp)(_logits(sinks, stat, binary) - stat)
    return -jnp.sum(weights * delta, axis=(0, 2)).astype(sinks.dtype)


def _logits(sinks: jax.Array, stat: jax.Array, binary: bool) -> jax.Array:
    """The sinks ``[heads, 1]``, in the unit and the dtype of ``stat``."""
    return sinks.astype(stat.dtype)[:, None] * (_LOG2_E if binary else 1.0)
