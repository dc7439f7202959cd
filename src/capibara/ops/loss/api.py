"""The cross-entropy of a language model's labels, from its hidden states and its head."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.linalg.arguments import on_any_mesh
from capibara.ops.loss import reference, xla
from capibara.ops.loss.problem import LossProblem, prepare
from capibara.ops.registry import Implementation, Op, public

__all__ = ["cross_entropy", "reason_for_whole"]

# Fewer logits than these, 64 MiB as float32, are computed faster as a whole.
FEW_LOGITS = 1 << 24


def reason_for_whole(tokens: int, features: int, vocab: int, dtype: str) -> str | None:
    """Why the logits of such a loss are better computed as a whole; None where chunks are better."""
    if tokens * vocab < FEW_LOGITS:
        return f"{tokens} × {vocab} logits are few enough to be computed as a whole"
    # The sum of the head's gradients over chunks is float32. In that dtype it becomes the result in place; in a narrow
    # one it is an array more. Of the planner's programs for TPUs, those with fewer tokens needed more memory for it.
    if dtype in ("bfloat16", "float16") and tokens < 2 * features:
        return f"{tokens} tokens have too few logits for the gradient in float32 of a head of {features} features"
    return None


def _check(problem: LossProblem) -> None:
    # Of a sharded vocabulary the whole logits would have to be gathered.
    if problem.implementation == "auto" and not problem.axes:
        reason = reason_for_whole(problem.tokens, problem.features, problem.vocab, problem.dtype)
        if reason is not None:
            raise NotImplementedError(reason)


OP = Op(
    "cross_entropy",
    prepare,
    [
        Implementation("xla", {"forward": xla.forward}, check=_check),
        Implementation("reference", {"forward": reference.forward}),
    ],
)


def _reduced(problem: LossProblem, hidden: Any, head: Any, labels: Any, weights: Any) -> jax.Array:
    hidden, head = hidden.astype(problem.dtype), head.astype(problem.dtype)
    if labels.dtype.itemsize < 8:  # an unsigned or a narrow kind cannot count from a device's first entry
        labels = labels.astype(jnp.int32)
    counted = labels != problem.ignore_index
    factors = counted.astype(problem.wide)
    if weights is not None:
        factors = jnp.where(counted, weights.astype(problem.wide), 0)
    loss = OP.run("forward", problem, hidden, head, labels, factors)
    if problem.reduction == "none":
        return loss if weights is None else loss * factors
    if problem.reduction == "sum":
        return loss
    total = jnp.sum(factors)
    return jnp.where(total == 0, 0, loss / jnp.where(total == 0, 1, total))


@public(OP)
def cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    labels: jax.Array,
    *,
    weights: jax.Array | None = None,
    layout: str = "fv",
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int = -100,
    reduction: str = "mean",
    axis_name: str | tuple[str, ...] | None = None,
    chunk_size: int | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """The cross-entropy of labels, in nats, from hidden states and the head that scores them.

    In plain JAX, for the defaults::

        logits = (hidden @ head).astype(float32)
        losses = logsumexp(logits, -1) - take_along_axis(logits, labels[..., None], -1)[..., 0]
        loss = jnp.mean(losses, where=labels != ignore_index)

    The array of logits ``[..., vocab]`` is never in memory as a whole: tokens are taken in chunks, and the gradients in
    ``hidden`` and ``head`` are computed together with the loss, by as many matrix products as in the plain form.
    Products are summed in float32 (float64 for float64). Works under ``jit``, ``vmap``, ``grad``, ``jax.checkpoint``
    and inside ``jax.shard_map``; derivatives of the gradient need the whole logits. In a program over several devices
    that XLA splits, each device has its part of the whole logits; call it inside ``jax.shard_map`` for chunks.

    Args:
      hidden: ``[..., features]``: float32, float64, bfloat16 or float16.
      head: ``[features, vocab]``, or ``[vocab, features]`` with ``layout="vf"``.
      labels: integers ``[...]`` from 0 to vocab - 1, or ``ignore_index``. The loss of another one is NaN.
      weights: ``[...]``, a factor for the loss of each token; ``"mean"`` divides by their sum. None: 1.
      layout: ``"fv"`` or ``"vf"``, the axes of ``head``. No transposed copy is made of either.
      softcap: bend logits below this: ``softcap * tanh(logits / softcap)``.
      label_smoothing: the share of the target that is spread evenly over the vocabulary, at least 0 and below 1.
      z_loss: adds ``z_loss * logsumexp(logits)²`` to each loss, which keeps logits small (Chowdhery et al. 2022,
        arXiv:2204.02311).
      ignore_index: the label of tokens without a loss.
      reduction: ``"mean"`` over tokens that are not ignored (0 if there is none), ``"sum"``, or ``"none"``: the loss of
        each token, 0 where it is ignored. ``"none"`` takes a fourth matrix product for the gradient.
      axis_name: mesh axes of the ``jax.shard_map`` around the call over which the vocabulary is sharded: ``head`` is
        then this device's part of it, and labels are those of the whole. None: it is not sharded.
      chunk_size: tokens of a chunk; None: a 32nd of all, at least 128 (256 for a vocabulary of at most 32,768; 1,024
        without gradients, except on TPUs), with at most 512 MiB of logits; on TPUs a 16th of 8192 tokens or more where
        that has at most 128 MiB.
      implementation: ``"auto"``, ``"xla"`` (in chunks) or ``"reference"`` (the whole logits at once, which
        ``"auto"`` takes where they are small).

    Returns:
      A scalar, or ``[...]`` for ``"none"``, in float32 or float64.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, arrays = OP.prepare(
        hidden,
        head,
        labels,
        weights=weights,
        layout=layout,
        softcap=softcap,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        ignore_index=ignore_index,
        reduction=reduction,
        axis_name=axis_name,
        chunk_size=chunk_size,
        implementation=implementation,
    )
    given = tuple(None if a is None else jnp.asarray(a) for a in arrays)
    kept = len(problem.batch) if reduction == "none" else 0
    return on_any_mesh(partial(_reduced, problem), given, kept)
