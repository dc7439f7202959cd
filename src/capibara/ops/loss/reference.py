"""The loss in plain JAX, from the whole array of logits: the oracle of the others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.loss.problem import LossProblem

__all__ = ["forward", "unusable_labels"]


def unusable_labels(problem: LossProblem, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which labels are ignored, and which of the others are not in the vocabulary."""
    ignored = labels == problem.ignore_index
    return ignored, ~ignored & ((labels < 0) | (labels >= problem.vocab * problem.shards))


def forward(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> jax.Array:
    """The loss of each token, ``[*batch]``; or the sum of all, each times its weight."""
    columns = 0 if problem.layout == "fv" else 1
    dims = (((hidden.ndim - 1,), (columns,)), ((), ()))
    logits = lax.dot_general(hidden, head, dims, preferred_element_type=jnp.dtype(problem.wide))
    for axis in reversed(problem.axes):
        logits = lax.all_gather(logits, axis, axis=logits.ndim - 1, tiled=True)
    if problem.softcap is not None:
        logits = problem.softcap * jnp.tanh(logits / problem.softcap)
    ignored, wrong = unusable_labels(problem, labels)
    chosen = jnp.take_along_axis(logits, jnp.where(ignored | wrong, 0, labels)[..., None], axis=-1)[..., 0]
    log_sum = jax.nn.logsumexp(logits, axis=-1)
    loss = log_sum - chosen
    if problem.label_smoothing:
        even = log_sum - jnp.mean(logits, axis=-1)
        loss = (1 - problem.label_smoothing) * loss + problem.label_smoothing * even
    if problem.z_loss:
        loss = loss + problem.z_loss * jnp.square(log_sum)
    loss = jnp.where(ignored, 0.0, jnp.where(wrong, jnp.nan, loss))
    if problem.reduction != "none":
        loss = jnp.sum(loss * weights)
    # Each device has the whole loss; as a sum of equal parts its type says so, and gradients are shared out.
    return lax.psum(loss / problem.shards, problem.axes) if problem.axes else loss
