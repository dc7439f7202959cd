"""Bit-exact: what repeats in weights is coded, what does not is packed.

Trained weights have few exponents, each with its frequency, and nearly random fractions. A number is cut in two: a
*symbol* (the exponent, with the fraction's first bits where they help: within one exponent, smaller numbers are the
more frequent) and the *rest* (the sign and what remains of the fraction). Symbols are entropy-coded
(:mod:`capibara.compress.entropy.rans`), the rest is packed as it is.

Rows differ in scale, and a table of frequencies that fits all fits none well: rows are sorted into up to eight classes
by their mean exponent, and each class has a table of its own. Rows whose fractions end in zeros were converted from a
narrower type; those bits are not stored. How many bits go into the symbol and how many classes there are is what
comes out smallest, counted for each tensor. Integers are cut in the same way: their distance from the smallest one, or
where there are some of both signs, their size with the sign as the lowest bit.

Every choice is in the payload's header, so that a reader needs no more than the tensor's type and shape.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from capibara.compress.codecs.cut import Cut
from capibara.compress.codecs.executors import Executor, NumpyExecutor
from capibara.compress.codecs.native import NativeExecutor
from capibara.compress.entropy import (
    BLOCK,
    LANES,
    BitReader,
    BitWriter,
    Stream,
    normalise,
    pack_bits,
    packed_size,
    unpack_bits,
)
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat
from capibara.native.loading import open_library

__all__ = ["LOSSLESS", "decode", "encode", "size_bound"]

STORED, CODED = 0, 1
_CLASSES = 8
_MOST_HEADER = 1 << 15  # bytes, beside what it says of each block; sixteen full tables take less
_MOST_FRACTION = 3  # bits of the fraction that a symbol may take: the fourth never paid for its tables


@dataclass(frozen=True)
class _Group:
    """Rows that share a table: its symbols, their frequencies (the last one is the escape), and zero bits left out."""

    drop: int
    symbols: np.ndarray
    frequencies: np.ndarray
    escapes: int


@cache
def best_executor() -> Executor:
    """Compiled code where the library is built, else NumPy."""
    library, _ = open_library()
    return NumpyExecutor() if library is None else NativeExecutor(library)


def size_bound(form: NumberFormat, count: int) -> int:
    """The most bytes that a payload of ``count`` numbers takes."""
    return 1 + count * form.bits // 8


def row_length(shape: tuple[int, ...]) -> int:
    """What counts as a row: the last axis, or all but the first where that is short, or the whole."""
    count = math.prod(shape)
    if len(shape) >= 2 and count:
        for length in (shape[-1], count // shape[0]):
            if length >= 32:
                return length
    return max(count, 1)


class Lossless:
    """The codec as an archive calls it."""

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        return encode(bits, form, shape)

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        return decode(payload, form, shape)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        return size_bound(form, count)

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        return 0.0


LOSSLESS = Lossless()


def encode(
    bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], executor: Executor | None = None
) -> bytes:
    """The payload of a tensor.

    Args:
      bits: [count] of ``form.unsigned``, in C order.
      shape: with as many elements.
      executor: who does it; the quickest one there is by default.
    """
    bits = np.ascontiguousarray(bits, form.unsigned)
    stored = bytes([STORED]) + bits.tobytes()
    if len(bits) < 64:
        return stored
    coded = _encode(bits.reshape(-1, row_length(shape)), form, executor or best_executor())
    return coded if len(coded) < len(stored) else stored


def _cuts(rows: np.ndarray, form: NumberFormat) -> tuple[np.ndarray, list[Cut]]:
    """The numbers as they are cut, and the cuts to try, with the most bits in the symbol last."""
    if form.is_float:
        takes = range(min(_MOST_FRACTION, form.mantissa) + 1)
        top = min(form.exponent, 8)  # float64: the exponents in use are few, but may lie anywhere
        spare = form.exponent - top
        return rows, [Cut(form.mantissa - m, top + spare + m, True, 0) for m in takes]
    values = rows.view(f"<i{form.bits // 8}") if form.signed else rows
    base, last = int(values.min()), int(values.max())
    if base < 0 < last:
        # 0, -1, 1, -2, 2 … as 0, 1, 2, 3, 4 …: then rows of small numbers have small sums.
        shifted, base = ((values << 1) ^ (values >> (form.bits - 1))).view(form.unsigned), None
        width = int(shifted.max()).bit_length()
    else:
        shifted = rows - rows.dtype.type(base & ((1 << form.bits) - 1))
        width = max((last - base).bit_length(), 1)
    return shifted, [
        Cut(width - n, n, False, base or 0, base is None) for n in range(min(width, 8), min(width, 12) + 1)
    ]


def _estimate(counts: np.ndarray, symbol_bits: int) -> float:
    """About how many bits tables and symbols take, for counts [classes, symbols]; :func:`_table` does it exactly."""
    total = counts.sum(1, keepdims=True)
    kept = np.where(counts * 8192 >= total, counts, 0)
    if kept.shape[1] > 255:
        kept = -np.partition(-kept, 255, axis=1)[:, :255]
    escapes = total - kept.sum(1, keepdims=True)
    all_counts = np.concatenate([kept, escapes], axis=1).astype(np.float64)
    logs = np.log2(np.maximum(all_counts, 1))
    tables = 2 * np.log2(1 + 4096 * kept / np.maximum(total, 1)) + 2 * (kept > 0)
    bits = (total * np.log2(np.maximum(total, 1))).sum() - (all_counts * logs).sum()
    return float(bits + escapes.sum() * symbol_bits + tables.sum() + 40 * len(counts))


def _table(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Which symbols get an entry, their frequencies (the last one is the escape's), and how many others there are."""
    total = int(counts.sum())
    used = np.flatnonzero(counts)
    # A symbol rarer than half an entry of 4096 costs less as an escape with its bits written out.
    kept = used[counts[used] * 8192 >= total]
    if len(kept) > 255:
        kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:255]])
    escapes = total - int(counts[kept].sum())
    return kept, normalise(np.append(counts[kept], escapes)), escapes


def _choose(
    rows: np.ndarray, cuts: list[Cut], sums: np.ndarray, executor: Executor
) -> tuple[Cut, np.ndarray]:
    """The cut and the class of each row that take the fewest bits."""
    count, length = rows.shape
    finest = cuts[-1]
    rank = np.empty(count, np.int64)
    # Sums of whole numbers: the order of rows is the same on every machine.
    rank[np.argsort(sums, kind="stable")] = np.arange(count)
    most = _CLASSES if count >= _CLASSES else 1
    histogram = executor.histogram(rows, finest, (rank * most // count).astype(np.uint8), most)
    best = (math.inf, cuts[0], 1)
    for cut in cuts:
        by_class = histogram.reshape(most, 1 << cut.symbol, -1).sum(2)
        classes = most
        while classes:
            merged = by_class.reshape(classes, -1, 1 << cut.symbol).sum(1)
            bits = _estimate(merged, cut.symbol)
            blocks = classes * -(-count * length // (BLOCK * classes))
            bits += count * length * cut.width(0) + count * (classes - 1).bit_length() + blocks * 1044
            if bits < best[0]:
                best = (bits, cut, classes)
            classes //= 2
    return best[1], rank * best[2] // count


def _zero_bits(ors: np.ndarray, cut: Cut) -> tuple[int, np.ndarray]:
    """How many low bits are worth leaving out, and the rows in which they are all zero."""
    low = ors & np.uint64((1 << cut.shift) - 1)
    zeros = np.full(len(ors), cut.shift)
    for bit in range(cut.shift - 1, -1, -1):
        zeros[(low >> np.uint64(bit)) & np.uint64(1) != 0] = bit
    numbers, counts = np.unique(zeros, return_counts=True)
    saved = [int(z) * int(counts[numbers >= z].sum()) for z in numbers]
    drop = int(numbers[int(np.argmax(saved))])
    return drop, (zeros >= drop) & (drop > 0)


def _encode(rows: np.ndarray, form: NumberFormat, executor: Executor) -> bytes:
    rows, cuts = _cuts(rows, form)
    sums, ors = executor.measure(rows, cuts[-1], cuts[-1].symbol - cuts[0].symbol)
    cut, classes = _choose(rows, cuts, sums, executor)
    drop, dropping = _zero_bits(ors, cut) if form.is_float else (0, np.zeros(len(rows), bool))
    names, which = np.unique(classes * 2 + dropping, return_inverse=True)
    counted = executor.histogram(rows, cut, which.astype(np.uint8), len(names))
    groups, blocks, tables, body = [], [], [], []
    for index, name in enumerate(names):
        left_out = drop if name & 1 else 0
        kept, frequencies, escapes = _table(counted[index])
        entry = np.full(1 << cut.symbol, len(kept), np.uint8)
        entry[kept] = np.arange(len(kept))
        chosen = np.flatnonzero(which == index)
        coded, rest, escaped = executor.split(rows, chosen, cut, left_out, entry, len(kept))
        body += [pack_bits(escaped, cut.symbol), rest]
        groups.append(_Group(left_out, kept, frequencies, escapes))
        parts = [coded[i : i + BLOCK] for i in range(0, len(coded), BLOCK)]
        blocks += parts
        tables += [index] * len(parts)
    streams = executor.encode(blocks, _stack(groups), tables)
    header = _write_header(cut, groups, [len(s.words) for s in streams])
    class_bits = (len(groups) - 1).bit_length()
    return b"".join(
        [
            bytes([CODED]),
            struct.pack("<I", len(header)),
            header,
            pack_bits(which.astype(np.uint8), class_bits),
            *body,
            *(
                part
                for s in streams
                for part in (s.states.astype("<u4").tobytes(), s.words.astype("<u2").tobytes())
            ),
        ]
    )


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


def decode(
    payload: memoryview | bytes, form: NumberFormat, shape: tuple[int, ...], executor: Executor | None = None
) -> np.ndarray:
    """The bits of the tensor, [count] of ``form.unsigned``.

    Raises:
      DamagedError: the payload is not what :func:`encode` writes for this type and shape. What is allocated before that
        is known is bounded by the payload's own size, at 2¹⁸ numbers for each 128 bytes.
    """
    data = np.frombuffer(payload, np.uint8)
    count = math.prod(shape)
    if len(data) == 0 or data[0] > CODED:
        raise DamagedError("a tensor's payload has no known beginning: the file is damaged")
    if data[0] == STORED:
        if len(data) != 1 + count * form.bits // 8:
            raise DamagedError(f"a tensor of {count} numbers has {len(data) - 1} bytes: the file is damaged")
        return np.frombuffer(data[1:].tobytes(), form.unsigned).copy()
    return _decode(_Cursor(data[1:]), form, count, row_length(shape), executor or best_executor())


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
        raise DamagedError("a tensor's numbers are cut where they cannot be: the file is damaged")
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
            raise DamagedError("a tensor's table of frequencies is none: the file is damaged")
        groups.append(_Group(drop, np.array(symbols, np.int64), np.array([*frequencies, left]), escapes))
    return cut, groups


def _decode(cursor: _Cursor, form: NumberFormat, count: int, length: int, executor: Executor) -> np.ndarray:
    if count == 0 or -(-count // BLOCK) * 4 * LANES > len(cursor.data):
        raise DamagedError(f"{len(cursor.data)} bytes cannot hold {count} numbers: the file is damaged")
    size = int(cursor.take(4).view("<u4")[0])
    if size > _MOST_HEADER + 3 * -(-count // BLOCK):
        raise DamagedError(f"a tensor's header has {size} bytes: the file is damaged")
    reader = BitReader(cursor.take(size).tobytes())
    cut, groups = _read_header(reader, form)
    rows = count // length
    which = unpack_bits(
        cursor.take(packed_size(rows, (len(groups) - 1).bit_length())),
        rows,
        (len(groups) - 1).bit_length(),
        np.dtype(np.uint8),
    )
    if int(which.max()) >= len(groups):
        raise DamagedError("a row belongs to a group that there is not: the file is damaged")
    sizes = np.bincount(which, minlength=len(groups)) * length
    if not sizes.all():
        raise DamagedError("no row belongs to one of the groups: the file is damaged")
    escaped, rest, counts, tables = [], [], [], []
    for index, (group, size) in enumerate(zip(groups, sizes.tolist(), strict=True)):
        if group.escapes > size:
            raise DamagedError("more numbers are escaped than there are: the file is damaged")
        escaped.append(
            unpack_bits(
                cursor.take(packed_size(group.escapes, cut.symbol)),
                group.escapes,
                cut.symbol,
                np.dtype(np.uint16),
            )
        )
        width = cut.width(group.drop)
        rest.append(cursor.take(packed_size(size, width)))
        parts = [min(BLOCK, size - i) for i in range(0, size, BLOCK)]
        counts += parts
        tables += [index] * len(parts)
    streams = list(_streams(cursor, reader, len(counts)))
    reader.finish()
    if cursor.at != len(cursor.data):
        raise DamagedError("a tensor's payload is longer than what it says: the file is damaged")
    blocks = executor.decode(streams, counts, _stack(groups), tables)
    out = np.empty((rows, length), form.unsigned)
    for index, group in enumerate(groups):
        coded = [b for b, t in zip(blocks, tables, strict=True) if t == index]
        executor.join(
            out, np.flatnonzero(which == index), cut, group.drop, group.symbols,
            np.concatenate(coded) if len(coded) != 1 else coded[0], rest[index], escaped[index],
        )  # fmt: skip
    if cut.alternating:
        out = (out >> out.dtype.type(1)) ^ (~(out & out.dtype.type(1)) + out.dtype.type(1))
    return out.reshape(-1)


def _streams(cursor: _Cursor, reader: BitReader, count: int) -> Iterator[Stream]:
    for _ in range(count):
        words = reader.read(19)
        states = np.frombuffer(cursor.take(4 * LANES).tobytes(), "<u4")
        yield Stream(states, np.frombuffer(cursor.take(2 * words).tobytes(), "<u2"))
