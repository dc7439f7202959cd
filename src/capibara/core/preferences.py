"""Learning from preferences: of two answers to a prompt the chosen one is to become likelier than the rejected one.

A row of a batch is a pair: segment 1 is the prompt with the chosen answer, segment 2 the prompt with the rejected one,
and ``weights`` are 1 on the answers. Direct preference optimisation (Rafailov et al., arXiv:2305.18290) compares how
much likelier each has become than under a reference, the model before training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import InputError
from capibara.core.texts import texts_of

if TYPE_CHECKING:
    import jax

    from capibara.core.model import ModularCapibaraModel

__all__ = [
    "answer_sums",
    "check_pairs",
    "dpo_loss",
    "mean_scores",
    "pair_log_probs",
    "pair_scores",
    "preference_loss",
    "without_reference",
]


def dpo_loss(policy: Any, reference: Any, beta: float) -> jax.Array:
    """``-log sigmoid(beta * ((p_c - r_c) - (p_r - r_r)))`` of each pair: ``[pairs]``.

    Args:
        policy, reference: log-probabilities ``[pairs, 2]`` of the chosen and of the rejected answer.
        beta: above 0: how strongly the model is held to the reference.
    """
    import jax

    change = policy - reference
    return -jax.nn.log_sigmoid(beta * (change[:, 0] - change[:, 1]))


def without_reference(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a batch of pairs that the model is given."""
    return {name: array for name, array in batch.items() if name != "reference"}


def check_pairs(batch: Mapping[str, Any], *, reference: bool) -> None:
    """Refuse a batch that is not one of pairs.

    Args:
        batch: as for :func:`pair_log_probs`. reference: it needs that too.

    Raises:
        InputError: an array is missing.
    """
    if batch.get("segments") is None or batch.get("weights") is None:
        raise InputError("a batch of pairs has segments and weights: see capibara.core.preferences")
    if reference and "reference" not in batch:
        raise InputError(
            "finetune.objective=dpo: the batch has no 'reference': log-probabilities [pairs, 2] of the model before "
            "training, from capibara.core.preferences.pair_log_probs"
        )


def answer_sums(losses: Any, weights: Any, segments: Any) -> jax.Array:
    """The sums of the losses of both answers of each pair: ``[pairs, 2]``.

    Args:
        losses, weights, segments: of each target, ``[pairs, sequence]``.
    """
    import jax.numpy as jnp

    # Not 0 times the loss: it may be infinite where nothing is to be predicted.
    counted = jnp.where(weights == 0, 0, losses * weights.astype(losses.dtype))
    return jnp.stack([jnp.sum(jnp.where(segments == one, counted, 0), axis=1) for one in (1, 2)], axis=1)


def pair_scores(policy: Any, reference: Any, beta: float) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Sums over pairs: of their losses, and of what :func:`mean_scores` reports.

    Args:
        policy, reference, beta: as of :func:`dpo_loss`.
    """
    import jax.numpy as jnp

    reference = jnp.asarray(reference).astype(policy.dtype)
    change = policy - reference
    margin = beta * (change[:, 0] - change[:, 1])
    return jnp.sum(dpo_loss(policy, reference, beta)), {
        "cross_entropy": -jnp.sum(policy[:, 0]),
        "accuracy": jnp.sum((margin > 0).astype(policy.dtype)),
        "margin": jnp.sum(margin),
    }


def mean_scores(sums: Mapping[str, Any], weights: Any, segments: Any) -> dict[str, jax.Array]:
    """The metrics of :func:`preference_loss`, from the sums of :func:`pair_scores` over all pairs.

    Args:
        weights, segments: of each target of all pairs, ``[…, pairs, sequence]``.
    """
    import jax.numpy as jnp

    pairs = math.prod(weights.shape[:-1])
    tokens = jnp.maximum(jnp.sum(jnp.where(segments == 1, weights, 0)), 1)
    return {
        name: value / (tokens.astype(value.dtype) if name == "cross_entropy" else pairs)
        for name, value in sums.items()
    }


def pair_log_probs(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    state: Mapping[str, Any],
    key: jax.Array | None = None,
    train: bool = False,
) -> jax.Array:
    """The log-probabilities of both answers of each pair, sums over their tokens: ``[pairs, 2]``.

    Args:
        batch: ``tokens``, ``segments`` and ``weights`` ``[pairs, sequence + 1]``, as the module says.
        Other arguments as for ``model.loss``.
    """
    import jax.numpy as jnp

    check_pairs(batch, reference=False)
    if model.loss_of_microbatches is not None:
        return model.loss_of_microbatches.pair_log_probs(
            params, without_reference(batch), state=state, key=key, train=train
        )
    texts = texts_of(without_reference(batch))
    segments = jnp.asarray(texts.segments)[:, 1:]
    losses = model.token_losses(params, texts, state=state, key=key, train=train)
    return -answer_sums(losses, texts.target_weights(), segments)


def preference_loss(
    model: ModularCapibaraModel,
    params: Mapping[str, Any],
    batch: Mapping[str, Any],
    *,
    state: Mapping[str, Any],
    key: jax.Array | None,
    train: bool,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean loss of a batch of pairs, and metrics.

    Args:
        batch: as for :func:`pair_log_probs`, with ``reference [pairs, 2]``, what it gave before training.

    Returns:
        ``(loss, metrics)``: ``cross_entropy`` of the chosen answers in nats per token; ``accuracy``, the share of pairs
        whose chosen answer has gained more than the other; ``margin``, by how much, times beta.
    """
    import jax.numpy as jnp

    check_pairs(batch, reference=True)
    policy = pair_log_probs(model, params, batch, state=state, key=key, train=train)
    total, sums = pair_scores(policy, batch["reference"], model.config.finetune.beta)
    weights = texts_of(without_reference(batch)).target_weights()
    metrics = mean_scores(sums, weights, jnp.asarray(batch["segments"])[:, 1:])
    return total / policy.shape[0], metrics
