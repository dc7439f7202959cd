"""The lossless codec in terms of steps, for executors that implement the steps.

An executor measures, counts, splits and encodes; the choices based on that (:mod:`capibara.compress.codecs.choice`)
and the layout of the payload are shared by all executors.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from capibara.compress.codecs import choice
from capibara.compress.codecs.cut import Cut
from capibara.compress.entropy import (
    BLOCK,
    LANES,
    BitReader,
    BitWriter,
    Stream,
    pack_bits,
    packed_size,
    unpack_bits,
)
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["StepExecutor"]

_MOST_HEADER = 1 << 15  # bytes, beside what it says of each block; sixteen full tables take less


@dataclass(frozen=True)
class _Group:
    """Rows that share a table: its symbols, their frequencies (the last one is the escape), and zero bits left out."""

    drop: int
    symbols: np.ndarray
    frequencies: np.ndarray
    escapes: int


class StepExecutor(ABC):
    """An executor of the lossless codec in terms of steps. ``rows`` is [count, length] of unsigned integers."""

    name: str

    @abstractmethod
    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row: the sum of its symbols without ``coarse`` low bits, int64; its elements or-ed, uint64."""

    @abstractmethod
    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        """How often each symbol occurs in the rows of each kind: int64 [count, 2 ** cut.symbol]."""

    @abstractmethod
    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        """Of chosen rows: each symbol's entry (uint8), the packed rest, and the symbols whose entry is ``escape``."""

    @abstractmethod
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
        """The reverse, rows [shape]; ``values``: each entry's symbol, the entry after them being the escape.

        Raises:
          DamagedError: the number of escapes differs from that of ``escaped``.
        """

    @abstractmethod
    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        """As :func:`capibara.compress.entropy.rans.encode`."""

    @abstractmethod
    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        """As :func:`capibara.compress.entropy.rans.decode`."""

    def encode_into(
        self, out: np.ndarray, rows: np.ndarray, form: NumberFormat, threads: int = 1
    ) -> int | None:
        """Write the encoded part of a payload to ``out``, uint8; returns its size, ``None`` if it does not fit."""
        coded = self.encode_tensor(rows, form, len(out), threads)
        if coded is None:
            return None
        out[: len(coded)] = np.frombuffer(coded, np.uint8)
        return len(coded)

    def encode_tensor(
        self, rows: np.ndarray, form: NumberFormat, limit: int, threads: int = 1
    ) -> bytes | None:
        """The encoded part of a payload; ``None`` if it takes ``limit`` bytes or more."""
        rows, cuts = choice.make_cuts(rows, form)
        count, length = rows.shape
        sums, ors = self.measure(rows, cuts[-1], cuts[-1].symbol - cuts[0].symbol)
        rank = np.empty(count, np.int64)
        # Sums of integers: the order of rows is the same on every machine.
        rank[np.argsort(sums, kind="stable")] = np.arange(count)
        most = choice.class_count(count)
        counted = self.histogram(rows, cuts[-1], (rank * most // count).astype(np.uint8), most)
        cut, classes = choice.choose(counted, cuts, count, length)
        drop, dropping = choice.zero_bits(ors, cut) if form.is_float else (0, np.zeros(count, bool))
        names, which = np.unique(rank * classes // count * 2 + dropping, return_inverse=True)
        counted = self.histogram(rows, cut, which.astype(np.uint8), len(names))
        groups, blocks, tables, body = [], [], [], []
        for index, name in enumerate(names):
            left_out = drop if name & 1 else 0
            kept, frequencies, escapes = choice.make_table(counted[index])
            entry = np.full(1 << cut.symbol, len(kept), np.uint8)
            entry[kept] = np.arange(len(kept))
            chosen = np.flatnonzero(which == index)
            coded, rest, escaped = self.split(rows, chosen, cut, left_out, entry, len(kept))
            body += [pack_bits(escaped, cut.symbol), rest]
            groups.append(_Group(left_out, kept, frequencies, escapes))
            parts = [coded[i : i + BLOCK] for i in range(0, len(coded), BLOCK)]
            blocks += parts
            tables += [index] * len(parts)
        streams = self.encode(blocks, _stack(groups), tables)
        header = _write_header(cut, groups, [len(s.words) for s in streams])
        packed = pack_bits(which.astype(np.uint8), (len(groups) - 1).bit_length())
        ends = [s for one in streams for s in (one.states.astype("<u4"), one.words.astype("<u2"))]
        parts = [struct.pack("<I", len(header)), header, packed, *body, *(e.tobytes() for e in ends)]
        return b"".join(parts) if sum(map(len, parts)) < limit else None

    def decode_tensor(self, data: np.ndarray, form: NumberFormat, out: np.ndarray, threads: int = 1) -> None:
        """The reverse, into ``out`` [rows, length].

        Raises:
          DamagedError: it is not what :meth:`encode_tensor` gives. Memory allocated before this is detected is
            bounded by the size of ``data``, at 2¹⁸ elements per 128 bytes, and by that of ``out``.
        """
        count, length = out.size, out.shape[1]
        if count == 0 or -(-count // BLOCK) * 4 * LANES > len(data):
            raise DamagedError(f"{len(data)} bytes cannot hold {count} numbers: the file is damaged")
        cursor = _Cursor(data)
        size = int(cursor.take(4).view("<u4")[0])
        if size > _MOST_HEADER + 3 * -(-count // BLOCK):
            raise DamagedError(f"a tensor's header has {size} bytes: the file is damaged")
        reader = BitReader(cursor.take(size).tobytes())
        cut, groups = _read_header(reader, form)
        which = _read_rows(cursor, len(out), len(groups))
        sizes = np.bincount(which, minlength=len(groups)) * length
        if not sizes.all():
            raise DamagedError("no row belongs to one of the groups: the file is damaged")
        escaped, rest, counts, tables = [], [], [], []
        for index, (group, size) in enumerate(zip(groups, sizes.tolist(), strict=True)):
            if group.escapes > size:
                raise DamagedError("more numbers are escaped than there are: the file is damaged")
            packed = cursor.take(packed_size(group.escapes, cut.symbol))
            escaped.append(unpack_bits(packed, group.escapes, cut.symbol, np.dtype(np.uint16)))
            rest.append(cursor.take(packed_size(size, cut.width(group.drop))))
            parts = [min(BLOCK, size - i) for i in range(0, size, BLOCK)]
            counts += parts
            tables += [index] * len(parts)
        streams = list(_streams(cursor, reader, len(counts)))
        reader.finish()
        if cursor.at != len(cursor.data):
            raise DamagedError("a tensor's payload is longer than it states: the file is damaged")
        blocks = self.decode(streams, counts, _stack(groups), tables)
        for index, group in enumerate(groups):
            coded = [b for b, t in zip(blocks, tables, strict=True) if t == index]
            chosen = np.flatnonzero(which == index)
            out[chosen] = self.join(
                (len(chosen), length), cut, group.drop, group.symbols,
                np.concatenate(coded) if len(coded) != 1 else coded[0], rest[index], escaped[index], form,
            )  # fmt: skip


def _stack(groups: list[_Group]) -> np.ndarray:
    """The groups' tables, a row each."""
    width = max(len(g.frequencies) for g in groups)
    return np.stack([np.pad(g.frequencies, (0, width - len(g.frequencies))) for g in groups])


def _write_header(cut: Cut, groups: list[_Group], words: list[int]) -> bytes:
    writer = BitWriter()
    writer.write(cut.shift, 6)
    writer.write(cut.symbol, 5)
    writer.write(cut.sign, 1)
    if not cut.sign:
        writer.write(cut.alternating, 1)
        writer.write(0 if cut.alternating else cut.base & ((1 << 64) - 1), 0 if cut.alternating else 64)
    writer.write(len(groups) - 1, 4)
    for group in groups:
        writer.write(group.drop, 6)
        writer.write(len(group.symbols), 8)
        writer.write_gamma(group.escapes)
        last = -1
        for symbol, frequency in zip(group.symbols.tolist(), group.frequencies.tolist(), strict=False):
            writer.write_gamma(symbol - last - 1)
            writer.write_gamma(frequency - 1)
            last = symbol
    for count in words:
        writer.write(count, 19)
    return writer.finish()


class _Cursor:
    """Takes bytes off the front; asking for more than there are is damage."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, size: int) -> np.ndarray:
        if size > len(self.data) - self.at:
            raise DamagedError("a tensor's payload ends too early: the file is damaged")
        self.at += size
        return self.data[self.at - size : self.at]


def _read_header(reader: BitReader, form: NumberFormat) -> tuple[Cut, list[_Group]]:
    shift, symbol, sign = reader.read(6), reader.read(5), bool(reader.read(1))
    alternating = not sign and bool(reader.read(1))
    base = 0 if sign or alternating else reader.read(64)
    if sign != form.is_float or not 1 <= symbol <= 14 or shift + symbol + sign > form.bits:
        raise DamagedError("a tensor's elements are split at an invalid place: the file is damaged")
    cut, groups = Cut(shift, symbol, sign, base, alternating), []
    for _ in range(reader.read(4) + 1):
        drop, entries, escapes = reader.read(6), reader.read(8), reader.read_gamma()
        symbols, frequencies, last = [], [], -1
        for _ in range(entries):
            last += reader.read_gamma() + 1
            symbols.append(last)
            frequencies.append(reader.read_gamma() + 1)
        left = 4096 - sum(frequencies)
        if drop > shift or last >= 1 << symbol or left < 0 or (left > 0) != (escapes > 0):
            raise DamagedError("a tensor's table of frequencies is invalid: the file is damaged")
        groups.append(_Group(drop, np.array(symbols, np.int64), np.array([*frequencies, left]), escapes))
    return cut, groups


def _read_rows(cursor: _Cursor, rows: int, groups: int) -> np.ndarray:
    """Each row's group."""
    width = (groups - 1).bit_length()
    which = unpack_bits(cursor.take(packed_size(rows, width)), rows, width, np.dtype(np.uint8))
    if int(which.max()) >= groups:
        raise DamagedError("a row belongs to a missing group: the file is damaged")
    return which


def _streams(cursor: _Cursor, reader: BitReader, count: int) -> Iterator[Stream]:
    for _ in range(count):
        words = reader.read(19)
        states = np.frombuffer(cursor.take(4 * LANES).tobytes(), "<u4")
        yield Stream(states, np.frombuffer(cursor.take(2 * words).tobytes(), "<u2"))
