"""The rotation as elementwise operations, which XLA fuses with what is around them.

Halves are cut apart. Pairs of neighbours are not: an axis of two would fill a TPU's registers with 126 empty places of
each 128. Each feature is multiplied by its cosine, and its neighbour, from the array moved by one, by the sine.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.rotary.problem import RotaryProblem

__all__ = ["forward"]


def _halves(wide: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    a, b = jnp.split(wide, 2, axis=-1)
    return [a * cos - b * sin, b * cos + a * sin]


def _pairs(wide: jax.Array, cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    cos, sin = (jnp.repeat(table, 2, axis=-1) for table in (cos, sin))
    second = lax.broadcasted_iota(jnp.int32, wide.shape, wide.ndim - 1) % 2 == 1
    other = jnp.where(second, _moved(wide, 1), -_moved(wide, -1))
    return [wide * cos + other * sin]


def _moved(x: jax.Array, by: int) -> jax.Array:
    """The last axis moved by one place. As a padding, which XLA fuses; ``jnp.roll`` would be two slices."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0)] * (x.ndim - 1) + [(by, -by, 0)])


def forward(problem: RotaryProblem, cos: jax.Array, sin: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Each of ``arrays``, turned; of tables in ``problem.wide``."""
    cos, sin = cos[..., None, :], sin[..., None, :]
    turn = _halves if problem.layout == "halves" else _pairs
    found = []
    for x in arrays:
        wide = x.astype(problem.wide)
        part = problem.dim < x.shape[-1]
        turned = turn(wide[..., : problem.dim] if part else wide, cos, sin)
        if part:
            turned.append(wide[..., problem.dim :])
        found.append((jnp.concatenate(turned, axis=-1) if len(turned) > 1 else turned[0]).astype(x.dtype))
    return found
