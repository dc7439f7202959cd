"""Attention of new positions against a cache of keys and values: the decoding step of a language model."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.attention.problem import HIDDEN, ROW_FLOOR
from capibara.ops.checks import check_scale, check_sinks, check_softcap
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.registry import Implementation, Op, public

__all__ = ["cached_attention"]

# A prefill longer than this is computed in blocks of this many positions.
BLOCK = 128


@dataclass(frozen=True)
class CachedProblem:
    batch: int
    new: int
    heads: int
    kv_heads: int
    cache: int
    scale: float
    window: int | None
    softcap: float | None
    dtype: str
    implementation: str


def _prepare(
    query: Any,
    key_cache: Any,
    value_cache: Any,
    query_positions: Any,
    *,
    sinks: Any = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> tuple[CachedProblem, tuple[Any, ...]]:
    for name, x in (("query", query), ("key_cache", key_cache), ("value_cache", value_cache)):
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise OpTypeError(f"cached_attention: {name} must be an array, got {type(x).__name__}")
        if len(x.shape) != 4:
            raise OpShapeError(
                f"cached_attention: {name} must be [batch, positions, heads, dim], got shape {tuple(x.shape)}"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise OpTypeError(f"cached_attention: {name} must be floating point, got {x.dtype}")
    batch, new, heads, dim = query.shape
    if tuple(key_cache.shape[:3]) != tuple(value_cache.shape[:3]):
        raise OpShapeError(
            f"cached_attention: key_cache {tuple(key_cache.shape)} and value_cache "
            f"{tuple(value_cache.shape)} must have the same batch, positions and heads"
        )
    cache, kv_heads = key_cache.shape[1], key_cache.shape[2]
    if key_cache.shape[0] != batch or key_cache.shape[3] != dim:
        raise OpShapeError(
            f"cached_attention: key_cache {tuple(key_cache.shape)} must have the batch ({batch}) and "
            f"dim ({dim}) of the query {tuple(query.shape)}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise OpShapeError(
            f"cached_attention: {heads} query heads cannot be shared out over {kv_heads} cached heads"
        )
    try:
        positions = jnp.asarray(query_positions)
    except (TypeError, ValueError):
        raise OpTypeError(
            f"cached_attention: query_positions must be integers, got {query_positions!r}"
        ) from None
    except OverflowError:
        raise OpValueError(
            f"cached_attention: query_positions must be integers of 32 bits, got {query_positions!r}"
        ) from None
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        raise OpTypeError(f"cached_attention: query_positions must be integers, got {positions.dtype}")
    shape = tuple(positions.shape)
    if shape == () or shape == (batch, 1):
        positions = positions + jnp.arange(new, dtype=positions.dtype)
    elif shape not in ((batch, new), (1, new)):
        raise OpShapeError(
            f"cached_attention: query_positions must be a scalar start or [batch, 1] starts, or positions "
            f"[batch, new] = {(batch, new)}; got shape {shape}"
        )
    if window is not None:
        if isinstance(window, bool) or not isinstance(window, numbers.Integral):
            raise OpTypeError(f"cached_attention: window must be an int or None, got {window!r}")
        if not 1 <= window < 1 << 31:
            raise OpValueError(f"cached_attention: window must be at least 1 and below 2^31, got {window}")
    check_sinks("cached_attention", sinks, heads)
    softcap, scale = check_softcap("cached_attention", softcap), check_scale("cached_attention", scale)
    problem = CachedProblem(
        batch=batch,
        new=new,
        heads=heads,
        kv_heads=kv_heads,
        cache=cache,
        scale=1.0 / math.sqrt(dim) if scale is None else scale,
        window=None if window is None else int(window),
        softcap=softcap,
        dtype=str(jax.dtypes.canonicalize_dtype(query.dtype)),
        implementation=implementation,
    )
    positions = jnp.broadcast_to(positions, (batch, new))
    return problem, (query, key_cache, value_cache, positions, sinks)


def _written(p: CachedProblem, cache: jax.Array, positions: jax.Array) -> jax.Array:
    """The cache with zeros in slots after every query: 0 times what a slot that nobody wrote holds could be NaN."""
    there = jnp.arange(p.cache) <= jnp.max(positions, axis=1)[:, None]
    return jnp.where(there[:, :, None, None], cache, jnp.zeros((), cache.dtype))


def _attend(
    p: CachedProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    key, value = (_written(p, cache, positions) for cache in (key, value))
    wide = jnp.float64 if p.dtype == "float64" else jnp.float32
    new = query.shape[1]
    q = query.reshape(p.batch, new, p.kv_heads, p.heads // p.kv_heads, -1)
    # dot_general, not einsum, which may turn a product round. The caches are the left side of the one and the right
    # side of the other, so that as they lie in [batch, kv_heads, cache, dim] no compiler has to transpose them.
    s = lax.dot_general(key, q, (((3,), (4,)), ((0, 2), (0, 2))), preferred_element_type=wide)
    s = p.scale * jnp.moveaxis(s, 2, -1)  # [batch, kv_heads, new, group, cache]
    if p.softcap is not None:
        s = p.softcap * jnp.tanh(s / p.softcap)
    at = jnp.arange(p.cache)
    visible = at <= positions[:, :, None]
    if p.window is not None:
        visible &= at > positions[:, :, None] - p.window
    s = s + jnp.where(visible, 0.0, HIDDEN).astype(wide)[:, None, :, None]
    best = jnp.maximum(jnp.max(lax.stop_gradient(s), axis=-1, keepdims=True), ROW_FLOOR)
    if sinks is not None:
        sinks = sinks.astype(wide).reshape(p.kv_heads, 1, -1, 1)
        best = jnp.maximum(best, lax.stop_gradient(sinks))
    weights = jnp.exp(s - best)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - best)
    weights = (weights / jnp.where(total == 0, 1.0, total)).astype(value.dtype)
    out = lax.dot_general(weights, value, (((4,), (1,)), ((0, 1), (0, 2))), preferred_element_type=wide)
    return jnp.moveaxis(out, 1, 2).reshape(p.batch, new, p.heads, -1).astype(p.dtype)


def _blocked(
    p: CachedProblem,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    positions: jax.Array,
    sinks: jax.Array | None,
) -> jax.Array:
    whole = p.new // BLOCK * BLOCK
    if p.new <= BLOCK:
        return _attend(p, query, key, value, positions, sinks)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x[:, :whole].reshape(p.batch, -1, BLOCK, *x.shape[2:]), 1, 0)

    out = lax.map(lambda t: _attend(p, t[0], key, value, t[1], sinks), (split(query), split(positions)))
    out = jnp.moveaxis(out, 0, 1).reshape(p.batch, whole, p.heads, -1)
    if whole == p.new:
        return out
    rest = _attend(p, query[:, whole:], key, value, positions[:, whole:], sinks)
    return jnp.concatenate([out, rest], axis=1)


OP = Op(
    "cached_attention",
    _prepare,
    [Implementation("xla", {"forward": _blocked}), Implementation("reference", {"forward": _attend})],
)


@public(OP)
@over_explicit_axes(
    "query", "key_cache", "value_cache", "query_positions", "sinks", out=lambda query, *_: query[:3]
)
def cached_attention(
    query: jax.Array,
    key_cache: jax.Array,
    value_cache: jax.Array,
    query_positions: jax.Array | int,
    *,
    sinks: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """Attention of new positions against cached keys and values; cache slot ``s`` holds position ``s``.

    In plain JAX, for one head: ``softmax(where(slot <= position, scale · q Kᵀ, -inf)) V``. Slots after a query's
    position do not affect the result, so a cache may be longer than what has been written; slots after all positions
    of a batch element may hold anything, including NaN.

    Args:
      query: ``[batch, new, heads, dim]``; ``new`` is 1 when decoding, the prompt's length when prefilling.
      key_cache: ``[batch, cache, kv_heads, dim]``; ``kv_heads`` divides ``heads`` (grouped-query attention).
      value_cache: ``[batch, cache, kv_heads, value_dim]``.
      query_positions: ``int [batch, new]`` positions, or a scalar (or ``[batch, 1]``) position of the first
        one.
      sinks: ``[heads]``, floating point: as for :func:`flash_attention`.
      scale: Factor on the scores; ``None`` means ``1 / sqrt(dim)``.
      window: The most positions that a query sees, including its own.
      softcap: Limits scores by ``softcap · tanh(scores / softcap)``.
      implementation: ``"auto"``, ``"xla"`` (long prefills in blocks) or ``"reference"`` (all at once).

    Returns:
      ``[batch, new, heads, value_dim]`` in the query's dtype; scores and sums are float32 (float64 for
      float64).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    OP.check_name(implementation)
    problem, arrays = _prepare(
        query,
        key_cache,
        value_cache,
        query_positions,
        sinks=sinks,
        scale=scale,
        window=window,
        softcap=softcap,
        implementation=implementation,
    )
    if 0 in (problem.batch, problem.new, problem.heads, problem.cache):
        return jnp.zeros((*query.shape[:3], value_cache.shape[3]), problem.dtype)
    return OP.run("forward", problem, *arrays)
