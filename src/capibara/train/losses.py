"""What a model outside of Capibara is trained to do: batches of inputs and targets, and the loss of its outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from capibara.train.errors import DataError

__all__ = ["Parts", "cross_entropy", "mean_loss", "parts_of"]

_USUAL = ("inputs", "targets", "weights")


@dataclass(frozen=True)
class Parts:
    """A batch taken apart.

    Attributes:
      inputs: what the model is called with: an array, or a mapping of several.
      targets: what its outputs are compared with; None if the batch has none.
      weights: how much each target counts, shaped like the targets or like their leading dimensions; None: all alike.
    """

    inputs: Any
    targets: Any = None
    weights: Any = None


def parts_of(batch: Any) -> Parts:
    """Take a batch apart: ``(inputs, targets)``, ``(inputs, targets, weights)``, or a mapping with ``targets``.

    In a mapping ``inputs``, or else everything but ``targets`` and ``weights``, goes to the model.

    Raises:
      DataError: the batch has another form.
    """
    if isinstance(batch, Mapping):
        rest = {key: value for key, value in batch.items() if key not in _USUAL}
        if "inputs" in batch and rest:
            raise DataError(
                f"batch: got 'inputs' and also {', '.join(map(repr, rest))}; expected 'inputs', 'targets' and "
                "'weights' alone. Put everything that the model takes into 'inputs', as a dict."
            )
        return Parts(batch.get("inputs", rest), batch.get("targets"), batch.get("weights"))
    if isinstance(batch, tuple | list):
        if 1 <= len(batch) <= 3:
            return Parts(*batch)
        raise DataError(
            f"batch: got {len(batch)} arrays, expected (inputs, targets) or (inputs, targets, weights). Give several "
            "inputs as a dict."
        )
    return Parts(batch)


def cross_entropy(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """The cross-entropy of each target in nats, in float32 at least.

    Equivalent JAX: ``-jnp.take_along_axis(jax.nn.log_softmax(outputs), targets[..., None], -1)[..., 0]``, or for
    probabilities ``-(targets * jax.nn.log_softmax(outputs)).sum(-1)``.

    Args:
      outputs: logits ``[..., classes]``.
      targets: the number of the class, ``int [...]``; or probabilities ``[..., classes]``.

    Raises:
      DataError: the shapes do not fit.
    """
    if not hasattr(outputs, "ndim") or not jnp.issubdtype(outputs.dtype, jnp.floating):
        raise DataError(
            f"the model returned {jax.tree.map(jnp.shape, outputs)!r:.200}, expected one float array of logits for "
            "the cross-entropy. Give loss=, a function of (outputs, targets)."
        )
    logits = outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32))
    targets = jnp.asarray(targets)
    if jnp.issubdtype(targets.dtype, jnp.integer) and targets.shape == logits.shape[:-1]:
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen
    if jnp.issubdtype(targets.dtype, jnp.floating) and targets.shape == logits.shape:
        return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    raise DataError(
        f"targets: got {targets.dtype} {targets.shape} for outputs of shape {logits.shape}, expected integers of shape "
        f"{logits.shape[:-1]}, the numbers of the classes, or floats of shape {logits.shape}, their probabilities. For "
        "another loss give loss=, a function of (outputs, targets)."
    )


def mean_loss(loss: Callable[[Any, Any], Any], outputs: Any, parts: Parts) -> jax.Array:
    """The mean of ``loss(outputs, targets)``, weighted if the batch has weights.

    Raises:
      DataError: the batch has no targets, or weights that do not fit the loss.
    """
    if parts.targets is None:
        raise DataError(
            "batch: it has no targets. Give pairs (inputs, targets), or a dict with 'inputs' and 'targets'."
        )
    losses = jnp.asarray(loss(outputs, parts.targets))
    if not jnp.issubdtype(losses.dtype, jnp.floating):
        raise DataError(f"loss: got a result of dtype {losses.dtype}, expected a float.")
    if parts.weights is None:
        return jnp.mean(losses)
    weights = jnp.asarray(parts.weights, losses.dtype)
    if weights.shape != losses.shape:
        raise DataError(
            f"weights: got shape {weights.shape}, expected that of the losses, {losses.shape}. A loss= that takes the "
            "mean by itself leaves nothing to weight: return one loss for each target."
        )
    total = jnp.sum(weights)
    # Not 0 times the loss, which may be infinite where nothing counts.
    summed = jnp.sum(jnp.where(weights == 0, 0, losses * weights))
    return jnp.where(total == 0, 0, summed / jnp.where(total == 0, 1, total))
