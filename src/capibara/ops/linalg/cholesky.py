"""The Cholesky factor of ``L Lᵀ ± w wᵀ``, from ``L`` in O(n²).

With ``p = L⁻¹ w`` it is ``L M``, where ``M Mᵀ = I ± p pᵀ``. Its factor is known entry by entry: with
``τ_k = 1 ± Σ_{j≤k} p_j²``, ``M_kk = √(τ_k / τ_{k-1})`` and ``M_ik = ± p_i p_k / √(τ_k τ_{k-1})`` below the diagonal.
So ``L M`` is each column of ``L`` times a scalar, plus a running sum of the columns to its right: no step depends on
the previous one, unlike the rotations of the usual algorithm (Gill, Golub, Murray & Saunders 1974, "Methods for
modifying matrix factorizations", method C1).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError
from capibara.ops.linalg.arguments import WIDE, check_bool, check_matrix, on_any_mesh
from capibara.ops.linalg.orthogonal import product, t
from capibara.ops.registry import Implementation, Op, public

__all__ = ["cholesky_update"]


@dataclass(frozen=True)
class UpdateProblem:
    batch: tuple[int, ...]
    size: int
    downdate: bool
    dtype: str
    implementation: str

    @property
    def sign(self) -> float:
        return -1.0 if self.downdate else 1.0


def _prepare(
    factor: Any, vector: Any, *, downdate: bool = False, implementation: str = "auto"
) -> tuple[UpdateProblem, tuple[Any, ...]]:
    op = "cholesky_update"
    kinds = check_matrix(op, "factor", factor), check_matrix(op, "vector", vector, rank=1)
    *batch, rows, columns = factor.shape
    if rows != columns:
        raise OpShapeError(f"{op}: factor must be [..., n, n], got shape {tuple(factor.shape)}")
    if tuple(vector.shape) != (*batch, rows):
        raise OpShapeError(
            f"{op}: vector must have shape {(*batch, rows)} to go with factor {tuple(factor.shape)}, got "
            f"{tuple(vector.shape)}"
        )
    dtype = WIDE[str(jnp.promote_types(*kinds))]
    problem = UpdateProblem(tuple(batch), rows, check_bool(op, "downdate", downdate), dtype, implementation)
    return problem, (factor, vector)


def _columns(problem: UpdateProblem, factor: jax.Array, vector: jax.Array) -> jax.Array:
    factor, vector = jnp.tril(factor.astype(problem.dtype)), vector.astype(problem.dtype)
    # The product with the transpose is the same without the signs of the columns.
    diagonal = jnp.diagonal(factor, axis1=-2, axis2=-1)
    factor = factor * jnp.where(diagonal < 0, -1, 1).astype(problem.dtype)[..., None, :]
    # What is not finite in a row is lost with all of that row and with the columns from there on, as in elimination;
    # the other entries depend on no number of it. So any row will do in its place, and NaN is added in the end.
    bad = ~(jnp.all(jnp.isfinite(factor), axis=-1) & jnp.isfinite(vector))
    factor = jnp.where(bad[..., None], jnp.eye(problem.size, dtype=problem.dtype), factor)
    vector = jnp.where(bad, 0, vector)
    lost = bad[..., :, None] | lax.cummax(bad.astype(jnp.int32), axis=bad.ndim - 1).astype(bool)[..., None, :]
    p = lax.linalg.triangular_solve(factor, vector[..., None], left_side=True, lower=True)[..., 0]
    sums = 1.0 + problem.sign * jnp.cumsum(p * p, axis=-1)
    before = jnp.concatenate([jnp.ones_like(sums[..., :1]), sums[..., :-1]], axis=-1)
    # Where τ is not positive there is no factor. The root of a negative number says so by NaN; that of zero has to.
    sums = jnp.where(sums > 0, sums, jnp.nan)
    scaled = factor * p[..., None, :]
    right = lax.cumsum(scaled, axis=scaled.ndim - 1, reverse=True) - scaled
    return jnp.tril(
        factor * jnp.sqrt(sums / before)[..., None, :]
        + right * (problem.sign * p / jnp.sqrt(sums * before))[..., None, :]
        + jnp.where(lost, jnp.nan, 0).astype(problem.dtype)
    )


def _again(problem: UpdateProblem, factor: jax.Array, vector: jax.Array) -> jax.Array:
    """The matrix itself, and its factor from scratch."""
    factor, w = jnp.tril(factor.astype(problem.dtype)), vector.astype(problem.dtype)
    changed = product(factor, t(factor)) + problem.sign * w[..., :, None] * w[..., None, :]
    return jnp.linalg.cholesky(changed)


OP = Op(
    "cholesky_update",
    _prepare,
    [Implementation("xla", {"forward": _columns}), Implementation("reference", {"forward": _again})],
)


@partial(jax.jit, static_argnums=0)
def _run(problem: UpdateProblem, factor: jax.Array, vector: jax.Array) -> jax.Array:
    return OP.run("forward", problem, factor, vector)


@public(OP)
def cholesky_update(
    factor: jax.Array, vector: jax.Array, *, downdate: bool = False, implementation: str = "auto"
) -> jax.Array:
    """Update a Cholesky factor in O(n²) after adding a rank-1 term to the matrix (or subtracting it).

    In plain JAX: ``jnp.linalg.cholesky(factor @ factor.T + jnp.outer(vector, vector))``, in O(n³). Subtracting
    becomes ill-conditioned as the resulting matrix approaches a singular one; if it is not positive definite, the
    result is NaN. Differentiable; works under ``jit`` and ``vmap``.

    Args:
      factor: ``[..., n, n]``, lower triangular with a nonzero diagonal (its upper triangle is not read; a column with
        a negative diagonal entry is treated as negated); float32, float64, bfloat16 or float16.
      vector: ``[..., n]``.
      downdate: Subtract ``outer(vector, vector)`` instead of adding it.
      implementation: ``"auto"``, ``"xla"`` (the update) or ``"reference"`` (from scratch).

    Returns:
      ``[..., n, n]``, lower triangular with a positive diagonal, in float32 (float64 for float64 input).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.

    Source: Gill, Golub, Murray & Saunders 1974, "Methods for modifying matrix factorizations", Math. Comp. 28.
    """
    OP.check_name(implementation)
    problem, arrays = _prepare(factor, vector, downdate=downdate, implementation=implementation)
    if 0 in factor.shape:
        return jnp.zeros(factor.shape, problem.dtype)
    return on_any_mesh(partial(_run, problem), tuple(jnp.asarray(x) for x in arrays), len(problem.batch))
