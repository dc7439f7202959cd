"""The selective scan in chunks, as matrix products.

Within a chunk the recurrence is written out: position ``i`` gets from position ``j ≤ i`` the input
``dt_j x_j`` times ``(c_i · b_j) exp(sum of dt·a over j+1 … i)``, which is a masked matrix product like attention
without its softmax. Between chunks only the state is handed on, so the sequential part has ``length/chunk`` steps.
This is the state-space dual form of Dao & Gu 2024 (arXiv:2405.21060, section 6).

All decays are differences of one running sum of ``dt·a`` and are exponentiated only where they are at most zero
(for ``a ≤ 0``), so nothing overflows however long the chunk; the sums are kept in float32 or wider.

In a product over a chunk 0 · NaN would carry what is not finite back to earlier positions. So the products get 0 in its
place, and what depends on it is made NaN afterwards: a state never becomes finite again, so for that the first position
of every channel, head and state that is not finite is enough.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.scan.problem import ScanProblem

__all__ = ["scan"]

CHUNK = 64


@jax.custom_jvp
def _finite(v: jax.Array) -> jax.Array:
    """``v`` with 0 where it is not finite. The derivative passes there too, as it does in the recurrence."""
    return jnp.where(jnp.isfinite(v), v, 0)


_finite.defjvps(lambda tangent, _out, _v: tangent)


def _first(bad: jax.Array) -> jax.Array:
    """[batch, length, …] → the first position that is bad, [batch, …]; ``length`` where none is."""
    length = bad.shape[1]
    at = lax.broadcasted_iota(jnp.int32, bad.shape, 1)
    return jnp.min(jnp.where(bad, at, length), axis=1, initial=length)


@jax.checkpoint
def _spoil(y: jax.Array, of_channel: jax.Array, of_b: jax.Array, rate: jax.Array, c: jax.Array) -> jax.Array:
    """``y [batch, length, groups, heads per group, width]`` with NaN from the positions on that are given.

    These are ``of_channel [batch, groups, heads per group, width]`` and ``of_b [batch, groups, states]``. NaN is added
    and not put in place of ``y``: the gradient of what was written before depends on no value of the state and stays.
    That of ``rate [batch, length, groups, heads per group]`` and ``c [batch, length, groups, states]`` does, and is NaN
    too: hence their products with 0.
    """

    def spoilt(first: jax.Array) -> jax.Array:
        at = lax.broadcasted_iota(jnp.int32, (1, y.shape[1], *[1] * (first.ndim - 1)), 1)
        return jnp.where(at >= first[:, None], jnp.nan, 0).astype(y.dtype)

    decay = 1 + 0 * rate
    read = 1 + jnp.sum(0 * c, axis=-1)
    of_states = jnp.sum(spoilt(of_b) * (1 + 0 * c), axis=-1)
    of_heads = spoilt(of_channel) * read[..., None, None] + of_states[..., None, None]
    return y + of_heads * decay[..., None]


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
    size = min(p.chunk_length or CHUNK, p.length)
    chunks = -(-p.length // size)
    # Padding with dt = 0 is exact: a padded position neither decays the state nor adds to it.
    lack = chunks * size - p.length

    def cut(v: jax.Array) -> jax.Array:
        """[batch, length, …] → [chunks, batch, size, …]."""
        v = jnp.pad(v, [(0, 0), (0, lack)] + [(0, 0)] * (v.ndim - 2))
        return jnp.moveaxis(v.reshape(p.batch, chunks, size, *v.shape[2:]), 1, 0)

    x_wide, step, b_wide, c_wide = (v.astype(wide) for v in (x, dt, b, c))
    rate = step * a.astype(wide)
    # The first positions that are not finite: of a channel, of a head, and of a state of a group.
    of_b = _first(~jnp.isfinite(b_wide))
    of_channel = jnp.minimum(
        _first(~jnp.isfinite(x_wide * step[..., None])), _first(~(rate < jnp.inf))[..., None]
    )
    push = _finite(_finite(x_wide) * _finite(step)[..., None])
    # exp(-inf) is 0, and so is that of a bound below which a sum can neither overflow nor lose its smaller terms.
    least = -128.0 if wide == jnp.float32 else -1024.0
    rate = jnp.where(rate <= least, least, rate)
    below = lax.broadcasted_iota(jnp.int32, (size, size), 0) >= lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )
    # Batch and groups are one axis below (n): h [n, heads per group, width, states], b and c [n, size, states].
    n, heads = p.batch * p.groups, p.heads_per_group
    first = initial_state.astype(wide).reshape(n, heads, p.width, p.states)

    def chunk(h: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        push_k, rate_k, b_k, c_k = now
        # Sums of dt·a up to and with each position. A product, not a cumulative sum: it is as exact, and XLA's CPU
        # compiler does not fuse it into the loop over pairs below, which would then read it with a stride.
        total_k = jnp.einsum("bjh,ij->bhi", rate_k, below.astype(wide), precision=lax.Precision.HIGHEST)
        total_k = total_k.reshape(n, heads, size)
        push_k = jnp.swapaxes(push_k, 1, 2).reshape(n, heads, size, p.width)
        b_k, c_k = (jnp.swapaxes(v, 1, 2).reshape(n, size, p.states) for v in (b_k, c_k))

        # Masked before the exponential: above the diagonal the difference is positive and could overflow.
        gap = jnp.where(below, total_k[..., :, None] - total_k[..., None, :], -jnp.inf)
        mixing = jnp.einsum("nis,njs->nij", c_k, b_k)[:, None] * jnp.exp(gap)
        inside = jnp.einsum("nhij,nhjp->nhip", mixing, push_k)
        carried = jnp.einsum("nis,nhps->nhip", c_k, h) * jnp.exp(total_k)[..., None]

        last = total_k[..., -1:]
        kept = jnp.exp(last)[..., None] * h
        added = jnp.einsum("nhjp,njs->nhps", push_k * jnp.exp(last - total_k)[..., None], b_k)
        y = (inside + carried).reshape(p.batch, p.heads, size, p.width)
        return kept + added, jnp.swapaxes(y, 1, 2)

    rows = push, jnp.where(jnp.isfinite(rate), rate, 0), _finite(b_wide), c_wide
    state, y = lax.scan(jax.checkpoint(chunk), first, tuple(map(cut, rows)))
    split = (p.groups, p.heads_per_group)
    y = jnp.moveaxis(y, 0, 1).reshape(p.batch, chunks * size, *split, p.width)[:, : p.length]
    of_channel = of_channel.reshape(p.batch, *split, p.width)
    y = _spoil(y, of_channel, of_b, _finite(rate).reshape(p.batch, p.length, *split), c_wide)
    of_state = jnp.minimum(of_channel[..., None], of_b[:, :, None, None, :]).reshape(state.shape)
    state = state + jnp.where(of_state < p.length, jnp.nan, 0).astype(wide)
    return y.reshape(x.shape).astype(x.dtype), state.reshape(initial_state.shape)
