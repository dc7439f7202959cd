"""QR: by Gram matrices if the matrix is tall and matrix products are fast, otherwise by Householder reflections."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.linalg.arguments import WIDE, check_matrix, on_any_mesh
from capibara.ops.linalg.orthogonal import orthonormal_rows, product, t
from capibara.ops.registry import Implementation, Op, public

__all__ = ["qr"]

# Below this ratio of rows to columns the products with the Gram matrix cost more than they save.
TALL = 4


@dataclass(frozen=True)
class QRProblem:
    batch: tuple[int, ...]
    rows: int
    columns: int
    dtype: str
    implementation: str

    @property
    def wide(self) -> str:
        return WIDE[self.dtype]


def _prepare(matrix: Any, *, implementation: str = "auto") -> tuple[QRProblem, tuple[Any, ...]]:
    dtype = check_matrix("qr", "matrix", matrix)
    *batch, rows, columns = matrix.shape
    return QRProblem(tuple(batch), rows, columns, dtype, implementation), (matrix,)


def _check_tall(problem: QRProblem) -> None:
    if problem.rows < TALL * problem.columns:
        raise NotImplementedError(
            f"is for matrices at least {TALL} times as tall as wide, not {problem.rows} × {problem.columns}"
        )


def _signed(q: jax.Array, r: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same product with no negative entry on the diagonal of r."""
    diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
    sign = jnp.where(diagonal < 0, -jnp.ones_like(diagonal), jnp.ones_like(diagonal))
    return q * sign[..., None, :], r * sign[..., :, None]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tall(problem: QRProblem, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    factor, q = orthonormal_rows(t(matrix.astype(problem.wide)))
    return _signed(t(q), t(factor))


@_tall.defjvp
def _tall_jvp(problem: QRProblem, primals: Any, tangents: Any) -> Any:
    # dA R⁻¹ = dQ + Q (dR R⁻¹): the part of it inside of Q's space is an antisymmetric plus an upper triangular matrix.
    q, r = _tall(problem, *primals)
    (change,) = tangents
    moved = jax.lax.linalg.triangular_solve(r, change.astype(problem.wide), left_side=False, lower=False)
    inside = product(t(q), moved)
    below = jnp.tril(inside, -1)
    turn = below - t(below)
    return (q, r), (moved - product(q, inside - turn), product(inside - turn, r))


def _householder(problem: QRProblem, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, r = jnp.linalg.qr(matrix.astype(problem.wide), mode="reduced")
    return _signed(q, r)


OP = Op(
    "qr",
    _prepare,
    [
        Implementation("gram", {"forward": _tall}, platforms=("tpu", "cuda", "rocm"), check=_check_tall),
        Implementation("reference", {"forward": _householder}),
    ],
)


@partial(jax.jit, static_argnums=0)
def _run(problem: QRProblem, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
    return OP.run("forward", problem, matrix)


@public(OP)
def qr(matrix: jax.Array, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """``matrix = q @ r`` with orthonormal columns in ``q`` and ``r`` upper triangular, with a nonnegative diagonal.

    In plain JAX: ``q, r = jnp.linalg.qr(matrix)``, with columns of ``q`` and rows of ``r`` negated wherever the
    diagonal of ``r`` is negative, which makes the result unique. On TPUs and GPUs, matrices at least four times as
    tall as wide are factored by their Gram matrix (shifted, then twice more), which uses only matrix products; if
    that does not give an orthonormal ``q``, as for linearly dependent columns, Householder's method runs afterwards.
    On CPUs Householder's method was measured to be faster; other platforms have not been measured.

    Differentiable if the columns are independent; with fewer rows than columns, where JAX's own is.

    Args:
      matrix: ``[..., rows, columns]``, float32, float64, bfloat16 or float16.
      implementation: ``"auto"``, ``"gram"`` (Gram matrices) or ``"reference"`` (Householder).

    Returns:
      ``q [..., rows, k]`` and ``r [..., k, columns]`` with ``k = min(rows, columns)``, in float32 (float64 for
      float64).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
      NoImplementationError: ``"gram"`` was requested, and the matrix is not tall.

    Source: Fukaya et al. 2020, "Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices",
      SIAM J. Sci. Comput. 42.
    """
    OP.check_name(implementation)
    problem, (matrix,) = _prepare(matrix, implementation=implementation)
    p = problem
    if 0 in matrix.shape:
        k = min(p.rows, p.columns)
        return jnp.zeros((*p.batch, p.rows, k), p.wide), jnp.zeros((*p.batch, k, p.columns), p.wide)
    return on_any_mesh(partial(_run, problem), (jnp.asarray(matrix),), len(p.batch))
