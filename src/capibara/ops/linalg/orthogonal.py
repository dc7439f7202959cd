"""Orthonormal rows from any rows, by matrix products.

Householder's QR works column by column. With many more columns than rows it is several times cheaper to factor the
small Gram matrix: ``G = X Xᵀ = L Lᵀ`` gives ``X = L Q`` with ``Q = L⁻¹ X``. This squares the condition number, which
repetition corrects: a first pass with a shifted Gram matrix, which has a Cholesky factor for every ``X``, and two
more, make ``Q`` orthonormal up to rounding for all but rank-deficient ``X`` (Fukaya, Kannan, Nakatsukasa, Yamamoto &
Yanagisawa 2020, "Shifted Cholesky QR", SIAM J. Sci. Comput. 42). This is checked; if it fails, Householder's method
runs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from capibara.ops.one_device import alike

__all__ = ["lower_inverse", "orthonormal_rows", "product", "roughly_orthonormal_rows", "t"]


def product(*factors: jax.Array) -> jax.Array:
    """The matrix product from left to right, in full precision on every platform."""
    out = factors[0]
    for factor in factors[1:]:
        out = jnp.matmul(out, factor, precision=lax.Precision.HIGHEST)
    return out


def t(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def lower_inverse(factor: jax.Array) -> jax.Array:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return lax.linalg.triangular_solve(factor, eye, left_side=True, lower=True)


def _pass(x: jax.Array, shift: float | jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(L, Q)`` with ``L Q = x``, from the Gram matrix with ``shift`` of its trace on the diagonal."""
    gram = product(x, t(x))
    shift = jnp.asarray(shift, x.dtype)
    least = jnp.where(shift > 0, float(jnp.finfo(x.dtype).tiny), 0.0)  # for a matrix of zeros
    added = shift * jnp.trace(gram, axis1=-2, axis2=-1) + least.astype(x.dtype)
    gram += added[..., None, None] * jnp.eye(gram.shape[-1], dtype=x.dtype)
    factor = lax.linalg.cholesky(gram, symmetrize_input=False)
    return factor, product(lower_inverse(factor), x)


def _scaled(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``x`` with largest entry 1, and what it was divided by: squares neither overflow nor vanish.

    All of a matrix with an infinity becomes NaN: what is finite in it would be 0, and be taken for a number later.
    """
    scale = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True, initial=0.0)
    scale = jnp.where(scale == 0, jnp.ones_like(scale), jnp.where(scale < jnp.inf, scale, jnp.nan))
    return x / scale, scale


def _shift(x: jax.Array) -> float:
    return 11.0 * (x.shape[-1] + x.shape[-2]) ** 0.5 * float(jnp.finfo(x.dtype).eps)


def roughly_orthonormal_rows(x: jax.Array) -> jax.Array:
    """Rows that span the same space as those of ``x``, conditioned well enough for further products."""
    return _pass(_scaled(x)[0], _shift(x))[1]


@custom_vmap
def orthonormal_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``(L, Q)`` with ``L Q = x``, ``L`` lower triangular and the rows of ``Q`` orthonormal.

    Args:
      x: ``[..., rows, columns]`` with at most as many rows as columns.
    """
    scaled, scale = _scaled(x)
    size = x.shape[-2]

    def once_more(state: tuple[jax.Array, jax.Array], shift: jax.Array) -> tuple[Any, None]:
        factor, q = state
        left, q = _pass(q, shift)
        return (product(factor, left), q), None

    # A loop, so that one pass is compiled and not three: a TPU's compiler takes seconds for each.
    eye = jnp.broadcast_to(jnp.eye(size, dtype=x.dtype), (*x.shape[:-2], size, size))
    shifts = jnp.asarray([_shift(x), 0.0, 0.0], x.dtype)
    (found, q), _ = lax.scan(once_more, (alike(eye, x), scaled), shifts)
    error = jnp.abs(product(q, t(q)) - jnp.eye(size, dtype=x.dtype))
    # A NaN, from a Cholesky factor that there is not, fails the comparison. (XLA's maximum on CPUs may drop it.)
    good = jnp.all(error <= 50 * float(jnp.finfo(x.dtype).eps) * size**0.5)

    def householder() -> tuple[jax.Array, jax.Array]:
        q_columns, r = jnp.linalg.qr(t(scaled), mode="reduced")
        return t(r), t(q_columns)

    factor, q = lax.cond(good, lambda: (found, q), householder)
    return factor * scale, q


@orthonormal_rows.def_vmap
def _batched(_: int, __: Any, x: jax.Array) -> Any:
    # By itself the condition would become a selection, and Householder's run every time.
    return orthonormal_rows(x), (True, True)
