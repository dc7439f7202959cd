"""Multi-head latent attention: see :mod:`capibara.compose.backends.jax_ops.latent`."""

from __future__ import annotations

from typing import Any

from capibara.compose.backends.cache_room import check_end, check_room
from capibara.compose.backends.portable import language
from capibara.compose.backends.portable.space import space

Array = Any


def _expanded(query: Array, key_value: Array, rotary_key: Array) -> tuple[Array, Array]:
    xp = space(query)
    rope = rotary_key.shape[-1]
    own = query.shape[-1] - rope
    shared = xp.broadcast_to(rotary_key, (*key_value.shape[:3], rope))
    return xp.concatenate([key_value[..., :own], shared], -1), key_value[..., own:]


def latent_attention(
    query: Array,
    key_value: Array,
    rotary_key: Array,
    causal: bool,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> Array:
    keys, values = _expanded(query, key_value, rotary_key)
    return language.attend(query, keys, values, language._seen(query, keys, causal, window), softcap, scale)


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
    keys, values = _expanded(query, key_value, rotary_key)
    same = segments[:, :, None] == segments[:, None, :]
    return language.attend(
        query, keys, values, same & language._seen(query, keys, causal, window), softcap, scale
    )


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
    xp = space(query)
    check_room(int(xp.to_numpy(position)), query.shape[1], cache.shape[2])
    slots = slots_from(query, position)
    return decoded(query, latent, rotary_key, weight, cache, slots, window, softcap, accumulate, scale)


def slots_from(query: Array, position: Array) -> Array:
    """The places of new tokens that begin at ``position`` in every row."""
    xp = space(query)
    row = position + xp.arange(0, query.shape[1], 1, "int32", query)
    return xp.broadcast_to(row, (query.shape[0], query.shape[1]))


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
    if 0 not in slots.shape:
        check_end(int(space(query).to_numpy(slots).max()), cache.shape[2])
    return decoded(query, latent, rotary_key, weight, cache, slots, window, softcap, accumulate, scale)


def decoded(
    query: Array,
    latent: Array,
    rotary_key: Array,
    weight: Array,
    cache: Array,
    slots: Array,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None,
) -> tuple[Array, Array]:
    """Both of the above: keys and values are computed from all of the cache."""
    xp = space(query)
    kind, rank = xp.dtype_of(cache), latent.shape[-1]
    columns = xp.arange(0, cache.shape[2], 1, "int32", query)
    # [batch, cache, new]: which new token goes to a place.
    goes = slots[:, None, :] == columns[None, :, None]
    rows = xp.astype(xp.concatenate([latent, rotary_key[:, :, 0]], -1), kind)
    placed = xp.matmul(xp.astype(goes, kind), rows)
    there = xp.where(xp.any(goes, 2)[:, :, None], placed, cache[:, 0])
    at = slots[:, :, None]
    seen = columns[None, None, :] <= at * xp.astype(at >= 0, "int32")
    if window is not None:
        seen = seen & (columns[None, None, :] > at - window)
    # 0 times what lies in a place that nobody wrote could be NaN.
    read = xp.where(xp.any(seen, 1)[:, :, None], there, xp.constant(0, there))
    read = xp.astype(read, xp.dtype_of(query))
    keys, values = _expanded(
        query, language.project(read[..., :rank], weight, accumulate), read[:, :, None, rank:]
    )
    return language.attend(query, keys, values, seen, softcap, scale), there[:, None]
