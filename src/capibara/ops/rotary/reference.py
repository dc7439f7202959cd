"""The rotation as one matrix product for each position: the oracle of the others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.ops.rotary.problem import RotaryProblem

__all__ = ["forward"]


def forward(problem: RotaryProblem, cos: jax.Array, sin: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Each of ``arrays``, turned; of tables in ``problem.wide``."""
    half = problem.dim // 2
    i = np.arange(half)
    first, second = (i, i + half) if problem.layout == "halves" else (2 * i, 2 * i + 1)
    # [dim / 2, from, to]: where a pair's cosine and sine stand in the matrix of a position.
    kept = np.zeros((half, problem.dim, problem.dim))
    kept[i, first, first] = kept[i, second, second] = 1
    crossed = np.zeros((half, problem.dim, problem.dim))
    crossed[i, first, second], crossed[i, second, first] = 1, -1
    best = lax.Precision.HIGHEST
    matrix = jnp.tensordot(cos, jnp.asarray(kept, cos.dtype), 1, precision=best)
    matrix = matrix + jnp.tensordot(sin, jnp.asarray(crossed, sin.dtype), 1, precision=best)
    found = []
    for x in arrays:
        wide = x.astype(problem.wide)
        turned = jnp.matmul(wide[..., : problem.dim], matrix, precision=best)
        found.append(jnp.concatenate([turned, wide[..., problem.dim :]], axis=-1).astype(x.dtype))
    return found
