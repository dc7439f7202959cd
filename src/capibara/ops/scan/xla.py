"""The selective scan in chunks, as matrix products.

Within a chunk the recurrence is expanded: position ``i`` receives from position ``j ≤ i`` the input ``dt_j x_j``
times ``(c_i · b_j) exp(sum of dt·a over j+1 … i)``, which is a masked matrix product like attention without its
softmax. Between chunks only the state is passed on, so the sequential part has ``length/chunk`` steps. Where several
sequences share a row, a position receives from those of its own alone. This is the
state-space dual form of Dao & Gu 2024 (arXiv:2405.21060, section 6).

All decays are differences of one running sum of ``dt·a`` and are exponentiated only where they are at most zero
(for ``a ≤ 0``), so nothing overflows for any chunk size; the sums are float32 or wider.

In a product over a chunk, 0 · NaN would propagate NaN and infinity to earlier positions. So the products use 0
instead, and the results that depend on it are set to NaN afterwards. Since a state never becomes finite again, the
first such position of every channel and state is sufficient.
"""

from __future__ import annotations

from typing import Any

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


def _first(bad: jax.Array, axis: int) -> jax.Array:
    """The first place along ``axis`` that is bad, the axis kept; its size where none is."""
    at = lax.broadcasted_iota(jnp.int32, bad.shape, axis)
    return jnp.min(jnp.where(bad, at, bad.shape[axis]), axis=axis, keepdims=True)


def _from(first: jax.Array, axis: int, size: int, dtype: Any) -> jax.Array:
    """NaN from the places ``first`` of ``axis`` on, 0 before them; the axis then has ``size``."""
    shape = [1] * first.ndim
    shape[axis] = size
    return jnp.where(lax.broadcasted_iota(jnp.int32, shape, axis) >= first, jnp.nan, 0).astype(dtype)


def _where(allowed: Any, exponent: jax.Array) -> jax.Array:
    """An exponent, or that of 0 where nothing passes."""
    return exponent if allowed is True else jnp.where(allowed, exponent, -jnp.inf)


def _step(
    problem: ScanProblem,
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial_state: jax.Array,
    starts: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """One position: the decoding step."""
    p = problem
    wide = p.accumulate_dtype
    split = (p.batch, p.groups, p.heads_per_group)
    h = initial_state.astype(wide)
    if starts is not None:
        h = jnp.where(starts[:, 0, None, None, None], 0, h)
    h = h.reshape(*split, p.width, p.states)
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
    starts: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    if problem.length == 1:
        return _step(problem, x, dt, a, b, c, initial_state, starts)
    p = problem
    wide = p.accumulate_dtype
    size = min(p.chunk_size or CHUNK, p.length)
    chunks = -(-p.length // size)
    # Padding with dt = 0 is exact: a padded position neither decays the state nor adds to it.
    lack = chunks * size - p.length

    def cut(v: jax.Array) -> jax.Array:
        """[batch, length, …] → [chunks, batch, size, …]."""
        v = jnp.pad(v, [(0, 0), (0, lack)] + [(0, 0)] * (v.ndim - 2))
        return jnp.moveaxis(v.reshape(p.batch, chunks, size, *v.shape[2:]), 1, 0)

    # exp(-inf) is 0, and so is that of a bound below which a sum can neither overflow nor lose its smaller terms.
    least = -128.0 if wide == jnp.float32 else -1024.0
    rate = dt.astype(wide) * a.astype(wide)
    rate = jnp.where(rate <= least, least, rate)
    below = lax.broadcasted_iota(jnp.int32, (size, size), 0) >= lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )
    # Batch and groups are one axis below (n): h [n, heads per group, width, states], b and c [n, size, states].
    n, heads = p.batch * p.groups, p.heads_per_group
    first = initial_state.astype(wide).reshape(n, heads, p.width, p.states)

    def chunk(h: jax.Array, now: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_k, step_k, rate_k, b_k, c_k = now[:5]
        # Sums of dt·a up to and with each position. A product, not a cumulative sum: it is as exact, and XLA's CPU
        # compiler does not fuse it into the loop over pairs below, which would then read it with a stride.
        sound = jnp.where(jnp.isfinite(rate_k), rate_k, 0)
        total_k = jnp.einsum("bjh,ij->bhi", sound, below.astype(wide), precision=lax.Precision.HIGHEST)
        total_k = total_k.reshape(n, heads, size)
        x_k = jnp.swapaxes(x_k, 1, 2).reshape(n, heads, size, p.width)
        step_k, rate_k = (jnp.swapaxes(v, 1, 2).reshape(n, heads, size, 1) for v in (step_k, rate_k))
        b_k, c_k = (jnp.swapaxes(v, 1, 2).reshape(n, size, p.states) for v in (b_k, c_k))

        # Of a channel [n, heads, 1, width] and of a state of b [n, 1, states]: where it is not finite any more.
        lost = _first(~(jnp.isfinite(x_k * step_k) & jnp.isfinite(rate_k)), 2)
        lost_b = _first(~jnp.isfinite(b_k), 1)
        push_k, b_k = _finite(_finite(x_k) * _finite(step_k)), _finite(b_k)

        # Masked before the exponential: above the diagonal the difference is positive and could overflow.
        seen: Any = below
        entering: Any = True
        fresh: Any = True
        ends: Any = True
        if starts is not None:
            # Which sequence of the chunk a position belongs to, [n, 1, size]; 0: the one that came from before it.
            number = jnp.cumsum(now[5], axis=1, dtype=jnp.int32)
            number = jnp.repeat(number, p.groups, axis=0)[:, None]
            seen = below & (number[..., :, None] == number[..., None, :])
            entering, fresh, ends = number == 0, number[..., -1:] == 0, number == number[..., -1:]
        gap = jnp.where(seen, total_k[..., :, None] - total_k[..., None, :], -jnp.inf)
        mixing = jnp.einsum("nis,njs->nij", c_k, b_k)[:, None] * jnp.exp(gap)
        inside = jnp.einsum("nhij,nhjp->nhip", mixing, push_k)
        carried = jnp.einsum("nis,nhps->nhip", c_k, h) * jnp.exp(_where(entering, total_k))[..., None]

        last = total_k[..., -1:]
        kept = jnp.exp(_where(fresh, last))[..., None] * h
        left = jnp.exp(_where(ends, last - total_k))
        added = jnp.einsum("nhjp,njs->nhps", push_k * left[..., None], b_k)
        # NaN is added to what the products give and not put in its place, as their gradient by what was written at
        # other positions depends on no value of the state. That by c and the decay does: hence the products with 0.
        decay = 1 + 0 * _finite(rate_k)[..., 0]
        by_channel = decay * (1 + jnp.sum(0 * c_k, axis=-1))[:, None]
        by_state = decay * jnp.sum(_from(lost_b, 1, size, wide) * (1 + 0 * c_k), axis=-1)[:, None]
        spoilt = _from(lost, 2, size, wide) * by_channel[..., None] + by_state[..., None]
        y = inside + carried + spoilt
        # From here on the state says so itself.
        gone = (lost < size).reshape(n, heads, p.width, 1) | (lost_b < size)[:, None]
        y = y.reshape(p.batch, p.heads, size, p.width)
        return kept + added + jnp.where(gone, jnp.nan, 0).astype(wide), jnp.swapaxes(y, 1, 2)

    rows = [cut(v.astype(wide)) for v in (x, dt, rate, b, c)]
    if starts is not None:
        rows.append(cut(starts))
    state, y = lax.scan(jax.checkpoint(chunk), first, tuple(rows))
    y = jnp.moveaxis(y, 0, 1).reshape(p.batch, chunks * size, p.heads, p.width)[:, : p.length]
    return y.astype(x.dtype), state.reshape(initial_state.shape)
