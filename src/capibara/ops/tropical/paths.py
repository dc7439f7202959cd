"""Closures of tropical matrices: the best walks in a graph, by repeated squaring."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.errors import OpShapeError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.tropical.matmul import OP, matmul
from capibara.ops.tropical.problem import check_array, check_semiring

__all__ = ["closure", "shortest_paths"]


@over_explicit_axes("weights", out=lambda weights: weights)
def closure(weights: jax.Array, *, semiring: str = "max_plus", implementation: str = "auto") -> jax.Array:
    """The best weight of any walk from ``i`` to ``j``, including the empty one (weight 0): ``I ⊕ A ⊕ A² ⊕ …``.

    Takes ``ceil(log2 n)`` products. If a walk can pass a cycle that improves it each time, the entry is +inf
    (``max_plus``) or -inf (``min_plus``). A cycle counts as such if its gain exceeds ``4 * n * eps * max(|finite
    weights|)``, so that rounding cannot create one. Differentiable: gradients follow one best walk, as in
    :func:`matmul`.

    Args:
      weights: ``[*batch, n, n]``; a missing edge is the semiring's zero (-inf for ``max_plus``, +inf for
        ``min_plus``).

    Returns:
      ``[*batch, n, n]``, in the dtype of ``weights``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "tropical.closure"
    OP.check_name(implementation)
    check_array(op, "weights", weights, 2)
    check_semiring(op, semiring)
    n = weights.shape[-1]
    if weights.shape[-2] != n:
        raise OpShapeError(f"{op}: weights must be square, [..., n, n], got shape {tuple(weights.shape)}")
    given = jnp.asarray(weights)
    wide: Any = given.astype(jnp.promote_types(given.dtype, jnp.float32))
    if n == 0:
        return given
    sign = 1 if semiring == "max_plus" else -1
    signed = sign * wide
    best = jnp.where(jnp.eye(n, dtype=bool), jnp.maximum(signed, 0), signed)
    for _ in range(max(1, (n - 1).bit_length())):
        best = matmul(best, best, implementation=implementation)
    finite = jnp.max(jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0), axis=(-2, -1))
    slack = 4 * n * jnp.finfo(given.dtype).eps * finite
    gains = jnp.diagonal(best, axis1=-2, axis2=-1) > slack[..., None]
    there = (best > -jnp.inf).astype(jnp.float32)
    endless = jnp.matmul(there * gains[..., None, :].astype(jnp.float32), there) > 0
    best = jnp.where(endless & ~jnp.isnan(best), jnp.inf, best)
    return (sign * best).astype(given.dtype)


@over_explicit_axes("distances", out=lambda distances: distances)
def shortest_paths(distances: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """The length of the shortest path between every pair of nodes: :func:`closure` in ``min_plus``.

    Args:
      distances: ``[*batch, n, n]``; +inf where there is no edge. Negative lengths are allowed; the result is -inf
        where a path can pass a negative cycle.
    """
    return closure(distances, semiring="min_plus", implementation=implementation)
