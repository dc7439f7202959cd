"""Decoding of many sequences whose states lie in pools: see :mod:`capibara.compose.primitives.paged`.

One sequence after the other; numbers that say where things are have to be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose.backends.portable.language import attend, cached_conv, continued_scan
from capibara.compose.backends.portable.latent import decoded
from capibara.compose.backends.portable.space import space

Array = Any


@dataclass(frozen=True)
class _Piece:
    """The new tokens of a sequence: the columns ``first … first + count - 1``; it has ``start`` tokens before."""

    sequence: int
    first: int
    count: int
    start: int


def _pieces(x: Array, starts: Array, counts: Array, rows: int, chunks: int, chunk: int) -> Iterator[_Piece]:
    begin, number = (np.asarray(space(x).to_numpy(v)) for v in (starts, counts))
    for sequence in range(rows + chunks):
        first = sequence if sequence < rows else rows + (sequence - rows) * chunk
        most = 1 if sequence < rows else chunk
        count = min(int(number[sequence]), most)
        if count > 0:
            yield _Piece(sequence, first, count, int(begin[sequence]))


def _put_together(x: Array, found: list[tuple[_Piece, Array]], shape: tuple[int, ...]) -> Array:
    """``[1, tokens, …]`` with what was found of each piece, and 0 elsewhere."""
    xp = space(x)
    columns, at = [], 0
    for piece, out in found:
        if piece.first > at:
            columns.append(xp.full((1, piece.first - at, *shape), 0, xp.dtype_of(x), x))
        columns.append(out)
        at = piece.first + piece.count
    if at < x.shape[1]:
        columns.append(xp.full((1, x.shape[1] - at, *shape), 0, xp.dtype_of(x), x))
    return xp.concatenate(columns, 1)


def paged_positions(like: Array, starts: Array, rows: int, chunks: int, chunk: int) -> Array:
    xp = space(like)
    begin = np.asarray(xp.to_numpy(starts)).astype(np.int32)
    each = np.concatenate([begin[:rows], (begin[rows:, None] + np.arange(chunk, dtype=np.int32)).ravel()])
    return xp.asarray(each[None], "int32", like)


def _rows_of(table: np.ndarray, page_size: int, first: int, end: int) -> np.ndarray:
    """Where positions ``first … end - 1`` are in a pool whose pages stand in a row."""
    at = np.arange(first, end)
    return table[at // page_size] * page_size + at % page_size


def _attended(
    x: Array,
    new: tuple[Array, ...],
    pools: tuple[Array, ...],
    page_table: Array,
    pieces: list[_Piece],
    of: Callable[..., Array],
    shape: tuple[int, ...],
) -> tuple[Array, tuple[Array, ...]]:
    """Write ``new [1, tokens, heads, dim]`` into ``pools``, and call ``of(piece, *what the pools hold)``."""
    xp = space(x)
    table, size = np.asarray(xp.to_numpy(page_table)), pools[0].shape[1]
    flat = [xp.reshape(pool, (-1, *pool.shape[2:])) for pool in pools]
    found = []
    for piece in pieces:
        own = table[piece.sequence]
        end = piece.start + piece.count
        there = xp.asarray(_rows_of(own, size, piece.start, end).astype(np.int32), "int32", x)
        for i, array in enumerate(new):
            part = array[0, piece.first : piece.first + piece.count]
            if len(part.shape) == 3 and (wide := flat[i].shape[-1] - part.shape[-1]) > 0:
                zero = xp.full((*part.shape[:-1], wide), 0, xp.dtype_of(part), part)
                part = xp.concatenate([part, zero], -1)
            flat[i] = xp.scatter(flat[i], there, xp.astype(part, xp.dtype_of(flat[i])), 0, False)
        whole = xp.asarray(_rows_of(own, size, 0, end).astype(np.int32), "int32", x)
        held = [xp.take(pool, whole, 0)[None] for pool in flat]
        found.append((piece, of(piece, *held)))
    pools = tuple(xp.reshape(rows, pool.shape) for rows, pool in zip(flat, pools, strict=True))
    return _put_together(x, found, shape), pools


def paged_attention(
    query: Array,
    key: Array,
    value: Array,
    key_pages: Array,
    value_pages: Array,
    page_table: Array,
    starts: Array,
    counts: Array,
    sinks: Array | None = None,
    *,
    rows: int,
    chunks: int,
    chunk: int,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Array, Array, Array]:
    def of(piece: _Piece, keys: Array, values: Array) -> Array:
        here = query[:, piece.first : piece.first + piece.count]
        seen = _seen(query, piece, window)
        held = keys[..., : key.shape[-1]], values[..., : value.shape[-1]]
        return attend(here, *held, seen, softcap, scale, sinks)

    pieces = list(_pieces(query, starts, counts, rows, chunks, chunk))
    shape = (query.shape[2], value.shape[-1])
    out, pools = _attended(query, (key, value), (key_pages, value_pages), page_table, pieces, of, shape)
    return out, *pools


def paged_codes_attention(
    query: Array,
    key: Array,
    value: Array,
    key_pages: Array,
    value_pages: Array,
    key_scales: Array,
    value_scales: Array,
    page_table: Array,
    starts: Array,
    counts: Array,
    sinks: Array | None = None,
    *,
    rows: int,
    chunks: int,
    chunk: int,
    window: int | None,
    softcap: float | None,
    scale: float | None = None,
) -> tuple[Array, Array, Array, Array, Array]:
    xp = space(query)
    kind = xp.dtype_of(query)

    def of(piece: _Piece, keys: Array, values: Array, of_keys: Array, of_values: Array) -> Array:
        # The codes are read as the numbers that they are of, in the arithmetic of the query.
        held = [
            xp.astype(xp.astype(codes, "float32") * xp.astype(of, "float32")[..., None], kind)
            for codes, of in ((keys, of_keys), (values, of_values))
        ]
        here = query[:, piece.first : piece.first + piece.count]
        seen = _seen(query, piece, window)
        return attend(
            here, held[0][..., : key.shape[-1]], held[1][..., : value.shape[-1]], seen, softcap, scale, sinks
        )

    pieces = list(_pieces(query, starts, counts, rows, chunks, chunk))
    (key_codes, of_keys), (value_codes, of_values) = _codes(key), _codes(value)
    new = (key_codes, value_codes, of_keys, of_values)
    held = (key_pages, value_pages, key_scales, value_scales)
    out, pools = _attended(query, new, held, page_table, pieces, of, (query.shape[2], value.shape[-1]))
    return out, *pools


def _codes(x: Array) -> tuple[Array, Array]:
    """Rows as codes of int8, and what they are multiplied by."""
    xp = space(x)
    wide = xp.astype(x, "float32")
    scales = xp.amax(xp.maximum(wide, -wide), -1) / 127
    whole = xp.where(scales == 0, xp.full(tuple(scales.shape), 1, "float32", x), scales)
    return xp.astype(xp.round(wide / whole[..., None]), "int8"), scales


def _seen(query: Array, piece: _Piece, window: int | None) -> Array:
    """Which positions the tokens of a piece see."""
    xp = space(query)
    end = piece.start + piece.count
    at = xp.arange(piece.start, end, 1, "int32", query)[:, None]
    columns = xp.arange(0, end, 1, "int32", query)[None, :]
    seen = columns <= at
    return seen if window is None else seen & (columns > at - window)


def paged_latent_attention(
    query: Array,
    latent: Array,
    rotary_key: Array,
    weight: Array,
    pages: Array,
    page_table: Array,
    starts: Array,
    counts: Array,
    rows: int,
    chunks: int,
    chunk: int,
    window: int | None,
    softcap: float | None,
    accumulate: str,
    scale: float | None = None,
) -> tuple[Array, Array]:
    xp = space(query)

    def of(piece: _Piece, held: Array) -> Array:
        part = slice(piece.first, piece.first + piece.count)
        places = xp.arange(piece.start, piece.start + piece.count, 1, "int32", query)[None]
        cache = xp.swapaxes(held, 1, 2)
        given = query[:, part], latent[:, part], rotary_key[:, part]
        return decoded(*given, weight, cache, places, window, softcap, accumulate, scale)[0]

    pieces = list(_pieces(query, starts, counts, rows, chunks, chunk))
    own = query.shape[-1] - rotary_key.shape[-1]
    new = xp.concatenate([latent[:, :, None], rotary_key], -1)
    shape = (query.shape[2], weight.shape[2] - own)
    out, pools = _attended(query, (new,), (pages,), page_table, pieces, of, shape)
    return out, *pools


def _continued(
    x: Array,
    states: Array,
    slots: Array,
    pieces: list[_Piece],
    of: Callable[[slice, Array], tuple[Array, Array]],
    shape: tuple[int, ...],
) -> tuple[Array, Array]:
    """``of(columns, state [1, …])`` for each piece, whose state is taken out of ``states`` and put back."""
    xp = space(x)
    where = np.asarray(xp.to_numpy(slots))
    found = []
    for piece in pieces:
        slot = int(where[piece.sequence])
        index = xp.asarray(np.array([max(slot, 0)], np.int32), "int32", x)
        state = xp.take(states, index, 0)
        if piece.start == 0:
            state = xp.full(tuple(state.shape), 0, xp.dtype_of(states), states)
        out, after = of(slice(piece.first, piece.first + piece.count), state)
        found.append((piece, out))
        if slot >= 0:
            states = xp.scatter(states, index, xp.astype(after, xp.dtype_of(states)), 0, False)
    return _put_together(x, found, shape), states


def paged_conv(
    x: Array,
    weight: Array,
    tails: Array,
    slots: Array,
    starts: Array,
    counts: Array,
    bias: Array | None = None,
    *,
    rows: int,
    chunks: int,
    chunk: int,
) -> tuple[Array, Array]:
    def of(columns: slice, tail: Array) -> tuple[Array, Array]:
        return cached_conv(x[:, columns], weight, tail, bias)

    pieces = list(_pieces(x, starts, counts, rows, chunks, chunk))
    return _continued(x, tails, slots, pieces, of, tuple(x.shape[2:]))


def paged_scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    memories: Array,
    slots: Array,
    starts: Array,
    counts: Array,
    rows: int,
    chunks: int,
    chunk: int,
    chunk_size: int | None,
) -> tuple[Array, Array]:
    def of(columns: slice, memory: Array) -> tuple[Array, Array]:
        x_, step_, write_, read_ = (v[:, columns] for v in (x, step, write, read))
        return continued_scan(x_, step_, rate, write_, read_, memory, chunk_size)

    pieces = list(_pieces(x, starts, counts, rows, chunks, chunk))
    return _continued(x, memories, slots, pieces, of, tuple(x.shape[2:]))
