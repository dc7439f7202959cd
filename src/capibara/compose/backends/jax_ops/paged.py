"""Decoding of many sequences whose states lie in pools: see :mod:`capibara.compose.primitives.paged`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose.backends.jax_ops.language import ragged_cached_conv, ragged_continued_scan
from capibara.compose.backends.jax_ops.latent import attended_pages
from capibara.compose.backends.jax_stacked import Row
from capibara.ops.registry import only_platform

__all__ = [
    "paged_attention",
    "paged_codes_attention",
    "paged_conv",
    "paged_latent_attention",
    "paged_positions",
    "paged_scan",
]

Array = jax.Array


def _spread(of_sequences: Array, rows: int, chunks: int, chunk: int) -> Array:
    """What is known of sequences, of each token: ``[sequences]`` → ``[tokens]``."""
    return jnp.concatenate([of_sequences[:rows], jnp.repeat(of_sequences[rows:], chunk)])


def _offsets(rows: int, chunks: int, chunk: int) -> Array:
    """Which of its sequence's new tokens each token is: ``int32 [tokens]``."""
    within = jnp.tile(jnp.arange(chunk, dtype=jnp.int32), chunks)
    return jnp.concatenate([jnp.zeros(rows, jnp.int32), within])


def _parts(x: Array, rows: int, chunks: int, chunk: int) -> list[Array]:
    """``[1, tokens, …]`` as ``[rows, 1, …]`` and ``[chunks, chunk, …]``."""
    return [
        x[0, :rows].reshape(rows, 1, *x.shape[2:]),
        x[0, rows:].reshape(chunks, chunk, *x.shape[2:]),
    ]


def _joined(parts: list[Array]) -> Array:
    return jnp.concatenate([part.reshape(1, -1, *part.shape[2:]) for part in parts], axis=1)


def _real(counts: Array, rows: int, chunks: int, chunk: int) -> Array:
    """Which tokens are no padding: ``bool [tokens]``."""
    return _offsets(rows, chunks, chunk) < _spread(counts, rows, chunks, chunk)


def _cleared(out: list[Array], counts: Array, rows: int, chunks: int, chunk: int) -> Array:
    """The outputs of the parts as ``[1, tokens, …]``, 0 for padding."""
    whole = _joined(out)
    real = _real(counts, rows, chunks, chunk)[(None, ..., *[None] * (whole.ndim - 2))]
    return jnp.where(real, whole, 0)


def paged_positions(like: Array, starts: Array, rows: int, chunks: int, chunk: int) -> Array:
    starts = jnp.asarray(starts, jnp.int32)
    return (_spread(starts, rows, chunks, chunk) + _offsets(rows, chunks, chunk))[None]


class _Pool:
    """The pages of one block, as pages of the pool of all repetitions, so that none are taken out of it.

    Args:
        pages: ``[pages, page_size, heads, width]``.
        stacked: pages are found by the number of the repetition too, which is then in ``index``, and :attr:`flat` is
            the array of all repetitions as it is. Of pages with a single head XLA would lay out another shape
            otherwise, and copy all of them for that.
    """

    def __init__(self, pages: Any, *, stacked: bool = False) -> None:
        self._given = pages
        each, self.page_size = pages.shape[:2]
        self._each, self._first = each, jnp.zeros((), jnp.int32)
        self.index: tuple[Array, ...] = ()
        self.flat = pages.stack if isinstance(pages, Row) else pages
        if isinstance(pages, Row) and stacked:
            self.index = (jnp.asarray(pages.index, jnp.int32),)
        elif isinstance(pages, Row):
            self.flat = self.flat.reshape(-1, *self.flat.shape[2:])
            self._first = jnp.asarray(pages.index, jnp.int32) * each

    def numbers(self, table: Array) -> Array:
        """Page numbers in :attr:`flat`; -1 for what is none."""
        table = jnp.asarray(table, jnp.int32)
        return jnp.where((table < 0) | (table >= self._each), -1, table + self._first)

    def readable(self, table: Array) -> Array:
        """The same with some page in the place of none: its positions are seen by no query."""
        return jnp.clip(jnp.asarray(table, jnp.int32), 0, self._each - 1) + self._first

    def back(self, flat: Array) -> Any:
        if not isinstance(self._given, Row):
            return flat
        return Row(flat.reshape(self._given.stack.shape), self._given.index)

    def write(self, pages: Array, within: Array, rows: Array) -> Array:
        """:attr:`flat` with rows ``[tokens, heads, …]`` at such :meth:`places`, filled up with zeros if pages are
        wider."""
        from capibara.ops.rows import takes_kernel, write_rows

        missing = self.flat.shape[-1] - rows.shape[-1] if rows.ndim == 3 else 0
        new = jnp.pad(rows, ((0, 0), (0, 0), (0, missing))) if missing else rows
        as_given = only_platform() == "cpu" and takes_kernel(self.flat)
        if not as_given or self.index or not isinstance(self._given, Row):
            return write_rows(self.flat, (*self.index, pages[:, 0], within), new)
        own = pages[:, 0] - self._first
        where = jnp.asarray(self._given.index, jnp.int32), own, within
        return write_rows(self._given.stack, where, new).reshape(self.flat.shape)

    def places(
        self, table: Array, starts: Array, counts: Array, rows: int, chunks: int, chunk: int
    ) -> tuple[Array, Array]:
        """The page of each token, ``int32 [tokens, 1]`` (-1: none), and its place in it, ``int32 [tokens]``."""
        at = paged_positions(table, starts, rows, chunks, chunk)[0]
        sequence = _spread(jnp.arange(starts.shape[0], dtype=jnp.int32), rows, chunks, chunk)
        # Positions are not negative: for // and %, which allow that, each block has five times the operations.
        size = jnp.int32(self.page_size)
        column, within = jax.lax.div(at, size), jax.lax.rem(at, size)
        inside = _real(counts, rows, chunks, chunk) & (column < table.shape[1])
        place = sequence, jnp.minimum(column, max(table.shape[1] - 1, 0))
        page = self.numbers(table).at[place].get(mode="clip")
        return jnp.where(inside, page, -1)[:, None], within


def paged_codes_attention(
    query: Array,
    key: Array,
    value: Array,
    key_pages: Any,
    value_pages: Any,
    key_scales: Any,
    value_scales: Any,
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
) -> tuple[Array, Any, Any, Any, Any]:
    from capibara.ops.attention import paged_attention as attend
    from capibara.ops.attention.paged import code_rows

    shape = rows, chunks, chunk
    pools = [_Pool(pool) for pool in (key_pages, value_pages, key_scales, value_scales)]
    starts, counts = jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32)
    pages, within = pools[0].places(page_table, starts, counts, *shape)
    (key_codes, of_keys), (value_codes, of_values) = code_rows(key[0]), code_rows(value[0])
    rows_of = key_codes, value_codes, of_keys, of_values
    new = [pool.write(pages, within, row) for pool, row in zip(pools, rows_of, strict=True)]
    held, scales = new[:2], new[2:]
    table = pools[0].readable(page_table)

    def of(x: Array, of_table: Array, lengths: Array, options: dict[str, Any]) -> Array:
        pages = held[0], held[1], of_table, lengths
        return attend(x, *pages, scales[0], scales[1], value_dim=value.shape[-1], **options)

    options = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out = _attended(query, table, starts, counts, shape, options, of)
    return out, *(pool.back(flat) for pool, flat in zip(pools, new, strict=True))


def _attended(
    query: Array,
    table: Array,
    starts: Array,
    counts: Array,
    shape: tuple[int, int, int],
    options: dict[str, Any],
    attend: Callable[..., Array],
) -> Array:
    """What new tokens see of the pages of their sequences.

    Args:
        attend: ``(queries, table, lengths, options)`` → the output of the last tokens.
    """
    rows, out = shape[0], []
    for part, x in enumerate(_parts(query, *shape)):
        if 0 in x.shape:
            continue
        of = slice(rows) if part == 0 else slice(rows, None)
        real = jnp.minimum(counts[of], x.shape[1])
        lengths = jnp.where(real > 0, starts[of] + real, 0)
        done = attend(_moved(x, x.shape[1] - real), table[of], lengths, options)
        out.append(_moved(done, real - x.shape[1]))
    return _cleared(out, counts, *shape)


def paged_attention(
    query: Array,
    key: Array,
    value: Array,
    key_pages: Any,
    value_pages: Any,
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
) -> tuple[Array, Any, Any]:
    from capibara.ops.attention import paged_attention as attend

    shape = rows, chunks, chunk
    keys, values = _Pool(key_pages), _Pool(value_pages)
    starts, counts = jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32)
    pages, within = keys.places(page_table, starts, counts, *shape)
    new = keys.write(pages, within, key[0]), values.write(pages, within, value[0])
    table = keys.readable(page_table)

    def of(x: Array, of_table: Array, lengths: Array, options: dict[str, Any]) -> Array:
        return attend(x, new[0], new[1], of_table, lengths, value_dim=value.shape[-1], **options)

    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    out = _attended(query, table, starts, counts, shape, options, of)
    return out, keys.back(new[0]), values.back(new[1])


def _moved(x: Array, by: Array) -> Array:
    """Each row's tokens ``by [rows]`` places later: what ``[rows, tokens, …]`` has first stands last in it.

    Of a row that is not filled the last tokens are then the real ones, as the attention over pages takes them: it
    reads nothing past them, where a page may still hold anything that an earlier sequence left.
    """
    if x.shape[1] == 1:
        return x
    places = jnp.clip(jnp.arange(x.shape[1], dtype=jnp.int32) - by[:, None], 0, x.shape[1] - 1)
    return jnp.take_along_axis(x, places[(..., *[None] * (x.ndim - 2))], axis=1, mode="promise_in_bounds")


def paged_latent_attention(
    query: Array,
    latent: Array,
    rotary_key: Array,
    weight: Array,
    pages: Any,
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
) -> tuple[Array, Any]:
    shape, pool = (rows, chunks, chunk), _Pool(pages, stacked=True)
    starts, counts = jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32)
    own = jnp.concatenate([latent[0], rotary_key[0, :, 0]], axis=-1)[:, None]  # one head for all
    page, within = pool.places(page_table, starts, counts, *shape)
    new = pool.write(page, within, own)
    table = pool.readable(page_table)

    def of(x: Array, of_table: Array, lengths: Array, options: dict[str, Any]) -> Array:
        where = (*pool.index, of_table)
        return attended_pages(x, weight, new, where, lengths, accumulate=accumulate, **options)

    options = {"window": window, "softcap": softcap, "scale": scale}
    return _attended(query, table, starts, counts, shape, options, of), pool.back(new)


class _Slots:
    """The recurrent states of one block, some of which are taken out and put back."""

    def __init__(self, states: Any, slots: Array, starts: Array, counts: Array) -> None:
        self._given = states
        self._states = states.stack if isinstance(states, Row) else states
        self._index = (jnp.asarray(states.index, jnp.int32),) if isinstance(states, Row) else ()
        slots = jnp.asarray(slots, jnp.int32)
        self._slots = jnp.where(jnp.asarray(counts) <= 0, -1, slots)
        taken = jnp.clip(slots, 0, states.shape[0] - 1)
        # XLA makes a gather of one row a slice, moves it past the write, and copies all states for it.
        several = jnp.tile(taken, 2) if taken.shape[0] == 1 else taken
        held = self._states[(*self._index, several)][: taken.shape[0]]
        fresh = (jnp.asarray(starts) == 0)[(..., *[None] * (held.ndim - 1))]
        self.taken = jnp.where(fresh, 0, held)

    def back(self, new: Array) -> Any:
        from capibara.ops.rows import write_rows

        states = write_rows(self._states, (*self._index, self._slots), new)
        return Row(states, self._given.index) if self._index else states


def _masks(counts: Array, rows: int, chunks: int, chunk: int) -> list[Array]:
    """For each part what the operations of ragged rows call slots: below 0 for padding."""
    places = jnp.where(_real(jnp.asarray(counts, jnp.int32), rows, chunks, chunk), 0, -1)
    return _parts(places[None], rows, chunks, chunk)


def paged_conv(
    x: Array,
    weight: Array,
    tails: Any,
    slots: Array,
    starts: Array,
    counts: Array,
    bias: Array | None = None,
    *,
    rows: int,
    chunks: int,
    chunk: int,
) -> tuple[Array, Any]:
    shape, states = (rows, chunks, chunk), _Slots(tails, slots, starts, counts)
    out, after = [], []
    for part, mask, of in zip(
        _parts(x, *shape), _masks(counts, *shape), (slice(rows), slice(rows, None)), strict=True
    ):
        if 0 in part.shape:
            continue
        done, tail = ragged_cached_conv(part, weight, states.taken[of], mask, bias)
        out.append(done)
        after.append(tail)
    return _cleared(out, counts, *shape), states.back(jnp.concatenate(after))


def paged_scan(
    x: Array,
    step: Array,
    rate: Array,
    write: Array,
    read: Array,
    memories: Any,
    slots: Array,
    starts: Array,
    counts: Array,
    rows: int,
    chunks: int,
    chunk: int,
    chunk_size: int | None,
) -> tuple[Array, Any]:
    shape, states = (rows, chunks, chunk), _Slots(memories, slots, starts, counts)
    given = [_parts(array, *shape) for array in (x, step, write, read)]
    masks = _masks(counts, *shape)
    out, after = [], []
    for part, of in enumerate((slice(rows), slice(rows, None))):
        own, steps, writes, reads = (array[part] for array in given)
        if 0 in own.shape:
            continue
        done, memory = ragged_continued_scan(
            own, steps, rate, writes, reads, states.taken[of], masks[part], chunk_size
        )
        out.append(done)
        after.append(memory)
    return _cleared(out, counts, *shape), states.back(jnp.concatenate(after))
