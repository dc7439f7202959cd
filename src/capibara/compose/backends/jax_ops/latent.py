"""Multi-head latent attention (DeepSeek-AI, arXiv:2405.04434): keys and values are products of one short vector."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from capibara.compose.backends.cache_room import check_end, check_room
from capibara.compose.backends.jax_stacked import read, write, write_places

__all__ = [
    "attended_pages",
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

    form = _Form.of(query, weight, rows, rows.shape[1], window, softcap, accumulate, scale)
    if form.absorbed:
        inner = form.inner(query, weight)
        return form.outer(cached_attention(inner, rows, rows[..., : form.rank], at, **form.options), weight)
    return cached_attention(query, *form.expanded(query, weight, rows), at, **form.options)


@dataclass(frozen=True)
class _Form:
    """How queries meet what a cache holds: see :func:`attended_rows`.

    Attributes:
        own: elements of a key that are not rotated. absorbed: whether the weight is multiplied with queries and
            results.
    """

    rank: int
    own: int
    absorbed: bool
    accumulate: str
    window: int | None
    softcap: float | None
    scale: float

    @classmethod
    def of(
        cls,
        query: Array,
        weight: Array,
        rows: Array,
        places: int,
        window: int | None,
        softcap: float | None,
        accumulate: str,
        scale: float | None,
    ) -> _Form:
        """For rows of a cache with so many places of each sequence."""
        rank, new = weight.shape[0], query.shape[1]
        rope = rows.shape[-1] - rank
        own = query.shape[-1] - rope
        value = weight.shape[2] - own
        factor: float = query.shape[-1] ** -0.5 if scale is None else scale
        absorbed = new * (rank * (own + value) + places * (2 * rank + rope))
        few = absorbed <= places * rank * (own + value) + new * places * (own + rope + value)
        return cls(rank, own, few, accumulate, window, softcap, factor)

    @property
    def options(self) -> dict[str, Any]:
        return {"window": self.window, "softcap": self.softcap, "scale": self.scale}

    def _product(self, form: str, x: Array, y: Array, dtype: Any) -> Array:
        return jnp.einsum(form, x, y, preferred_element_type=jnp.dtype(self.accumulate)).astype(dtype)

    def inner(self, query: Array, weight: Array) -> Array:
        """Queries of rows as they are: ``[b, s, h, rank + rope]``."""
        own = self._product("bshd,rhd->bshr", query[..., : self.own], weight[..., : self.own], query.dtype)
        return jnp.concatenate([own, query[..., self.own :]], axis=-1)

    def outer(self, out: Array, weight: Array) -> Array:
        """Values of sums of latents ``[b, s, h, rank]``."""
        return self._product("bshr,rhd->bshd", out, weight[..., self.own :], out.dtype)

    def expanded(self, query: Array, weight: Array, rows: Array) -> tuple[Array, Array]:
        """The keys and values of rows ``[b, places, 1, rank + rope]``."""
        latents = rows[:, :, 0, : self.rank].astype(weight.dtype)
        key_value = self._product("blr,rhd->blhd", latents, weight, query.dtype)
        return expanded(query, key_value, rows[..., self.rank :].astype(query.dtype))


def attended_pages(
    query: Array,
    weight: Array,
    pages: Array,
    where: tuple[Array, ...],
    lengths: Array,
    *,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None,
) -> Array:
    """:func:`attended_rows` of the last tokens of sequences whose rows lie in pages.

    A few pages are read at a time, as many as the longest sequence has; in its gradient all are.

    Args:
        pages: ``[pages, page_size, 1, rank + rope]``, perhaps with the layers before them.
        where: the page table ``[b, table]`` of existing pages, after the layer where there are several.
        lengths: ``[b]``, those of the new tokens included. What pages hold after them does not matter.
    """
    places = where[-1].shape[1] * pages.shape[-3]
    form = _Form.of(query, weight, pages, places, window, softcap, accumulate, scale)
    return _over_pages(form, query, weight, pages, where, lengths)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_pages(
    form: _Form, query: Array, weight: Array, pages: Array, where: tuple[Array, ...], lengths: Array
) -> Array:
    from capibara.ops.attention import paged_attention
    from capibara.ops.attention.paged import PagedProblem, over_blocks

    batch, new, heads, dim = query.shape
    table, page_size = where[-1], pages.shape[-3]
    columns = form.rank if form.absorbed else weight.shape[2] - form.own
    problem = PagedProblem(
        batch=batch,
        new=new,
        heads=heads,
        kv_heads=1 if form.absorbed else heads,
        pages=pages.shape[-4],
        page_size=page_size,
        table=table.shape[1],
        dim=pages.shape[-1] if form.absorbed else dim,
        value_dim=columns,
        used=(pages.shape[-1] if form.absorbed else dim, columns),
        scale=form.scale,
        window=form.window,
        softcap=form.softcap,
        dtype=str(query.dtype),
        pages_dtypes=(str(pages.dtype), str(pages.dtype)),
        coded=False,
        sinks=False,
        implementation="xla",
    )

    def looped(query: Array, weight: Array, pages: Array, lengths: Array, *where: Array) -> Array:
        missing = -where[-1].shape[1] % problem.together
        padded = jnp.pad(where[-1], ((0, 0), (0, missing)))

        def block(i: Array, slots: Array) -> tuple[Array, Array]:
            some = jax.lax.dynamic_slice_in_dim(padded, i * problem.together, problem.together, axis=1)
            rows = _rows_of_pages(pages, (*where[:-1], some), slots, lengths)
            if form.absorbed:
                return rows, rows[..., : form.rank]
            return form.expanded(query, weight, rows)

        return over_blocks(problem, query, block, lengths, None, weight, pages, *where)

    def flat(query: Array, weight: Array, pages: Array, lengths: Array, *where: Array) -> Array:
        rows, table = pages.reshape(-1, *pages.shape[-3:]), where[-1]
        table = table if len(where) == 1 else table + where[0] * pages.shape[-4]
        return paged_attention(query, rows, rows, table, lengths, **form.options)[..., : form.rank]

    if not form.absorbed:
        return looped(query, weight, pages, lengths, *where)
    arrays = form.inner(query, weight), weight, pages, lengths, *where
    # On TPUs pages of one head would lie otherwise if they were not seen as the layers that they are.
    out = jax.lax.platform_dependent(*arrays, cpu=flat, default=looped)
    return form.outer(out, weight)


def _rows_of_pages(pages: Array, where: tuple[Array, ...], slots: Array, lengths: Array) -> Array:
    """Rows ``[b, places, 1, rank + rope]``; 0 after a sequence's end, where a page may hold anything that an earlier
    sequence left: 0 times what is not finite is not 0."""
    rows = pages[where]
    rows = rows.reshape(rows.shape[0], -1, *rows.shape[3:])
    return jnp.where((slots < lengths[:, None])[..., None, None], rows, jnp.zeros((), rows.dtype))


def _forward(
    form: _Form, query: Array, weight: Array, pages: Array, where: tuple[Array, ...], lengths: Array
) -> tuple[Array, Any]:
    return _over_pages(form, query, weight, pages, where, lengths), (query, weight, pages, where, lengths)


def _backward(form: _Form, arrays: Any, grad: Array) -> tuple[Any, ...]:
    *given, where, lengths = arrays

    def whole(query: Array, weight: Array, pages: Array) -> Array:
        slots = jnp.arange(where[-1].shape[1] * pages.shape[-3], dtype=jnp.int32)
        rows = _rows_of_pages(pages, where, slots, lengths)
        at = lengths[:, None] - query.shape[1] + jnp.arange(query.shape[1], dtype=lengths.dtype)
        return attended_rows(query, weight, rows, at, form.window, form.softcap, form.accumulate, form.scale)

    return *jax.vjp(whole, *given)[1](grad), None, None


_over_pages.defvjp(_forward, _backward)
