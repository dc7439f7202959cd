"""Matrix products, factorisations, distances, features."""

from __future__ import annotations

import math
from itertools import combinations_with_replacement
from typing import Any

from capibara.compose.backends.portable.elementwise import absolute, softmax
from capibara.compose.backends.portable.space import as_arrays, space

Array = Any


def matmul(left: Array, right: Array, accumulate: str) -> Array:
    xp = space(left, right)
    wide = xp.wide(left, accumulate)
    return xp.astype(xp.matmul(xp.astype(left, wide), xp.astype(right, wide)), xp.dtype_of(left))


def cholesky(x: Array) -> Array:
    xp = space(x)
    return xp.cholesky((x + xp.swapaxes(x, -1, -2)) / 2)


def eigvalsh(x: Array) -> Array:
    return space(x).eigvalsh(x)


def solve_triangular(matrix: Array, right: Array, transposed: bool) -> Array:
    return space(matrix).solve_triangular(matrix, right, transposed)


def diagonal(x: Array) -> Array:
    xp = space(x)
    at = xp.arange(0, min(x.shape[-2:]), 1, "int32", x)
    return xp.getitem(x, (..., at, at))


def _on_diagonal(x: Array) -> Array:
    return space(x).eye(x.shape[-2], x.shape[-1], "bool", x)


def add_diagonal(x: Array, value: Array) -> Array:
    return space(x).where(_on_diagonal(x), x + value, x)


def zero_diagonal(x: Array) -> Array:
    xp = space(x)
    return xp.where(_on_diagonal(x), xp.constant(0, x), x)


def cartesian_difference(left: Array, right: Array) -> Array:
    return left[:, None, :] - right[None, :, :]


def distance_matrix(left: Array, right: Array, norm: Array) -> Array:
    xp = space(left, right)
    _, left, norm = as_arrays(left, norm)
    size = absolute(cartesian_difference(left, right))
    zero = size == 0
    one = xp.constant(1, size)
    return xp.sum(xp.where(zero, xp.constant(0, size), xp.power(xp.where(zero, one, size), norm)), -1)


def polynomial_features(x: Array, degree: int) -> Array:
    orders = range(1, degree + 1)
    chosen = [c for order in orders for c in combinations_with_replacement(range(x.shape[-1]), order)]
    columns = [math.prod((x[..., i] for i in row[1:]), start=x[..., row[0]]) for row in chosen]
    return space(x).stack(columns, -1)


def principal_components(x: Array, count: int) -> tuple[Array, Array, Array]:
    xp = space(x)
    x = xp.stop(x)
    mean = xp.sum(x, 0) / x.shape[0]
    size, rows = xp.svd_rows(x - mean)
    rows = rows[:count]
    largest = xp.take_along_axis(rows, xp.argmax(absolute(rows), 1, True), 1)
    return mean, xp.transpose(rows * xp.sign(largest)), size[:count] * size[:count] / (x.shape[0] - 1)


def tsne_p_joint(squared: Array, perplexity: float) -> Array:
    xp = space(squared)
    squared = xp.stop(squared)
    count = squared.shape[0]
    other = xp.logical_not(xp.eye(count, count, "bool", squared))
    zero = xp.constant(0, squared)
    near = xp.amin(xp.where(other, squared, xp.constant(math.inf, squared)), 1, True)
    gap = xp.where(other, squared - near, zero)

    def rows(log_rate: Array) -> Array:
        weight = xp.where(other, xp.exp(-gap * xp.exp(log_rate)[:, None]), zero)
        return weight / xp.sum(weight, 1, True)

    low = xp.full((count,), -60.0, xp.dtype_of(squared), squared)
    high = -low
    for _ in range(64):
        middle = (low + high) / 2
        p = rows(middle)
        entropy = -xp.sum(p * xp.log(xp.where(p > 0, p, xp.constant(1, p))), 1)
        wide = entropy > math.log(perplexity)
        low, high = xp.where(wide, middle, low), xp.where(wide, high, middle)
    p = rows((low + high) / 2)
    return (p + xp.transpose(p)) / (2 * count)


def masked_softmax(scores: Array, seen: Array) -> Array:
    """Softmax over what is seen; a row that sees nothing gives 0, not 0 / 0."""
    xp = space(scores)
    seen = xp.broadcast_to(seen, scores.shape)
    zero = xp.constant(0, scores)
    peak = xp.amax(xp.where(seen, xp.stop(scores), xp.constant(-math.inf, scores)), -1, True)
    peak = xp.where(peak == -math.inf, zero, peak)
    weight = xp.where(seen, xp.exp(xp.where(seen, scores - peak, zero)), zero)
    total = xp.sum(weight, -1, True)
    return weight / xp.where(total == 0, xp.constant(1, total), total)


def scaled_dot_product(
    query: Array, key: Array, value: Array, mask: Array | None = None, *, causal: bool, scale: float | None
) -> Array:
    xp = space(query)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = xp.matmul(query, xp.swapaxes(key, -1, -2)) * scale
    seen = None
    if causal:
        rows, columns = scores.shape[-2:]
        seen = xp.arange(0, columns, 1, "int32", query) <= xp.arange(0, rows, 1, "int32", query)[:, None]
    if mask is not None and xp.is_bool(mask):
        seen = mask if seen is None else xp.logical_and(seen, mask)
    elif mask is not None:
        scores = scores + mask
        heard = xp.stop(mask) != -math.inf
        seen = heard if seen is None else xp.logical_and(seen, heard)
    weight = softmax(scores, -1) if seen is None else masked_softmax(scores, seen)
    return xp.matmul(weight, value)


def transposed_diagonal(x: Array) -> Array:
    return diagonal(x)[:, None]
