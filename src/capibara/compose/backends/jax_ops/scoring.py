"""Metrics: numbers that say how good a prediction is. None of them has a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["auc", "class_score", "confusion"]

Array = jax.Array


def confusion(prediction: Array, label: Array, classes: int) -> Array:
    """``[label, prediction]``: how often each pair occurs; pairs with a class outside are not counted."""
    inside = (prediction >= 0) & (prediction < classes) & (label >= 0) & (label < classes)
    at = jnp.where(inside, label * classes + prediction, classes * classes)
    counts = jnp.zeros(classes * classes + 1, jnp.int32).at[at.reshape(-1)].add(1)
    return counts[:-1].reshape(classes, classes)


def class_score(counts: Array, score: str, average: str, dtype: str) -> Array:
    """Precision, recall or F1 from a confusion matrix; a quotient by 0 is 0."""
    counts = counts.astype(dtype)
    hit, labelled, predicted = jnp.diagonal(counts), jnp.sum(counts, axis=1), jnp.sum(counts, axis=0)
    if average == "micro":
        hit, labelled, predicted = (jnp.sum(v) for v in (hit, labelled, predicted))
    below = {"precision": predicted, "recall": labelled, "f1": (predicted + labelled) / 2}[score]
    value = jnp.where(below > 0, hit / jnp.where(below > 0, below, 1), 0)
    if average == "macro":
        occurs = (labelled + predicted) > 0
        return jnp.sum(value) / jnp.maximum(jnp.sum(occurs), 1).astype(dtype)
    if average == "weighted":
        return jnp.sum(value * labelled) / jnp.maximum(jnp.sum(labelled), 1)
    return value


def auc(score: Array, label: Array) -> Array:
    """Area under the ROC curve: how often a positive scores above a negative, ties half. NaN without both."""
    score = lax.stop_gradient(score)
    positive = label.astype(score.dtype)
    order = jnp.sort(score)
    rank = (
        jnp.searchsorted(order, score, side="left") + jnp.searchsorted(order, score, side="right") - 1
    ) / 2
    count = jnp.sum(positive)
    above = jnp.sum(rank.astype(score.dtype) * positive) - count * (count - 1) / 2
    return above / (count * (score.size - count))
