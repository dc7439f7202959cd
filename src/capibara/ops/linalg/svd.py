"""The singular value decomposition, optionally of only the largest singular values.

``jnp.linalg.svd`` computes all of them. For the largest few of a large matrix, a randomised sketch is tens of times
cheaper on a CPU, and compiles in seconds for a TPU, where the full decomposition takes minutes. Its error can be
bounded afterwards, from products of the matrix with a few vectors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.checks import check_key
from capibara.ops.errors import OpValueError
from capibara.ops.linalg.arguments import WIDE, check_bool, check_count, check_matrix, on_any_mesh
from capibara.ops.linalg.svd_randomized import error_bound, randomized, randomized_values
from capibara.ops.registry import Implementation, Op, public

__all__ = ["fast_svd"]


@dataclass(frozen=True)
class SVDProblem:
    """A matrix ``[*batch, rows, columns]``, and the requested parts of its decomposition."""

    batch: tuple[int, ...]
    rows: int
    columns: int
    rank: int
    compute_uv: bool
    use_randomized: bool | None
    power_iterations: int
    oversampling: int
    rank_chosen: bool
    dtype: str
    implementation: str

    @property
    def wide(self) -> str:
        return WIDE[self.dtype]

    @property
    def least(self) -> int:
        return min(self.rows, self.columns)


def _prepare(
    matrix: Any,
    rank: int | None = None,
    compute_uv: bool = True,
    use_randomized: bool | None = None,
    power_iterations: int = 3,
    oversampling: int = 16,
    *,
    key: Any = None,
    with_error_bound: bool = False,
    implementation: str = "auto",
) -> tuple[SVDProblem, tuple[Any, ...]]:
    op = "fast_svd"
    dtype = check_matrix(op, "matrix", matrix)
    least = min(matrix.shape[-2:])
    oversampling = check_count(op, "oversampling", oversampling, 0)
    if use_randomized is not None:
        use_randomized = check_bool(op, "use_randomized", use_randomized)
    chosen = rank is None and use_randomized is True and least > 2 * oversampling
    if rank is None:
        rank = -(-least // 4) if chosen else least
    rank = check_count(op, "rank", rank, 0)
    if rank > least:
        raise OpValueError(
            f"{op}: rank must be at most min(rows, columns) = {least} for a matrix of shape "
            f"{tuple(matrix.shape)}, got {rank}"
        )
    check_bool(op, "with_error_bound", with_error_bound)
    if key is not None:
        check_key(op, key)
    problem = SVDProblem(
        batch=tuple(matrix.shape[:-2]),
        rows=matrix.shape[-2],
        columns=matrix.shape[-1],
        rank=rank,
        compute_uv=check_bool(op, "compute_uv", compute_uv),
        use_randomized=use_randomized,
        power_iterations=check_count(op, "power_iterations", power_iterations, 0),
        oversampling=oversampling,
        rank_chosen=chosen,
        dtype=dtype,
        implementation=implementation,
    )
    return problem, (matrix, key)


def _check_randomized(problem: SVDProblem) -> None:
    p = problem
    if p.use_randomized is False:
        raise NotImplementedError("is randomised, and use_randomized=False was asked for")
    sketch = p.rank + p.oversampling
    if sketch > p.least:
        raise NotImplementedError(
            f"needs rank + oversampling ({p.rank} + {p.oversampling} = {sketch}) of at most min(rows, columns) = "
            f"{p.least}"
        )


def _truncated(problem: SVDProblem) -> list[str]:
    if not problem.rank_chosen:
        return []
    return [
        f"use_randomized=True without a rank finds the {problem.rank} largest of {problem.least} singular values. "
        "Remedy: rank=…, as many as are wanted; all of them with use_randomized=False."
    ]


def _not_randomized(problem: SVDProblem) -> list[str]:
    p = problem
    if not p.use_randomized or p.rank + p.oversampling <= p.least or p.implementation != "auto":
        return _truncated(problem)
    return [
        f"use_randomized=True has no effect: rank + oversampling ({p.rank} + {p.oversampling}) is more than "
        f"min(rows, columns) = {p.least}, and all singular values are computed. Remedy: a smaller rank or "
        "oversampling, or use_randomized=False."
    ]


def _randomized(problem: SVDProblem, matrix: jax.Array, key: jax.Array) -> Any:
    if problem.compute_uv:
        return randomized(problem, matrix, key)
    return randomized_values(problem, matrix, key)


def _whole(problem: SVDProblem, matrix: jax.Array, key: jax.Array) -> Any:
    """All singular values, of which the largest are kept."""
    del key
    wide, k = matrix.astype(problem.wide), problem.rank
    if not problem.compute_uv:
        return jnp.linalg.svd(wide, compute_uv=False)[..., :k]
    u, s, vh = jnp.linalg.svd(wide, full_matrices=False)
    return u[..., :k], s[..., :k], vh[..., :k, :]


OP = Op(
    "fast_svd",
    _prepare,
    [
        Implementation("xla", {"forward": _randomized}, check=_check_randomized, remarks=_truncated),
        Implementation("reference", {"forward": _whole}, remarks=_not_randomized),
    ],
)


@public(OP)
def fast_svd(
    matrix: jax.Array,
    rank: int | None = None,
    compute_uv: bool = True,
    use_randomized: bool | None = None,
    power_iterations: int = 3,
    oversampling: int = 16,
    *,
    key: jax.Array | None = None,
    with_error_bound: bool = False,
    implementation: str = "auto",
) -> Any:
    """The ``rank`` largest singular values of a matrix and their vectors.

    In plain JAX: ``u, s, vh = jnp.linalg.svd(matrix, full_matrices=False)``, then ``u[..., :rank]``, ``s[..., :rank]``,
    ``vh[..., :rank, :]``, with vectors determined up to a sign. As in JAX, the third result is V transposed: ``matrix
    ≈ (u * s) @ vh``.

    The randomised form reads the matrix ``2 + 2·power_iterations`` times. With the defaults the spectral error is
    within about 8 % of the smallest that this rank allows, on slowly decaying spectra; the faster the singular values
    decay, the closer it is. All singular values are computed if the sketch (``rank + oversampling``) is larger than
    the matrix, if ``rank`` and ``use_randomized`` are None, or if ``use_randomized`` is False.

    Differentiable, by the derivatives of the singular values and vectors. Derivatives of the vectors need distinct
    singular values, and that of the last vector a gap after its value. Works under ``jit`` and ``vmap``.

    Args:
      matrix: ``[..., rows, columns]``, float32, float64, bfloat16 or float16.
      rank: The number of singular values; None: ``min(rows, columns)``, or with ``use_randomized=True`` a quarter of
        that if it is more than twice ``oversampling``, with an :class:`OpWarning`.
      compute_uv: False: only the singular values.
      use_randomized: None: use a sketch if ``rank`` is given and the sketch fits. True: also without a rank. False:
        compute all singular values, keep the largest.
      power_iterations: Multiplications of the sketch with the matrix and its transpose. More are more accurate.
      oversampling: Sketched directions beyond ``rank``.
      key: For the sketch; None: ``jax.random.key(0)``, so that a call repeats exactly.
      with_error_bound: Also return a bound on ``‖matrix - (u * s) @ vh‖₂``, computed from the result: it holds up to
        rounding (about ``eps·s[0]``) with probability ``1 - 1e-10``, and is usually less than twice the error. It
        reads the matrix twelve times, with few vectors. It has no gradient.
      implementation: ``"auto"``, ``"xla"`` (randomised) or ``"reference"`` (all singular values).

    Returns:
      ``(u [..., rows, rank], s [..., rank], vh [..., rank, columns])`` or ``s``; with ``with_error_bound`` the same
      followed by ``[...]``: ``(u, s, vh, bound)`` or ``(s, bound)``. In float32; float64 for float64 input.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
      NoImplementationError: ``"xla"`` was requested, and the sketch is larger than the matrix.

    Source: Halko, Martinsson & Tropp 2011, "Finding structure with randomness", SIAM Review 53 (arXiv:0909.4061).
    """
    OP.check_name(implementation)
    problem, (matrix, key) = _prepare(
        matrix,
        rank,
        compute_uv,
        use_randomized,
        power_iterations,
        oversampling,
        key=key,
        with_error_bound=with_error_bound,
        implementation=implementation,
    )
    if key is None:
        key = jax.random.key(0)
    matrix = jnp.asarray(matrix)
    if not with_error_bound:
        return _compute(problem, matrix, key)
    u, s, vh = _compute(replace(problem, compute_uv=True), matrix, key)
    bound = on_any_mesh(_bound, (matrix, u, s, vh, key), len(problem.batch))
    return (u, s, vh, bound) if compute_uv else (s, bound)


@partial(jax.jit, static_argnums=0)
def _run(problem: SVDProblem, matrix: jax.Array, key: jax.Array) -> Any:
    return OP.run("forward", problem, matrix, key)


def _compute(problem: SVDProblem, matrix: jax.Array, key: jax.Array) -> Any:
    if problem.rank and math.prod(problem.batch):
        return on_any_mesh(partial(_run, problem), (matrix, key), len(problem.batch))
    s = jnp.zeros((*problem.batch, problem.rank), problem.wide)
    if not problem.compute_uv:
        return s
    u = jnp.zeros((*problem.batch, problem.rows, problem.rank), s.dtype)
    return u, s, jnp.zeros((*problem.batch, problem.rank, problem.columns), s.dtype)


@jax.jit
def _bound(matrix: jax.Array, u: jax.Array, s: jax.Array, vh: jax.Array, key: jax.Array) -> jax.Array:
    if 0 in matrix.shape:
        return jnp.zeros(matrix.shape[:-2], s.dtype)
    matrix, u, s, vh = lax.stop_gradient((matrix, u, s, vh))
    return error_bound(matrix, u, s, vh, jax.random.fold_in(key, 1))
