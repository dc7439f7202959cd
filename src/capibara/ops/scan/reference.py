"""The selective scan step by step: the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.scan.problem import ScanProblem

__all__ = ["scan"]


def scan(
    problem: ScanProblem,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array,
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """``h ← exp(dt·a) h + dt x ⊗ b``; ``y = h c``, one position after the other; ``h`` is 0 before ``starts``."""
    wide = problem.accumulate_dtype
    rows = [jnp.moveaxis(v.astype(wide), 1, 0) for v in (x, dt, b, c)]
    if starts is not None:
        rows.append(jnp.moveaxis(starts, 1, 0))
    rate = a.astype(wide)

    def step(h: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_t, dt_t, b_t, c_t = now[:4]
        if starts is not None:
            h = jnp.where(now[4][:, None, None, None], 0, h)
        b_t, c_t = (jnp.repeat(v, problem.heads_per_group, axis=1) for v in (b_t, c_t))
        h = (
            jnp.exp(dt_t * rate)[..., None, None] * h
            + (dt_t[..., None] * x_t)[..., None] * b_t[:, :, None, :]
        )
        return h, jnp.sum(h * c_t[:, :, None, :], axis=-1)

    state, y = lax.scan(step, initial_state.astype(wide), tuple(rows))
    return jnp.moveaxis(y, 0, 1).astype(x.dtype), state
