"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): keys and values are products of one short vector."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from capibara.compose.backends.cache_room import check_end, check_room
from capibara.compose.backends.jax_stacked import read, write, write_places

__all__ = [
    "attended_rows",
    "cached_latent_attention",
    "latent_attention",
    "ragged_cached_latent_attention",
    "segment_latent_attention",
]

Array = jax.Array


def expanded(query: Array, key_value: Array, rotary_key: Array) -> tuple[Array, Array]:
    """Keys ``[b, s, h, q]`` and values ``[b, s, h, v]``: the rotary part of a key is the same for every head."""
    own = query.shape[-1] - rotary_key.shape[-1]
    shared = jnp.broadcast_to(rotary_key, (*key_value.shape[:3], rotary_key.shape[-1]))
    return jnp.concatenate([key_value[..., :own], shared], axis=-1), key_value[..., own:]


def latent_attention(
    query: Array,
    key_value: Array,
    rotary_key: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    from capibara.ops.attention import flash_attention

    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "layout": "bshd"}
    keys, values = expanded(query, key_value, rotary_key)
    return flash_attention(query, keys, values, use_causal_mask=causal, **options)


def segment_latent_attention(
    query: Array,
    key_value: Array,
    rotary_key: Array,
    segments: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    from capibara.ops.attention import flash_attention

    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale, "layout": "bshd"}
    keys, values = expanded(query, key_value, rotary_key)
    return flash_attention(query, keys, values, use_causal_mask=causal, segment_ids=segments, **options)


def cached_latent_attention(
    query: Array,
    latent: Array,
    rotary_key: Array,
    weight: Array,
    cache: Array,
    position: Array,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None = None,
) -> tuple[Array, Array]:
    new, places = query.shape[1], cache.shape[2]
    if not isinstance(position, Tracer):
        check_room(int(position), new, places)
    position = jnp.asarray(position, jnp.int32)
    zero = jnp.zeros((), jnp.int32)  # a Python 0 would be int64 while 64-bit numbers are on
    cache = write(cache, _rows(latent, rotary_key), (zero, zero, position, zero))
    at = jnp.broadcast_to(position + jnp.arange(new, dtype=jnp.int32), query.shape[:2])
    out = _attended(query, weight, read(cache), at, window, softcap, accumulate, scale)
    return out, cache


def ragged_cached_latent_attention(
    query: Array,
    latent: Array,
    rotary_key: Array,
    weight: Array,
    cache: Array,
    slots: Array,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None = None,
) -> tuple[Array, Array]:
    if not isinstance(slots, Tracer) and slots.size:
        check_end(int(slots.max()), cache.shape[2])
    cache = write_places(cache, _rows(latent, rotary_key), slots)
    at = jnp.maximum(slots, 0)
    return _attended(query, weight, read(cache), at, window, softcap, accumulate, scale), cache


def _rows(latent: Array, rotary_key: Array) -> Array:
    """What the cache holds of new tokens: ``[b, 1, s, rank + rope]``."""
    return jnp.concatenate([latent[:, None], jnp.swapaxes(rotary_key, 1, 2)], axis=-1)


def _attended(
    query: Array,
    weight: Array,
    cache: Array,
    at: Array,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None,
) -> Array:
    """:func:`attended_rows` over the cache ``[b, 1, cache, rank + rope]``."""
    rows = jnp.swapaxes(cache, 1, 2)
    return attended_rows(query, weight, rows, at, window, softcap, accumulate, scale)


def attended_rows(
    query: Array,
    weight: Array,
    rows: Array,
    at: Array,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None,
) -> Array:
    """``query [b, s, h, q]`` over ``rows [b, cache, 1, rank + rope]``, with ``weight [rank, h, own + v]``.

    Either keys and values are computed from the cache, or the weight is multiplied with queries and results instead
    ("absorbed"), and every head reads the cache itself: whichever takes fewer operations. One token at a time that is
    the second.
    """
    from capibara.ops.attention import cached_attention

    rank, wide = weight.shape[0], jnp.dtype(accumulate)
    rope = rows.shape[3] - rank
    own = query.shape[-1] - rope
    value = weight.shape[2] - own
    if scale is None:
        scale = query.shape[-1] ** -0.5
    options: dict[str, Any] = {"window": window, "softcap": softcap, "scale": scale}

    def product(form: str, x: Array, y: Array) -> Array:
        return jnp.einsum(form, x, y, preferred_element_type=wide).astype(query.dtype)

    new, places = query.shape[1], rows.shape[1]
    absorbed = new * (rank * (own + value) + places * (2 * rank + rope))
    if absorbed <= places * rank * (own + value) + new * places * (own + rope + value):
        inner = product("bshd,rhd->bshr", query[..., :own], weight[..., :own])
        inner = jnp.concatenate([inner, query[..., own:]], axis=-1)
        out = cached_attention(inner, rows, rows[..., :rank], at, **options)
        return product("bshr,rhd->bshd", out, weight[..., own:])
    key_value = product("blr,rhd->blhd", rows[:, :, 0, :rank].astype(weight.dtype), weight)
    keys, values = expanded(query, key_value, rows[..., rank:].astype(query.dtype))
    return cached_attention(query, keys, values, at, **options)
