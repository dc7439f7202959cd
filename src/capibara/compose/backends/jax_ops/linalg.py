"""Matrix products, factorisations, distances, features."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "add_diagonal",
    "cartesian_difference",
    "cholesky",
    "diagonal",
    "distance_matrix",
    "eigvalsh",
    "matmul",
    "polynomial_features",
    "principal_components",
    "scaled_dot_product",
    "solve_triangular",
    "transposed_diagonal",
    "tsne_p_joint",
    "zero_diagonal",
]

Array = jax.Array


def matmul(left: Array, right: Array, accumulate: str) -> Array:
    product = jnp.matmul(left, right, preferred_element_type=jnp.dtype(accumulate))
    # Of both: a narrow input must not narrow what wide parameters make of it.
    return product.astype(jnp.result_type(left, right))


def _wide(x: Array) -> Array:
    """Factorisations exist in 32 and 64 bits only; JAX 0.12 refuses others."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def cholesky(x: Array) -> Array:
    return jnp.linalg.cholesky(_wide(x)).astype(x.dtype)


def eigvalsh(x: Array) -> Array:
    return jnp.linalg.eigvalsh(_wide(x)).astype(x.dtype)


def solve_triangular(matrix: Array, right: Array, transposed: bool) -> Array:
    solved = jax.scipy.linalg.solve_triangular(
        _wide(matrix), _wide(right), trans=1 if transposed else 0, lower=True
    )
    return solved.astype(jnp.result_type(matrix, right))


def diagonal(x: Array) -> Array:
    return jnp.diagonal(x, axis1=-2, axis2=-1)


def _on_diagonal(x: Array) -> Array:
    return jnp.eye(x.shape[-2], x.shape[-1], dtype=bool)


def add_diagonal(x: Array, value: Array) -> Array:
    return jnp.where(_on_diagonal(x), x + value, x)


def zero_diagonal(x: Array) -> Array:
    return jnp.where(_on_diagonal(x), 0, x)


def cartesian_difference(left: Array, right: Array) -> Array:
    return left[:, None, :] - right[None, :, :]


def distance_matrix(left: Array, right: Array, norm: Array) -> Array:
    """``Σ |left_i - right_j|^norm`` over the features; the gradient at a distance of 0 is 0."""
    size = jnp.abs(cartesian_difference(left, right))
    zero = size == 0
    return jnp.sum(jnp.where(zero, 0, jnp.power(jnp.where(zero, 1, size), norm)), axis=-1)


def polynomial_features(x: Array, degree: int) -> Array:
    orders = range(1, degree + 1)
    chosen = [c for order in orders for c in combinations_with_replacement(range(x.shape[-1]), order)]
    columns = [math.prod((x[..., i] for i in row[1:]), start=x[..., row[0]]) for row in chosen]
    return jnp.stack(columns, axis=-1)


def principal_components(x: Array, count: int) -> tuple[Array, Array, Array]:
    """Mean, the directions of largest variance as columns (largest entry positive), the variances; no gradient."""
    x = lax.stop_gradient(x)
    mean = jnp.mean(x, axis=0)
    _, size, rows = jnp.linalg.svd(_wide(x - mean), full_matrices=False)
    size, rows = size.astype(x.dtype), rows[:count].astype(x.dtype)
    largest = jnp.take_along_axis(rows, jnp.argmax(jnp.abs(rows), axis=1)[:, None], axis=1)
    return mean, (rows * jnp.sign(largest)).T, jnp.square(size[:count]) / (x.shape[0] - 1)


def tsne_p_joint(squared: Array, perplexity: float) -> Array:
    """Joint probabilities of t-SNE: a Gaussian around each point whose entropy is ``log(perplexity)``.

    The precision is found by bisection of its logarithm (64 halvings of [-60, 60]); no gradient.
    """
    squared = lax.stop_gradient(squared)
    count = squared.shape[0]
    other = ~jnp.eye(count, dtype=bool)
    # Only differences of the exponents matter: from the nearest other point, so that exp() cannot underflow to 0.
    near = jnp.min(jnp.where(other, squared, jnp.inf), axis=1, keepdims=True)
    gap = jnp.where(other, squared - near, 0)

    def rows(log_rate: Array) -> Array:
        weight = jnp.where(other, jnp.exp(-gap * jnp.exp(log_rate)[:, None]), 0)
        return weight / jnp.sum(weight, axis=1, keepdims=True)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low + high) / 2
        p = rows(middle)
        entropy = -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), axis=1)
        wide = entropy > math.log(perplexity)
        return jnp.where(wide, middle, low), jnp.where(wide, high, middle)

    bounds = (jnp.full(count, -60.0, squared.dtype), jnp.full(count, 60.0, squared.dtype))
    low, high = lax.fori_loop(0, 64, halve, bounds)
    p = rows((low + high) / 2)
    return (p + p.T) / (2 * count)


def scaled_dot_product(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, causal: bool, scale: float | None
) -> Array:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = jnp.matmul(query, jnp.swapaxes(key, -1, -2)) * scale
    seen = None
    if causal:
        rows, columns = scores.shape[-2:]
        seen = jnp.arange(columns) <= jnp.arange(rows)[:, None]
    if mask is not None and mask.dtype == bool:
        seen = mask if seen is None else seen & mask
    elif mask is not None:
        scores = scores + mask
        seen = mask != -jnp.inf if seen is None else seen & (mask != -jnp.inf)
    if seen is None:
        return jnp.matmul(jax.nn.softmax(scores, axis=-1), value)
    seen = jnp.broadcast_to(seen, scores.shape)
    # A row that sees nothing gives 0, not 0 / 0.
    peak = jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf)
    peak = lax.stop_gradient(jnp.where(jnp.isfinite(peak), peak, 0))
    weight = jnp.where(seen, jnp.exp(jnp.where(seen, scores - peak, 0)), 0)
    total = jnp.sum(weight, axis=-1, keepdims=True)
    return jnp.matmul(weight / jnp.where(total == 0, 1, total), value)


def transposed_diagonal(x: Array) -> Array:
    return jnp.diagonal(x)[:, None]
