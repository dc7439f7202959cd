"""Metrics. None of them has a gradient."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.portable.linalg import diagonal
from capibara.compose.backends.portable.space import space

Array = Any


def confusion(prediction: Array, label: Array, classes: int) -> Array:
    """``[label, prediction]``: how often each pair occurs; pairs with a class outside are not counted."""
    xp = space(prediction)
    inside = (prediction >= 0) & (prediction < classes) & (label >= 0) & (label < classes)
    at = xp.where(inside, label * classes + prediction, xp.constant(classes * classes, label))
    counts = xp.bincount(at, classes * classes + 1)
    return xp.reshape(counts[:-1], (classes, classes))


def class_score(counts: Array, score: str, average: str, dtype: str) -> Array:
    """Precision, recall or F1 from a confusion matrix; a quotient by 0 is 0."""
    xp = space(counts)
    counts = xp.astype(counts, dtype)
    hit, labelled, predicted = diagonal(counts), xp.sum(counts, 1), xp.sum(counts, 0)
    if average == "micro":
        hit, labelled, predicted = (xp.sum(v) for v in (hit, labelled, predicted))
    below = {"precision": predicted, "recall": labelled, "f1": (predicted + labelled) / 2}[score]
    one, zero = xp.constant(1, counts), xp.constant(0, counts)
    value = xp.where(below > 0, hit / xp.where(below > 0, below, one), zero)
    if average == "macro":
        occurs = xp.astype((labelled + predicted) > 0, dtype)
        return xp.sum(value) / xp.maximum(xp.sum(occurs), one)
    if average == "weighted":
        return xp.sum(value * labelled) / xp.maximum(xp.sum(labelled), one)
    return value


def auc(score: Array, label: Array) -> Array:
    """Area under the ROC curve, ties half. NaN without both classes."""
    xp = space(score)
    score = xp.stop(score)
    dtype = xp.dtype_of(score)
    positive = xp.astype(label, dtype)
    order = score[xp.argsort(score, 0)]
    rank = (xp.searchsorted(order, score, False) + xp.searchsorted(order, score, True) - 1) / 2
    count = xp.sum(positive)
    above = xp.sum(xp.astype(rank, dtype) * positive) - count * (count - 1) / 2
    return xp.divide(above, count * (score.shape[0] - count))
