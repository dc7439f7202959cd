"""Losses, one number an element (or a row of classes): reduce them with ``mean`` or ``sum``.

Logarithms of probabilities are minus infinity at 0, unless ``threshold`` is given: then they go on along their
tangent below it (see ``robust_log``). A product with a target of 0 is 0 whatever the logarithm is, and so is the
gradient of that target. Weights that come from the target ("auto") are constants for the gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.compose.backends.conversion import of_pairs
from capibara.compose.backends.jax_ops.elementwise import absolute, robust_log

__all__ = [
    "absolute_error",
    "binary_cross_entropy",
    "binary_cross_entropy_logits",
    "cross_entropy",
    "cross_entropy_log_probs",
    "cross_entropy_logits",
    "hinge_loss",
    "huber_loss",
    "kl_divergence",
    "quad_hinge_loss",
    "quantile_loss",
    "squared_error",
]

Array = jax.Array
Weights = tuple[float, ...] | str | None


@of_pairs
def squared_error(x: Array, target: Array) -> Array:
    return jnp.square(x - jnp.asarray(target, x.dtype))


@of_pairs
def absolute_error(x: Array, target: Array) -> Array:
    return absolute(x - jnp.asarray(target, x.dtype))


@of_pairs
def huber_loss(x: Array, target: Array, delta: float) -> Array:
    size = jnp.abs(x - jnp.asarray(target, x.dtype))
    return jnp.where(size <= delta, 0.5 * jnp.square(size), delta * (size - 0.5 * delta))


@of_pairs
def quantile_loss(x: Array, target: Array, quantile: float) -> Array:
    error = jnp.asarray(target, x.dtype) - x
    return jnp.maximum(quantile * error, (quantile - 1) * error)


@of_pairs
def hinge_loss(x: Array, target: Array) -> Array:
    return jnp.maximum(1 - jnp.asarray(target, x.dtype) * x, 0)


@of_pairs
def quad_hinge_loss(x: Array, target: Array) -> Array:
    return jnp.square(hinge_loss(x, target))


def _class_weights(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array | None:
    """A weight for each class, shaped to broadcast with x."""
    if weights is None:
        return None
    classes = x.shape[axis]
    if weights == "auto":
        target = lax.stop_gradient(target)
        if categorical:
            counts = jnp.sum(jax.nn.one_hot(target.reshape(-1), classes, dtype=x.dtype), axis=0)
        else:
            counts = jnp.sum(
                jnp.moveaxis(jnp.asarray(target, x.dtype), axis, -1).reshape(-1, classes), axis=0
            )
        row = jnp.where(counts > 0, jnp.sum(counts) / (classes * jnp.where(counts > 0, counts, 1)), 0)
    else:
        row = jnp.asarray(weights, x.dtype)
    return row.reshape([classes if i == axis % x.ndim else 1 for i in range(x.ndim)])


def cross_entropy_log_probs(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array:
    each = _class_weights(x, target, weights, categorical, axis)
    if categorical:
        weighted = x if each is None else x * each
        index = jnp.expand_dims(target, axis)
        return -jnp.squeeze(jnp.take_along_axis(weighted, index, axis=axis, mode="clip"), axis)
    target = jnp.asarray(target, x.dtype)
    terms = jnp.where(target == 0, 0, target * jnp.where(target == 0, 0, x))
    return -jnp.sum(terms if each is None else terms * each, axis=axis)


def cross_entropy_logits(x: Array, target: Array, weights: Weights, categorical: bool, axis: int) -> Array:
    return cross_entropy_log_probs(jax.nn.log_softmax(x, axis=axis), target, weights, categorical, axis)


def cross_entropy(
    x: Array,
    target: Array,
    weights: Weights,
    categorical: bool,
    axis: int,
    robust: bool,
    threshold: float | None,
) -> Array:
    if robust:
        logs = robust_log(x, threshold)
    elif categorical:
        logs = _picked_log(x, target, axis)
    else:
        logs = jnp.log(jnp.where(target == 0, 1, x))
    return cross_entropy_log_probs(logs, target, weights, categorical, axis)


def _picked_log(x: Array, target: Array, axis: int) -> Array:
    """``log(x)`` where the target picks it, else 0: a probability of 0 elsewhere must not spoil the gradient."""
    picked = jnp.moveaxis(jax.nn.one_hot(target, x.shape[axis], dtype=bool), -1, axis)
    return jnp.log(jnp.where(picked, x, 1))


@of_pairs
def kl_divergence(x: Array, target: Array, robust: bool, threshold: float | None) -> Array:
    target = jnp.asarray(target, x.dtype)
    empty = target == 0
    if robust:
        ratio = robust_log(target, threshold) - robust_log(x, threshold)
    else:
        ratio = jnp.log(jnp.where(empty, 1, target)) - jnp.log(jnp.where(empty, 1, x))
    return jnp.where(empty, 0, target * ratio)


def _positive_weight(target: Array, weight: float | str) -> Array | float:
    if weight != "auto":
        return float(weight)
    share = lax.stop_gradient(jnp.mean(target))
    return jnp.where(share > 0, (1 - share) / jnp.where(share > 0, share, 1), 1)


@of_pairs
def binary_cross_entropy(
    x: Array, target: Array, positive_weight: float | str, robust: bool, threshold: float | None
) -> Array:
    target = jnp.asarray(target, x.dtype)
    weight = _positive_weight(target, positive_weight)
    if robust:
        return -weight * target * robust_log(x, threshold) - (1 - target) * robust_log(1 - x, threshold)
    one, zero = target == 0, target == 1
    first = jnp.where(one, 0, target * jnp.log(jnp.where(one, 1, x)))
    second = jnp.where(zero, 0, (1 - target) * jnp.log1p(jnp.where(zero, 0, -x)))
    return -weight * first - second


@of_pairs
def binary_cross_entropy_logits(x: Array, target: Array, positive_weight: float | str) -> Array:
    target = jnp.asarray(target, x.dtype)
    weight = _positive_weight(target, positive_weight)
    return weight * target * jax.nn.softplus(-x) + (1 - target) * jax.nn.softplus(x)
