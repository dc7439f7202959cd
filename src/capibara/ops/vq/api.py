"""Which entry of a codebook is nearest to each vector.

``|x - e|² = |x|² - 2 x·e + |e|²``, and ``|x|²`` is the same for every code; so the nearest code is the argmin of
``|e|² / 2 - x·e``: one matrix product. The table of distances has tokens × codes entries; the blocked form never
holds more than ``BLOCK_SCORES`` of them. The index is not differentiable: gradients stop here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError, OpTypeError
from capibara.ops.registry import Implementation, Op, public

__all__ = ["nearest_code"]

# Distances alive at a time in the blocked form: 4 MiB in float32, which stays in a CPU's last-level cache.
BLOCK_SCORES = 1 << 20


@dataclass(frozen=True)
class NearestProblem:
    tokens: int
    codes: int
    dim: int
    dtype: str
    implementation: str

    @property
    def accumulate_dtype(self) -> Any:
        return jnp.float64 if self.dtype == "float64" else jnp.float32


def _prepare(
    x: Any, codebook: Any, *, implementation: str = "auto"
) -> tuple[NearestProblem, tuple[Any, ...]]:
    for name, array in (("x", x), ("codebook", codebook)):
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise OpTypeError(f"nearest_code: {name} must be an array, got {type(array).__name__}")
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise OpTypeError(f"nearest_code: {name} must be floating point, got {array.dtype}")
    if len(codebook.shape) != 2 or codebook.shape[0] == 0:
        raise OpShapeError(
            f"nearest_code: codebook must be [codes, dim] with at least one code, got shape {tuple(codebook.shape)}"
        )
    if len(x.shape) < 1 or x.shape[-1] != codebook.shape[1]:
        raise OpShapeError(
            f"nearest_code: the last axis of x {tuple(x.shape)} must have the codebook's dim, {codebook.shape[1]}"
        )
    dtype = str(jnp.promote_types(x.dtype, codebook.dtype))
    tokens = math.prod(x.shape[:-1])
    problem = NearestProblem(tokens, codebook.shape[0], codebook.shape[1], dtype, implementation)
    return problem, (x, codebook)


def _scores(problem: NearestProblem, x: jax.Array, codebook: jax.Array) -> jax.Array:
    """Half the squared distance, less ``|x|²/2``: [tokens, codes]."""
    wide = problem.accumulate_dtype
    codebook = codebook.astype(wide)
    dot = jnp.einsum("td,kd->tk", x.astype(wide), codebook, precision=lax.Precision.HIGHEST)
    return 0.5 * jnp.sum(codebook * codebook, axis=1) - dot


def _blocked(problem: NearestProblem, x: jax.Array, codebook: jax.Array) -> jax.Array:
    x = x.reshape(problem.tokens, problem.dim)
    rows = max(1, BLOCK_SCORES // problem.codes)
    if problem.tokens <= rows:
        return jnp.argmin(_scores(problem, x, codebook), axis=1).astype(jnp.int32)
    blocks = -(-problem.tokens // rows)
    rows = -(-problem.tokens // blocks)
    padded = jnp.pad(x, ((0, blocks * rows - problem.tokens), (0, 0))).reshape(blocks, rows, problem.dim)
    indices = lax.map(lambda block: jnp.argmin(_scores(problem, block, codebook), axis=1), padded)
    return indices.reshape(-1)[: problem.tokens].astype(jnp.int32)


def _reference(problem: NearestProblem, x: jax.Array, codebook: jax.Array) -> jax.Array:
    x = x.reshape(problem.tokens, problem.dim)
    return jnp.argmin(_scores(problem, x, codebook), axis=1).astype(jnp.int32)


OP = Op(
    "nearest_code",
    _prepare,
    [Implementation("xla", {"forward": _blocked}), Implementation("reference", {"forward": _reference})],
)


@public(OP)
def nearest_code(x: jax.Array, codebook: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """The index of the codebook entry nearest to each vector, by Euclidean distance.

    In plain JAX: ``jnp.argmin(jnp.sum((x[..., None, :] - codebook) ** 2, -1), -1)``, computed as one matrix
    product, block by block, so that the tokens × codes table is never whole in memory. Products are float32 (float64
    for float64); two codes closer together than their rounding error may be taken for each other. Of equal
    distances the lowest index wins. Not differentiable: the gradient is zero everywhere.

    Args:
      x: ``[..., dim]``, floating point.
      codebook: ``[codes, dim]``.
      implementation: ``"auto"``, ``"xla"`` (blocked) or ``"reference"`` (the whole table at once).

    Returns:
      ``int32 [...]``.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument does not fit, by name.
    """
    OP.check_name(implementation)
    problem, _ = _prepare(x, codebook, implementation=implementation)
    shape = x.shape[:-1]
    if problem.tokens == 0:
        return jnp.zeros(shape, jnp.int32)
    x, codebook = lax.stop_gradient(x), lax.stop_gradient(codebook)
    return OP.run("forward", problem, x, codebook).reshape(shape)
