"""Choices of the lossless codec: where values are split, which rows share a table, which symbols get an entry.

All of it is computed in integers, or in single float64 divisions, which are exact to the last bit everywhere: sums of
floating-point logarithms, and therefore the bytes, would differ between machines. ``codec_choice.cc`` does the same.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from capibara.compress.codecs.cut import Cut
from capibara.compress.entropy import BLOCK, normalise
from capibara.compress.formats import NumberFormat

__all__ = ["choose", "fixed_log", "make_cuts", "make_table", "zero_bits"]

CLASSES = 8
_MOST_FRACTION = 3  # bits of the fraction that a symbol may take: the fourth never paid for its tables
_LOG_BITS = 12


@cache
def _logs() -> np.ndarray:
    """⌊4096 log₂(1 + i / 4096)⌋, bit by bit: squaring a number doubles its logarithm."""
    x = np.uint64(1 << 31) + (np.arange(1 << 12, dtype=np.uint64) << np.uint64(19))
    out = np.zeros(1 << 12, np.int64)
    for _ in range(_LOG_BITS):
        x = (x * x) >> np.uint64(31)
        over = x >> np.uint64(32)
        out = out << 1 | over.astype(np.int64)
        x >>= over
    return out


def fixed_log(n: np.ndarray) -> np.ndarray:
    """About 4096 log₂ n, for integers; 0 for 0."""
    n = np.maximum(np.asarray(n, np.int64), 1)
    # The exponent of a float64 below 2⁵³ is the place of the highest bit.
    exponent = np.frexp(n.astype(np.float64))[1].astype(np.int64) - 1
    index = np.where(exponent > 12, n >> np.maximum(exponent - 12, 0), n << np.maximum(12 - exponent, 0))
    return (exponent << _LOG_BITS) + _logs()[index - (1 << 12)]


def make_cuts(rows: np.ndarray, form: NumberFormat) -> tuple[np.ndarray, list[Cut]]:
    """The values to split, and the cuts to try, with the most symbol bits last."""
    if form.is_float:
        takes = range(min(_MOST_FRACTION, form.mantissa) + 1)
        return rows, [Cut(form.mantissa - m, form.exponent + m, True) for m in takes]
    values = rows.view(f"<i{form.bits // 8}") if form.signed else rows
    base, last = int(values.min()), int(values.max())
    alternating = base < 0 < last
    if alternating:
        # 0, -1, 1, -2, 2 … as 0, 1, 2, 3, 4 …: then rows of small numbers have small sums.
        shifted, base = ((values << 1) ^ (values >> (form.bits - 1))).view(form.unsigned), 0
        width = int(shifted.max()).bit_length()
    else:
        shifted = rows - rows.dtype.type(base & ((1 << form.bits) - 1))
        width = max((last - base).bit_length(), 1)
    return shifted, [
        Cut(width - n, n, False, base, alternating) for n in range(min(width, 8), min(width, 12) + 1)
    ]


def _estimate(counts: np.ndarray, symbol_bits: int) -> int:
    """About how many bits, times 4096, tables and symbols take, for counts [classes, symbols]."""
    total = counts.sum(1, keepdims=True)
    kept = np.where(counts * 8192 >= total, counts, 0)
    if kept.shape[1] > 255:
        kept = -np.partition(-kept, 254, axis=1)[:, :255]
    escapes = total - kept.sum(1, keepdims=True)
    each = np.concatenate([kept, escapes], axis=1)
    bits = (total * fixed_log(total)).sum() - (each * fixed_log(each)).sum()
    tables = 2 * fixed_log(1 + 4096 * kept // np.maximum(total, 1)) + (2 << _LOG_BITS)
    bits += (escapes * symbol_bits << _LOG_BITS).sum() + tables[kept > 0].sum()
    return int(bits) + (40 * len(counts) << _LOG_BITS)


def make_table(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """The symbols with an entry, their frequencies (the last is the escape's), and the number of others."""
    total = int(counts.sum())
    used = np.flatnonzero(counts)
    # A symbol rarer than half an entry of 4096 costs less as an escape with its bits written out.
    kept = used[counts[used] * 8192 >= total]
    if len(kept) > 255:
        kept = np.sort(kept[np.argsort(-counts[kept], kind="stable")[:255]])
    escapes = total - int(counts[kept].sum())
    return kept, normalise(np.append(counts[kept], escapes)), escapes


def class_count(rows: int) -> int:
    """The maximum number of row classes."""
    return CLASSES if rows >= CLASSES else 1


def choose(histogram: np.ndarray, cuts: list[Cut], rows: int, length: int) -> tuple[Cut, int]:
    """The cut and the number of classes that take the fewest bits.

    Args:
      histogram: [classes, symbols of the last cut], how often each occurs in the rows of each class.
    """
    most = len(histogram)
    best: tuple[int | None, Cut, int] = (None, cuts[0], 1)
    for cut in cuts:
        by_class = histogram.reshape(most, 1 << cut.symbol, -1).sum(2)
        classes = most
        while classes:
            merged = by_class.reshape(classes, -1, 1 << cut.symbol).sum(1)
            blocks = classes * -(-rows * length // (BLOCK * classes))
            bits = rows * length * cut.width(0) + rows * (classes - 1).bit_length() + blocks * 1044
            bits = _estimate(merged, cut.symbol) + (bits << _LOG_BITS)
            if best[0] is None or bits < best[0]:
                best = (bits, cut, classes)
            classes //= 2
    return best[1], best[2]


def zero_bits(ors: np.ndarray, cut: Cut) -> tuple[int, np.ndarray]:
    """The number of low bits worth dropping, and the rows in which they are all zero."""
    low = ors & np.uint64((1 << cut.shift) - 1)
    zeros = np.full(len(ors), cut.shift)
    for bit in range(cut.shift - 1, -1, -1):
        zeros[(low >> np.uint64(bit)) & np.uint64(1) != 0] = bit
    numbers, counts = np.unique(zeros, return_counts=True)
    saved = [int(z) * int(counts[numbers >= z].sum()) for z in numbers]
    drop = int(numbers[int(np.argmax(saved))])
    return drop, (zeros >= drop) & (drop > 0)
