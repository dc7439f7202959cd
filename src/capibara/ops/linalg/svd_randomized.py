"""The largest singular values and vectors by a randomised sketch (Halko, Martinsson & Tropp 2011).

A few random combinations of the rows of a matrix span, after some multiplications with the matrix and its transpose,
nearly the same space as its largest singular vectors; the decomposition inside that space is small. The only
expensive part is products of the matrix with a few vectors, so it compiles in seconds for a TPU.

The vectors are stored as rows (``[sketch, size]``): both products then read the matrix in memory order.

Derivatives are those of the singular values and vectors, not of the algorithm. With ``P`` the projection orthogonal
to the kept vectors and ``B = P_u A P_v`` the dropped part of the matrix, the parts of ``dU`` and ``dV`` outside the
kept space solve ``X_u S - B X_v = P_u dA V``, ``X_v S - Bᵀ X_u = P_v dAᵀ U``; this is solved by conjugate gradients,
without forming ``B``. The larger the gap after the last kept value, the fewer steps they need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.linalg.orthogonal import orthonormal_rows, product, roughly_orthonormal_rows, t
from capibara.ops.one_device import alike

__all__ = ["FAILURE", "error_bound", "randomized", "randomized_values"]

# The probability with which `error_bound` may be exceeded, and how it gets there.
FAILURE = 1e-10
_PROBES = 8
_POWERS = 6
_STEPS = 100


def _transposed(rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """``rows @ matrixᵀ`` without a transposed copy of the matrix."""
    return jnp.einsum("...lk,...mk->...lm", rows, matrix, precision=lax.Precision.HIGHEST)


def _decompose(problem: Any, matrix: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    wide = matrix.astype(problem.wide)
    sketch = problem.rank + problem.oversampling
    right = jax.random.normal(key, (*wide.shape[:-2], sketch, wide.shape[-1]), wide.dtype)
    left = jnp.zeros((*wide.shape[:-2], sketch, wide.shape[-2]), wide.dtype)

    def power(_: jax.Array, vectors: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        _, left = orthonormal_rows(_transposed(roughly_orthonormal_rows(vectors[1]), wide))
        return left, product(left, wide)

    # The sketch and the last product in the loop too: a TPU's compiler takes seconds for each large product.
    vectors = alike((left, right), wide, right)
    left, right = lax.fori_loop(0, problem.power_iterations + 1, power, vectors)
    core, right = orthonormal_rows(right)  # which is left @ matrix
    u, s, vh = jnp.linalg.svd(core, full_matrices=False)
    k = problem.rank
    return product(t(left), u[..., :k]), s[..., :k], product(vh[..., :k, :], right)


def _conjugate_gradients(operator: Callable[[jax.Array], jax.Array], b: jax.Array) -> jax.Array:
    """``x`` with ``operator(x) = b``, where each column is a system of its own (JAX's takes them for one).

    It ends when the residual of each is at rounding, or after ``_STEPS``.
    """

    def dot(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * y, axis=-2, keepdims=True)

    def ratio(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(y == 0, 0.0, x / jnp.where(y == 0, 1.0, y)).astype(b.dtype)

    least = float(jnp.finfo(b.dtype).eps) ** 2 * dot(b, b)

    def unfinished(state: Any) -> jax.Array:
        step, _, _, _, rest = state
        return (step < _STEPS) & jnp.any(rest > least)

    def advance(state: Any) -> Any:
        step, x, residual, direction, rest = state
        moved = operator(direction)
        length = ratio(rest, dot(direction, moved))
        x, residual = x + length * direction, residual - length * moved
        now = dot(residual, residual)
        return step + 1, x, residual, residual + ratio(now, rest) * direction, now

    start = (0, alike(jnp.zeros_like(b), b), b, b, dot(b, b))
    return lax.while_loop(unfinished, advance, start)[1]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def randomized(problem: Any, matrix: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``(u, s, vh)``, truncated to ``problem.rank``."""
    return _decompose(problem, matrix, key)


@randomized.defjvp
def _randomized_jvp(problem: Any, primals: Any, tangents: Any) -> Any:
    matrix, key = primals
    u, s, vh = randomized(problem, matrix, key)
    wide, change = matrix.astype(problem.wide), tangents[0].astype(problem.wide)
    v = t(vh)

    def off(basis: jax.Array, x: jax.Array) -> jax.Array:
        return x - product(basis, product(t(basis), x))

    def dropped(x: jax.Array) -> jax.Array:
        return off(u, product(wide, off(v, x)))

    def dropped_transposed(x: jax.Array) -> jax.Array:
        return off(v, t(product(t(off(u, x)), wide)))

    change_v, change_u = product(change, v), t(product(t(u), change))
    inside = product(t(u), change_v)
    d_s = jnp.diagonal(inside, axis1=-2, axis2=-1)
    row, column = s[..., None, :], s[..., :, None]
    eye = jnp.eye(problem.rank, dtype=s.dtype)
    gaps = (1.0 - eye) / ((row - column) * (row + column) + eye)
    a, b = inside * row, inside * column
    d_u = product(u, gaps * (a + t(a)))
    d_v = product(v, gaps * (b + t(b)))

    r_u, r_v = off(u, change_v) / row, off(v, change_u) / row
    right_side = r_u + dropped(r_v) / row

    def operator(x: jax.Array) -> jax.Array:
        return x - dropped(dropped_transposed(x)) / row**2

    # Symmetric for each column by itself, and positive where the dropped values are below the kept ones.
    x_u = lax.custom_linear_solve(operator, right_side, _conjugate_gradients, symmetric=True)
    x_v = r_v + dropped_transposed(x_u) / row
    return (u, s, vh), (d_u + x_u, d_s, t(d_v + x_v))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def randomized_values(problem: Any, matrix: jax.Array, key: jax.Array) -> jax.Array:
    """Only the singular values; their derivative needs no solve."""
    return _decompose(problem, matrix, key)[1]


@randomized_values.defjvp
def _values_jvp(problem: Any, primals: Any, tangents: Any) -> Any:
    u, s, vh = randomized(problem, *primals)
    change = tangents[0].astype(problem.wide)
    return s, jnp.sum(product(t(u), change) * vh, axis=-1)


def error_bound(matrix: jax.Array, u: jax.Array, s: jax.Array, vh: jax.Array, key: jax.Array) -> jax.Array:
    """A bound that ``‖matrix - u·s·vh‖₂`` exceeds with probability at most ``FAILURE``.

    For a unit vector x of random direction in n dimensions, E = the error and p powers, ``c = ‖(EᵀE)ᵖ x‖`` is at least
    ``‖E‖²ᵖ |x₁|``, and ``|x₁| < a`` has probability at most ``a √(2n/π)``. So with r vectors,
    ``‖E‖ ≤ (√(2n/π) / FAILURE^(1/r))^(1/2p) · max c^(1/2p)`` except with probability ``FAILURE``. (Dixon 1983,
    "Estimating extremal eigenvalues and condition numbers of matrices"; the density of x₁ is at most √(n/2π).)
    """
    wide = matrix.astype(s.dtype)
    # Powers of very large or small numbers leave the range of the type, so all of it is done on numbers near 1.
    scale = jnp.max(jnp.abs(wide), axis=(-2, -1), initial=0)
    scale = jnp.where((scale > 0) & jnp.isfinite(scale), scale, jnp.ones_like(scale))
    wide, s = wide / scale[..., None, None], s / scale[..., None]
    n = wide.shape[-1]
    x = jax.random.normal(key, (*wide.shape[:-2], _PROBES, n), wide.dtype)
    x /= jnp.linalg.norm(x, axis=-1, keepdims=True)
    left, right = t(u) * s[..., :, None], t(vh)
    logarithm = jnp.zeros(x.shape[:-1], x.dtype)
    for _ in range(_POWERS):
        y = _transposed(x, wide) - product(product(x, right), left)
        x = product(y, wide) - product(product(y, u) * s[..., None, :], vh)
        size = jnp.linalg.norm(x, axis=-1, keepdims=True)
        logarithm += jnp.log(size[..., 0])
        x /= jnp.where(size == 0, jnp.ones_like(size), size)
    factor = math.log(math.sqrt(2 * n / math.pi)) - math.log(FAILURE) / _PROBES
    # XLA's maximum on CPUs may drop a NaN.
    largest = jnp.where(jnp.any(jnp.isnan(logarithm), axis=-1), jnp.nan, jnp.max(logarithm, axis=-1))
    return scale * jnp.exp((largest + factor) / (2 * _POWERS))
