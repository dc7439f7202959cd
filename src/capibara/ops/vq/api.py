"""Which entry of a codebook is nearest to each vector."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.explicit import over_explicit_axes
from capibara.ops.registry import Implementation, Op, public
from capibara.ops.tuning import Tuning
from capibara.ops.vq import nearest, specs
from capibara.ops.vq.problem import NearestProblem, alike_in_speed, prepare

__all__ = ["nearest_code"]

BLOCKS = {"block_tokens": (64, 128, 256, 512, 1024, 2048, 4096)}

OP = Op(
    "nearest_code",
    prepare,
    [
        Implementation("cpu", {"forward": nearest.cpu}, ("cpu",), tunables=BLOCKS),
        Implementation("xla", {"forward": nearest.xla}, tunables=BLOCKS),
        Implementation("reference", {"forward": nearest.reference}),
    ],
    Tuning(lambda: specs.SPECS, specs.arguments, alike_in_speed, differentiable=False),
)


def _distance(problem: NearestProblem, x: jax.Array, codebook: jax.Array, indices: jax.Array) -> jax.Array:
    """Between each vector and its code; differentiable in both."""
    x, code = x.astype(problem.wide), codebook[indices].astype(problem.wide)
    if problem.metric == "euclidean":
        return jnp.sum(jnp.square(x - code), -1)
    return 1 - jnp.sum(nearest.unit(x) * nearest.unit(code), -1)


@public(OP)
@over_explicit_axes("x", "codebook", out=lambda x, _: x[:-1])
def nearest_code(
    x: jax.Array,
    codebook: jax.Array,
    *,
    metric: str = "euclidean",
    return_distance: bool = False,
    implementation: str = "auto",
) -> Any:
    """The index of the codebook entry nearest to each vector, by Euclidean distance or by angle.

    In plain JAX: ``jnp.argmin(jnp.sum((x[..., None, :] - codebook) ** 2, -1), -1)``, or
    ``jnp.argmax(unit(x) @ unit(codebook).T, -1)`` for the angle; computed as one matrix product, block by block,
    so that the tokens × codes matrix is never in memory as a whole. Products are float32 (float64 for float64); two
    codes closer together than their rounding error may be confused. For equal distances the lowest index wins. The
    index has no gradient; the distance has one, in both operands.

    A code with an infinity is never chosen before a finite one, the first code with NaN always is, and for a vector
    that holds NaN or an infinity, or whose square overflows, the index is 0.

    Args:
      x: ``[..., dim]``, floating point.
      codebook: ``[codes, dim]``.
      metric: ``"euclidean"`` or ``"cosine"``; a zero vector or code is orthogonal to all.
      return_distance: also return the distance to the chosen code.
      implementation: ``"auto"``, ``"cpu"`` (blocks for XLA's CPU compiler), ``"xla"`` (blocks) or
        ``"reference"`` (the whole matrix at once).

    Returns:
      ``int32 [...]``, or a pair of that and the squared Euclidean distances (for ``"cosine"``: 1 - cosine),
      ``[...]`` in float32 or float64.

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, _ = OP.prepare(
        x, codebook, metric=metric, return_distance=return_distance, implementation=implementation
    )
    shape = tuple(x.shape[:-1])
    x, codebook = jnp.asarray(x), jnp.asarray(codebook)
    indices = (
        OP.run("forward", problem, lax.stop_gradient(x), lax.stop_gradient(codebook)).reshape(shape)
        if problem.tokens
        else jnp.zeros(shape, jnp.int32)
    )
    return (indices, _distance(problem, x, codebook, indices)) if return_distance else indices
