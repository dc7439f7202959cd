"""Losses, one number an element (or a row): see :mod:`capibara.compose.backends.jax_ops.losses`."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.conversion import of_pairs
from capibara.compose.backends.portable.elementwise import absolute, log_softmax, robust_log
from capibara.compose.backends.portable.indexing import one_hot
from capibara.compose.backends.portable.space import space

Array = Any
Weights = tuple[float, ...] | str | None


def _like(x: Array, target: Any) -> Array:
    xp = space(x)
    return xp.astype(target, xp.dtype_of(x)) if hasattr(target, "shape") else xp.constant(target, x)


@of_pairs
def squared_error(x: Array, target: Array) -> Array:
    error = x - _like(x, target)
    return error * error


@of_pairs
def absolute_error(x: Array, target: Array) -> Array:
    return absolute(x - _like(x, target))


@of_pairs
def huber_loss(x: Array, target: Array, delta: float) -> Array:
    size = absolute(x - _like(x, target))
    return space(x).where(size <= delta, 0.5 * (size * size), delta * (size - 0.5 * delta))


@of_pairs
def quantile_loss(x: Array, target: Array, quantile: float) -> Array:
    error = _like(x, target) - x
    return space(x).maximum(quantile * error, (quantile - 1) * error)


@of_pairs
def hinge_loss(x: Array, target: Array) -> Array:
    xp = space(x)
    return xp.maximum(1 - _like(x, target) * x, xp.constant(0, x))


@of_pairs
def quad_hinge_loss(x: Array, target: Array) -> Array:
    loss = hinge_loss(x, target)
    return loss * loss


def _moved_last(x: Array, axis: int) -> Array:
    axis %= x.ndim
    return space(x).transpose(x, (*(i for i in range(x.ndim) if i != axis), axis))


def _class_weights(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array | None:
    """A weight for each class, shaped to broadcast with x."""
    if weights is None:
        return None
    xp = space(x)
    classes = x.shape[axis]
    if weights == "auto":
        target = xp.stop(target)
        if categorical:
            counts = xp.sum(one_hot(xp.reshape(target, (-1,)), classes, xp.dtype_of(x)), 0)
        else:
            counts = xp.sum(xp.reshape(_moved_last(_like(x, target), axis), (-1, classes)), 0)
        some = counts > 0
        one, zero = xp.constant(1, x), xp.constant(0, x)
        row = xp.where(some, xp.sum(counts) / (classes * xp.where(some, counts, one)), zero)
    else:
        row = xp.asarray(list(weights), xp.dtype_of(x), x)
    return xp.reshape(row, [classes if i == axis % x.ndim else 1 for i in range(x.ndim)])


def cross_entropy_log_probs(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array:
    xp = space(x)
    each = _class_weights(x, target, weights, categorical, axis)
    if categorical:
        weighted = x if each is None else x * each
        place = axis % x.ndim
        index = xp.reshape(target, (*x.shape[:place], 1, *x.shape[place + 1 :]))
        return -xp.sum(xp.take_along_axis(weighted, index, place), place)
    target = _like(x, target)
    zero, empty = xp.constant(0, x), target == 0
    terms = xp.where(empty, zero, target * xp.where(empty, zero, x))
    return -xp.sum(terms if each is None else terms * each, axis)


def cross_entropy_logits(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array:
    return cross_entropy_log_probs(log_softmax(x, axis), target, weights, categorical, axis)


def cross_entropy(
    x: Array,
    target: Array,
    weights: Weights,
    categorical: bool,
    axis: int,
    robust: bool,
    threshold: float | None,
) -> Array:
    xp = space(x)
    one = xp.constant(1, x)
    if robust:
        logs = robust_log(x, threshold)
    elif categorical:
        picked = one_hot(target, x.shape[axis], "bool")
        place = axis % x.ndim
        order = list(range(x.ndim - 1))
        order.insert(place, x.ndim - 1)
        logs = xp.log(xp.where(xp.transpose(picked, order), x, one))
    else:
        logs = xp.log(xp.where(target == 0, one, x))
    return cross_entropy_log_probs(logs, target, weights, categorical, axis)


@of_pairs
def kl_divergence(x: Array, target: Array, robust: bool, threshold: float | None) -> Array:
    xp = space(x)
    target = _like(x, target)
    empty, one = target == 0, xp.constant(1, x)
    if robust:
        ratio = robust_log(target, threshold) - robust_log(x, threshold)
    else:
        ratio = xp.log(xp.where(empty, one, target)) - xp.log(xp.where(empty, one, x))
    return xp.where(empty, xp.constant(0, x), target * ratio)


def _positive_weight(target: Array, weight: float | str) -> Any:
    if weight != "auto":
        return float(weight)
    xp = space(target)
    target = xp.stop(target)
    count = 1
    for n in target.shape:
        count *= n
    share = xp.sum(target) / count
    one = xp.constant(1, target)
    return xp.where(share > 0, (1 - share) / xp.where(share > 0, share, one), one)


@of_pairs
def binary_cross_entropy(
    x: Array, target: Array, positive_weight: float | str, robust: bool, threshold: float | None
) -> Array:
    xp = space(x)
    target = _like(x, target)
    weight = _positive_weight(target, positive_weight)
    if robust:
        return -weight * target * robust_log(x, threshold) - (1 - target) * robust_log(1 - x, threshold)
    absent, present = target == 0, target == 1
    one, zero = xp.constant(1, x), xp.constant(0, x)
    first = xp.where(absent, zero, target * xp.log(xp.where(absent, one, x)))
    second = xp.where(present, zero, (1 - target) * xp.log1p(xp.where(present, zero, -x)))
    return -weight * first - second


@of_pairs
def binary_cross_entropy_logits(x: Array, target: Array, positive_weight: float | str) -> Array:
    xp = space(x)
    target = _like(x, target)
    weight = _positive_weight(target, positive_weight)
    return weight * target * xp.softplus(-x) + (1 - target) * xp.softplus(x)
