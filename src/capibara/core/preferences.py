"""Learning from preferences: of two answers to a prompt the chosen one is to become likelier than the rejected one.

A row of a batch is a pair: segment 1 is the prompt with the chosen answer, segment 2 the prompt with the rejected one,
and ``weights`` are 1 on the answers. Direct preference optimisation (Rafailov et al., arXiv:2305.18290) compares how
much likelier each has become than under a reference, the model before training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import InputError
from capibara.core.texts import texts_of

if TYPE_CHECKING:
    import jax

    from capibara.core.model import ModularCapibaraModel

__all__ = ["dpo_loss", "pair_log_probs", "preference_loss"]


def dpo_loss(policy: Any, reference: Any, beta: float) -> jax.Array:
    """``-log sigmoid(beta * ((p_c - r_c) - (p_r - r_r)))`` of each pair: ``[pairs]``.

    Args:
        policy, reference: log-probabilities ``[pairs, 2]`` of the chosen and of the rejected answer.
        beta: above 0: how strongly the model is held to the reference.
    """
    import jax

    change = policy - reference
    return -jax.nn.log_sigmoid(beta * (change[:, 0] - change[:, 1]))


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

    texts = texts_of({name: array for name, array in batch.items() if name != "reference"})
    if texts.segments is None or texts.weights is None:
        raise InputError("a batch of pairs has segments and weights: see capibara.core.preferences")
    weights, segments = texts.target_weights(), jnp.asarray(texts.segments)[:, 1:]
    losses = model.token_losses(params, texts, state=state, key=key, train=train)
    # Not 0 times the loss: it may be infinite where nothing is to be predicted.
    counted = jnp.where(weights == 0, 0, losses * weights.astype(losses.dtype))
    return -jnp.stack([jnp.sum(jnp.where(segments == one, counted, 0), axis=1) for one in (1, 2)], axis=1)


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

    if "reference" not in batch:
        raise InputError(
            "finetune.objective=dpo: the batch has no 'reference': log-probabilities [pairs, 2] of the model before "
            "training, from capibara.core.preferences.pair_log_probs"
        )
    beta = model.config.finetune.beta
    policy = pair_log_probs(model, params, batch, state=state, key=key, train=train)
    reference = jnp.asarray(batch["reference"]).astype(policy.dtype)
    weights = texts_of({k: v for k, v in batch.items() if k != "reference"}).target_weights()
    chosen = jnp.sum(jnp.where(jnp.asarray(batch["segments"])[:, 1:] == 1, weights, 0))
    change = policy - reference
    margin = beta * (change[:, 0] - change[:, 1])
    metrics = {
        "cross_entropy": -jnp.sum(policy[:, 0]) / jnp.maximum(chosen, 1).astype(policy.dtype),
        "accuracy": jnp.mean((margin > 0).astype(policy.dtype)),
        "margin": jnp.mean(margin),
    }
    return jnp.mean(dpo_loss(policy, reference, beta)), metrics
