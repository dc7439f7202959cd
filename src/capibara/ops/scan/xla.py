"""The selective scan in chunks, as matrix products.

Within a chunk the recurrence is written out: position ``i`` gets from position ``j ≤ i`` the input
``dt_j x_j`` times ``(c_i · b_j) exp(sum of dt·a over j+1 … i)``, which is a masked matrix product like attention
without its softmax. Between chunks only the state is handed on, so the sequential part has ``length/chunk`` steps.
This is the state-space dual form of Dao & Gu 2024 (arXiv:2405.21060, section 6).

All decays are differences of one running sum of ``dt·a`` and are exponentiated only where they are at most zero
(for ``a ≤ 0``), so nothing overflows however long the chunk; the sums are kept in float32 or wider.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.scan.problem import ScanProblem

__all__ = ["scan"]


def _step(
    problem: ScanProblem,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One position: the decoding step."""
    p = problem
    wide = p.accumulate_dtype
    split = (p.batch, p.groups, p.heads_per_group)
    h = initial_state.astype(wide).reshape(*split, p.width, p.states)
    step = dt[:, 0].astype(wide)
    decay = jnp.exp(step * a.astype(wide)).reshape(*split, 1, 1)
    push = (step[..., None] * x[:, 0].astype(wide)).reshape(*split, p.width, 1)
    h = decay * h + push * b[:, 0].astype(wide)[:, :, None, None, :]
    y = jnp.sum(h * c[:, 0].astype(wide)[:, :, None, None, :], axis=-1)
    y = y.reshape(p.batch, 1, p.heads, p.width).astype(x.dtype)
    return y, h.reshape(initial_state.shape)


def scan(
    problem: ScanProblem,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    if problem.length == 1:
        return _step(problem, x, dt, a, b, c, initial_state)
    p = problem
    wide = p.accumulate_dtype
    size = min(p.chunk_length, p.length)
    chunks = -(-p.length // size)
    # Padding with dt = 0 is exact: a padded position neither decays the state nor adds to it.
    lack = chunks * size - p.length

    def cut(v: jax.Array) -> jax.Array:
        """[batch, length, …] → [chunks, batch, size, …]."""
        v = jnp.pad(v.astype(wide), [(0, 0), (0, lack)] + [(0, 0)] * (v.ndim - 2))
        return jnp.moveaxis(v.reshape(p.batch, chunks, size, *v.shape[2:]), 1, 0)

    step = cut(dt)
    push = cut(x) * step[..., None]
    # Sums of dt·a up to and with each position, [chunks, batch, heads, size].
    total = jnp.swapaxes(jnp.cumsum(step * a.astype(wide), axis=2), 2, 3)
    below = lax.broadcasted_iota(jnp.int32, (size, size), 0) >= lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )
    first = initial_state.astype(wide).reshape(p.batch, p.groups, p.heads_per_group, p.width, p.states)

    def chunk(h: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        push_k, total_k, b_k, c_k = now
        split = (p.batch, p.groups, p.heads_per_group)
        total_k = total_k.reshape(*split, size)
        # [batch, groups, heads per group, size, width]; b and c as [batch, groups, size, states].
        push_k = jnp.moveaxis(push_k, 1, 2).reshape(*split, size, p.width)
        b_k, c_k = jnp.swapaxes(b_k, 1, 2), jnp.swapaxes(c_k, 1, 2)

        # Masked before the exponential: above the diagonal the difference is positive and could overflow.
        gap = jnp.where(below, total_k[..., :, None] - total_k[..., None, :], -jnp.inf)
        mixing = jnp.einsum("bgin,bgjn->bgij", c_k, b_k)[:, :, None] * jnp.exp(gap)
        inside = jnp.einsum("bghij,bghjp->bghip", mixing, push_k)
        carried = jnp.einsum("bgin,bghpn->bghip", c_k, h) * jnp.exp(total_k)[..., None]

        last = total_k[..., -1:]
        kept = jnp.exp(last)[..., None] * h
        added = jnp.einsum("bghjp,bgjn->bghpn", push_k * jnp.exp(last - total_k)[..., None], b_k)
        y = (inside + carried).reshape(p.batch, p.heads, size, p.width)
        return kept + added, jnp.moveaxis(y, 1, 2)

    state, y = lax.scan(chunk, first, (push, total, cut(b), cut(c)))
    y = jnp.moveaxis(y, 0, 1).reshape(p.batch, chunks * size, p.heads, p.width)[:, : p.length]
    return y.astype(x.dtype), state.reshape(initial_state.shape)
