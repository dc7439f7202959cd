"""Per-tensor choices before the search of groups: exact values, the range of scales, the levels."""

from __future__ import annotations

import math

import numpy as np

from capibara.compress.codecs.fixed_search import SCALES, Executor, Kind, multipliers, search
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, to_float

__all__ = ["BLOCK", "as_groups", "find_outliers", "fit_levels", "floats", "scale_range"]

BLOCK = 1 << 16  # numbers that are searched at a time: what is computed of them stays in the cache


def as_groups(rows: np.ndarray, group: int) -> np.ndarray:
    """[rows, length] as [rows · groups, size], with the last group of a row padded with zeros."""
    length = rows.shape[1]
    size = min(group, max(length, 1))
    if length % size:
        rows = np.pad(rows, ((0, 0), (0, -length % size)))
    return rows.reshape(-1, size)


def floats(bits: np.ndarray, form: NumberFormat) -> np.ndarray:
    return to_float(bits, form).astype(np.float64)


def find_outliers(bits: np.ndarray, form: NumberFormat, share: float, group: int) -> np.ndarray:
    """Positions of values to keep exactly: NaN, infinity, and the largest relative to their neighbours."""
    found = [np.empty(0, np.int64)]
    for first in range(0, bits.size, BLOCK):
        with np.errstate(invalid="ignore"):  # quiets NaNs
            finite = np.isfinite(to_float(bits[first : first + BLOCK], form))
        found.append(np.flatnonzero(~finite) + first)
    odd = np.concatenate(found)
    if odd.size * 16 > bits.size + 15:
        raise CompressError(
            f"values: {odd.size} of {bits.size} are NaN or infinite, expected a sixteenth at most. "
            "Remedy: codec='lossless' for this tensor."
        )
    count = int(share * bits.size)
    if not count:
        return odd
    with np.errstate(invalid="ignore"):
        size = np.abs(floats(bits, form))
    size[odd] = 0
    mean = np.add.reduceat(size, np.arange(0, size.size, group)) / group
    size /= np.maximum(np.repeat(mean, group)[: size.size], np.finfo(np.float64).tiny)
    size[odd] = np.inf
    count = max(count, odd.size)
    return np.sort(np.argpartition(-size, count - 1)[:count])


def scale_range(kind: Kind, size: np.ndarray, step: float | None) -> tuple[float, int, int]:
    """The largest scale, the number of codes per factor of 2, and the code of the smallest scale; ``size``: scales of
    groups without clipping."""
    most = float(size.max(initial=0))
    if most == 0 and step is None:
        return 1.0, 16, SCALES
    if step is not None:
        for resolution in (8, 4, 2, 1):
            last = max(math.ceil(resolution * math.log2(max(most / step, 1))), 0)
            if last <= SCALES:
                top = step / float(multipliers(resolution)[last])
                return _check_top(top), resolution, last
        raise CompressError(
            f"step: got {step!r}, which is too small for scales up to {most!r}. Remedy: a larger one."
        )
    top = _check_top(most * 2 ** kind.span[1])
    squares = float(np.square(size).sum())
    for resolution in (16, 8, 4, 2):
        lost = size < top * 2.0 ** (-SCALES / resolution)
        if float(np.square(size[lost]).sum()) <= 1e-6 * squares:
            return top, resolution, SCALES
    return top, 1, SCALES


def _check_top(top: float) -> float:
    """``top`` as the float32 that is stored, not below it."""
    small = np.float32(top) if top < 3e38 else np.float32(np.inf)
    if not 1e-37 < small < np.inf:
        raise CompressError(
            f"values: their largest scale would be {top!r}, expected 1e-37 to 3e38. Remedy: codec='lossless'."
        )
    return float(small if small >= top else np.nextafter(small, np.float32(np.inf)))


def fit_levels(
    executor: Executor, kind: Kind, book: np.ndarray, some: np.ndarray, top: float, resolution: int
) -> np.ndarray:
    """Fit levels as the means of the values rounded to them, alternating with the codes.

    They are integers up to 1024 with eight significant bits, as bfloat16 has: compiled kernels look those up fastest,
    and the error of the values is the same in three digits.
    """
    table = np.float64(np.float32(top)) * multipliers(resolution)
    table = np.concatenate([table, -table])
    for _ in range(4):
        scales, codes = search(executor, kind, book, some, top, resolution)
        scale = np.broadcast_to(table[scales][:, None], some.shape).ravel()
        weight = np.bincount(codes.ravel(), scale * scale, minlength=16)
        mean = np.bincount(codes.ravel(), some.ravel() * scale, minlength=16)
        level = np.where(weight > 0, mean / np.maximum(weight, np.finfo(np.float64).tiny), book)
        level *= 1024 / np.abs(level).max()
        unit = np.ldexp(1.0, np.maximum(np.frexp(level)[1] - 8, 0))
        fitted = (np.rint(level / unit) * unit).astype(np.int32)
        if not (np.diff(fitted) > 0).all():
            break
        book = fitted
    return book
