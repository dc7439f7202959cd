"""The lossless codec's steps in JAX, on any device: compiled once per shape.

Blocks are padded to one length and processed in parallel; a lane past the end of its block is inactive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from capibara.compress.codecs.cut import Cut
from capibara.compress.codecs.executors import check_escapes
from capibara.compress.codecs.steps import StepExecutor
from capibara.compress.entropy import LANES, SCALE_BITS, Stream, packed_size, planes
from capibara.compress.entropy.rans import LOWEST, check_even, check_present, lay_out
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["JaxExecutor"]


def _wide(work: Callable[..., Any]) -> Callable[..., Any]:
    """With numbers of 64 bits, for this call only."""

    @wraps(work)
    def inner(*args: Any, **named: Any) -> Any:
        with jax.enable_x64(True):
            return work(*args, **named)

    return inner


@partial(jax.jit, static_argnames=("cut", "coarse"))
def _measure(rows: jax.Array, cut: Cut, coarse: int) -> tuple[jax.Array, jax.Array]:
    sums = (cut.symbols(rows) >> rows.dtype.type(coarse)).astype(jnp.int64).sum(1)
    return sums, lax.reduce(rows, rows.dtype.type(0), lax.bitwise_or, (1,))


@partial(jax.jit, static_argnames=("cut", "count"))
def _histogram(rows: jax.Array, kinds: jax.Array, cut: Cut, count: int) -> jax.Array:
    where = cut.symbols(rows).astype(jnp.int32) + (kinds.astype(jnp.int32) << cut.symbol)[:, None]
    return jnp.bincount(where.ravel(), length=count << cut.symbol).reshape(count, -1)


@partial(jax.jit, static_argnames="width")
def _pack(values: jax.Array, width: int) -> list[jax.Array]:
    parts = []
    for size, shift in planes(width):
        plane = values >> values.dtype.type(shift)
        if size >= 8:
            parts.append(lax.bitcast_convert_type(plane.astype(f"uint{size}"), jnp.uint8).ravel())
            continue
        each = 8 // size
        plane = plane.astype(jnp.uint8) & np.uint8((1 << size) - 1)
        plane = jnp.pad(plane, (0, -len(plane) % each)).reshape(-1, each)
        shifted = plane << np.arange(0, 8, size, dtype=np.uint8)
        parts.append(lax.reduce(shifted, np.uint8(0), lax.bitwise_or, (1,)))
    return parts


@partial(jax.jit, static_argnames=("count", "width", "dtype"))
def _unpack(data: jax.Array, count: int, width: int, dtype: np.dtype) -> jax.Array:
    out, at = jnp.zeros(count, dtype), 0
    for size, shift in planes(width):
        length = (count * size + 7) // 8
        part = data[at : at + length]
        at += length
        if size >= 8:
            plane = lax.bitcast_convert_type(part.reshape(count, -1), jnp.dtype(f"uint{size}")).reshape(count)
        else:
            shifts = np.arange(0, 8, size, dtype=np.uint8)
            plane = ((part[:, None] >> shifts) & np.uint8((1 << size) - 1)).reshape(-1)[:count]
        out |= plane.astype(dtype) << dtype.type(shift)
    return out


@partial(jax.jit, static_argnames=("cut", "drop"))
def _cut_rows(numbers: jax.Array, cut: Cut, drop: int, entry: jax.Array) -> tuple[jax.Array, ...]:
    symbols = cut.symbols(numbers)
    return symbols, entry[symbols.astype(jnp.int32)], cut.rest(numbers, drop)


@partial(jax.jit, static_argnames=("cut", "drop"))
def _joined(
    symbols: jax.Array,
    values: jax.Array,
    escaped: jax.Array,
    escape: int,
    low: jax.Array,
    cut: Cut,
    drop: int,
) -> jax.Array:
    odd = symbols == escape
    # The n-th escape is the n-th of those that were written out.
    order = jnp.clip(jnp.cumsum(odd) - 1, 0, max(len(escaped) - 1, 0))
    found = jnp.where(odd, escaped[order] if len(escaped) else 0, values[symbols]).astype(low.dtype)
    return cut.restore(cut.join(found, low, drop))


@jax.jit
def _encode(
    grid: jax.Array, counts: jax.Array, frequency: jax.Array, start: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    steps, blocks, _ = grid.shape
    lane = jnp.arange(LANES)

    def step(carry: Any, this: Any) -> Any:
        x, good = carry
        at, entry = this
        live = at * LANES + lane < counts[:, None]
        f = frequency[entry]
        good &= ~(live & (f == 0)).any()
        f = jnp.maximum(f, 1)
        # For a symbol that is certain, f << 20 is 2³²: the largest state that fits is one less.
        full = live & (x > (f << (32 - SCALE_BITS)) - np.uint32(1))
        low = x.astype(jnp.uint16)
        y = jnp.where(full, x >> 16, x)
        whole = y // f
        y = (whole << SCALE_BITS) + (y - whole * f) + start[entry]
        return (jnp.where(live, y, x), good), (full, low)

    begin = jnp.full((blocks, LANES), LOWEST, jnp.uint32), jnp.bool_(True)
    (state, good), (full, low) = lax.scan(step, begin, (jnp.arange(steps), grid), reverse=True)
    return state, full, low, good


@partial(jax.jit, static_argnames="steps")
def _decode(
    steps: int,
    state: jax.Array,
    words: jax.Array,
    counts: jax.Array,
    base: jax.Array,
    tables: tuple[jax.Array, ...],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    symbol, frequency, within = tables
    lane = jnp.arange(LANES)

    def step(carry: Any, at_step: Any) -> Any:
        x, at = carry
        live = at_step * LANES + lane < counts[:, None]
        place = base[:, None] + (x & np.uint32((1 << SCALE_BITS) - 1))
        y = frequency[place] * (x >> SCALE_BITS) + within[place]
        empty = live & (y < LOWEST)
        order = jnp.cumsum(empty, axis=1, dtype=jnp.int32)
        index = jnp.minimum(at[:, None] + order - 1, words.shape[1] - 1)
        word = jnp.take_along_axis(words, jnp.maximum(index, 0), axis=1).astype(jnp.uint32)
        y = jnp.where(empty, (y << 16) | word, y)
        return (jnp.where(live, y, x), at + order[:, -1]), symbol[place]

    (state, at), grid = lax.scan(step, (state, jnp.zeros(len(state), jnp.int32)), jnp.arange(steps))
    return state, at, grid


class JaxExecutor(StepExecutor):
    """On JAX's default device."""

    name = "jax"

    @_wide
    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        sums, ors = _measure(jnp.asarray(rows), cut, coarse)
        return np.asarray(sums), np.asarray(ors).astype(np.uint64)

    @_wide
    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        return np.asarray(_histogram(jnp.asarray(rows), jnp.asarray(kinds), cut, count)).astype(np.int64)

    @_wide
    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        numbers = jnp.asarray(rows)[jnp.asarray(chosen)].ravel()
        symbols, coded, rest = _cut_rows(numbers, cut, drop, jnp.asarray(entry))
        coded = np.asarray(coded)
        escaped = np.asarray(symbols)[coded == escape].astype(np.uint16)
        return coded, b"".join(np.asarray(p).tobytes() for p in _pack(rest, cut.width(drop))), escaped

    @_wide
    def join(
        self,
        shape: tuple[int, int],
        cut: Cut,
        drop: int,
        values: np.ndarray,
        symbols: np.ndarray,
        rest: np.ndarray,
        escaped: np.ndarray,
        form: NumberFormat,
    ) -> np.ndarray:
        count, width = len(symbols), cut.width(drop)
        check_escapes(int((symbols == len(values)).sum()), escaped)
        if len(rest) != packed_size(count, width):
            raise DamagedError("packed bits of another length than expected: the file is damaged")
        low = _unpack(jnp.asarray(rest), count, width, form.unsigned)
        table = jnp.asarray(np.append(values, 0).astype(np.int64))
        numbers = _joined(
            jnp.asarray(symbols), table, jnp.asarray(escaped.astype(np.int64)), len(values), low, cut, drop
        )
        return np.asarray(numbers).reshape(shape)

    @_wide
    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        grid, counts = lay_out(symbols, tables, frequencies.shape[1])
        flat = np.asarray(frequencies, np.uint32)
        start = np.cumsum(flat, axis=1, dtype=np.uint32) - flat
        state, full, low, good = _encode(
            jnp.asarray(grid), jnp.asarray(counts), jnp.asarray(flat.ravel()), jnp.asarray(start.ravel())
        )
        check_present(bool(good))
        state, full, low = np.asarray(state), np.asarray(full), np.asarray(low)
        return [Stream(state[b].copy(), low[:, b][full[:, b]]) for b in range(len(symbols))]

    @_wide
    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        lengths = np.array([len(s.words) for s in streams])
        words = np.zeros((len(streams), int(lengths.max(initial=0)) + 1), np.uint16)
        for row, stream in zip(words, streams, strict=True):
            row[: len(stream.words)] = stream.words
        steps = -(-max(counts) // LANES)
        flat = np.asarray(frequencies, np.int64)
        symbol = np.repeat(np.tile(np.arange(flat.shape[1]), len(flat)), flat.ravel())
        of = np.arange(len(flat)).repeat(1 << SCALE_BITS)
        within = np.tile(np.arange(1 << SCALE_BITS), len(flat)) - (np.cumsum(flat, axis=1) - flat)[of, symbol]
        state, at, grid = _decode(
            steps,
            jnp.asarray(np.stack([s.states for s in streams]).astype(np.uint32)),
            jnp.asarray(words),
            jnp.asarray(np.array(counts)),
            jnp.asarray((np.array(tables) << SCALE_BITS).astype(np.uint32)),
            (
                jnp.asarray(symbol.astype(np.uint8)),
                jnp.asarray(flat[of, symbol].astype(np.uint32)),
                jnp.asarray(within.astype(np.uint32)),
            ),
        )
        check_even(np.asarray(state), np.asarray(at), lengths)
        grid = np.asarray(grid)
        return [grid[:, b].reshape(-1)[:count].copy() for b, count in enumerate(counts)]
