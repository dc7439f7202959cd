"""Codes of a fixed width with a scale for every few numbers: tensors that can be multiplied as they are stored.

A row is cut into groups; a number is ``level(code) · scale(group)``. ``int8`` and ``int4`` have whole levels, ``nf4``
sixteen levels that lie where a bell curve has its numbers, those of QLoRA or ones fitted to the tensor (S. Lloyd,
"Least squares quantization in PCM", 1957). A group's scale is the one with the least squared error
(:mod:`capibara.compress.codecs.fixed_search`), in eight bits: seven for its size, one for its sign, which turns levels
that are not symmetric to the side that needs them. With groups of 32 numbers that is 4.25 bits for a number.

Codes can be entropy-coded in the file (``coded``): they come back as the same codes. For eight bits that pays: with
``step``, the smallest scale, groups of small numbers use few of the codes, which then take fewer bits.

A few numbers that are much larger than those around them can be kept exactly, beside the codes (``outliers``); numbers
that are not finite always are. With the second moments of a layer's inputs (``hessian``) codes are chosen by the error
of the layer's output: :mod:`capibara.compress.calibration.gptq`.

A payload is, little-endian: flags u8, resolution u8, group u16, top f32; sixteen levels i16 (with a book of levels);
count u32, length u32, positions and numbers (with outliers); length u32 and the groups' scales; the codes.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.fixed_search import (
    KINDS,
    NF4,
    RESOLUTIONS,
    SCALES,
    Executor,
    Kind,
    get_executor,
    multipliers,
    search,
)
from capibara.compress.codecs.fixed_settings import Choices, choices
from capibara.compress.codecs.fixed_storage import Cursor, load_codes, store_codes
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest, to_float

__all__ = ["INT4", "INT8", "NF4_CODEC", "Fixed", "Parts"]

_HEAD = struct.Struct("<BBHf")
_CODED, _TURNED, _BOOK, _OUTLIERS = 1, 2, 4, 8
_BLOCK = 1 << 16  # numbers that are searched at a time: what is computed of them stays in the cache
_SHORTEST = 32  # a last axis below this is no row of its own


@dataclass(frozen=True)
class Parts:
    """A tensor as it is stored, for a product without decoding it.

    Attributes:
      kind: ``"int8"``, ``"int4"`` or ``"nf4"``.
      shape: of the tensor.
      length: numbers of a row.
      group: numbers that share a scale; the last group of a row may have fewer.
      turned: rows are what runs along the tensor's first axis: it is the transpose of [rows, length].
      codes: int8 [rows, length]; of four bits uint8 [rows, ceil(length / 2)], the first of two in the lower half.
        Codes of ``int4`` are the level + 8.
      scales: float32 [rows, groups], of either sign.
      levels: float32 [16], what a code of four bits stands for; ``None`` for ``int8``, whose codes are the levels.
      positions: int64 [count], where in [rows · length] numbers are kept exactly, which their codes are not.
      exact: float [count], those numbers.
    """

    kind: str
    shape: tuple[int, ...]
    length: int
    group: int
    turned: bool
    codes: np.ndarray
    scales: np.ndarray
    levels: np.ndarray | None
    positions: np.ndarray
    exact: np.ndarray

    def dequantise(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows ``first`` to ``last`` as float32 [rows, length], without the exact numbers."""
        codes, scales = self.codes[first:last], self.scales[first:last]
        if self.levels is None:
            values = codes.astype(np.float32)
        else:
            both = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, : self.length]
            values = self.levels[both]
        return values * np.repeat(scales, self.group, 1)[:, : self.length]


class Fixed:
    """The codecs ``"int8"``, ``"int4"`` and ``"nf4"``. Settings, all of them optional:

    - ``group``: numbers that share a scale, 4 to 1024; 32 if not given, 64 of int8.
    - ``axis``: groups run along the last axis (-1, as if not given) or along the first (0).
    - ``coded``: codes are entropy-coded in the file; False if not given.
    - ``step``: the smallest scale (int8 with ``coded``); ``None`` if not given.
    - ``levels``: of nf4, ``"fitted"`` to the tensor, as if not given, or ``"nf4"``, QLoRA's.
    - ``outliers``: the share of numbers to keep exactly, 0 to 0.05; 0 if not given.
    - ``hessian`` [length, length], ``input_axes``, ``damping``: for
      :func:`~capibara.compress.calibration.gptq.gptq`, in encoding only. Groups run along the input axis then.
    - ``executor``: ``"numpy"``, ``"torch"`` or ``"jax"``, who searches; the bytes are the same. As
      :func:`~capibara.compress.codecs.engine.use_engine` says if not given, else NumPy.

    Args:
      kind: what codes mean.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def candidates(self, form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        """Settings that are worth a try, from the largest payload to the smallest."""
        if not form.is_float or math.prod(shape) < _SHORTEST:
            return []
        return [{"group": g} for g in ((32, 64, 128) if self.kind.bits == 8 else (16, 32, 64, 128))]

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: a setting that is none, integers, or more than a sixteenth of the numbers are not finite.
        """
        chosen = choices(self.kind, settings, shape)
        exact_bits = np.asarray(bits).reshape(-1)
        with np.errstate(invalid="ignore"):  # quiets NaNs
            values = to_float(exact_bits, form).astype(np.float64)
        length = _row_length(shape, chosen.turned)
        if chosen.turned and values.size:
            exact_bits, values = (
                np.ascontiguousarray(a.reshape(length, -1).T).reshape(-1) for a in (exact_bits, values)
            )
        odd = _outliers(values, chosen.outliers, chosen.group)
        if odd.size:
            values = values.copy()
            values[odd] = 0
        rows = values.reshape(-1, length) if length else values.reshape(0, 1)
        scales, codes, book, top, resolution = self._quantise(rows, chosen)
        flags = _CODED * chosen.coded + _TURNED * chosen.turned + _BOOK * (book is not None)
        parts = [_HEAD.pack(flags + _OUTLIERS * bool(odd.size), resolution, chosen.group, top)]
        if book is not None:
            parts.append(book.astype("<i2").tobytes())
        if odd.size:
            steps = np.diff(odd, prepend=0).astype("<u4")
            where = lossless.encode(steps, get_format("U32"), (odd.size,))
            parts += [struct.pack("<II", odd.size, len(where)), where, exact_bits[odd].tobytes()]
        packed = lossless.encode(scales.reshape(-1), get_format("U8"), scales.shape)
        parts += [struct.pack("<I", len(packed)), packed, store_codes(codes, self.kind, chosen.coded)]
        return b"".join(parts)

    def _quantise(
        self, rows: np.ndarray, chosen: Choices
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float, int]:
        """Scales uint8 [rows, groups], codes int8 [rows, length], levels, top and resolution."""
        kind, executor = self.kind, get_executor(chosen.executor)
        book = NF4 if kind.name == "nf4" else None
        if not rows.size:
            return np.empty((0, 1), np.uint8), np.empty((0, 1), np.int8), book, 1.0, RESOLUTIONS[0]
        groups = _grouped(rows, chosen.group)
        top, resolution, last = _range(kind, groups, chosen.step)
        if book is not None and chosen.fitted:
            book = _fit(executor, kind, book, groups, top, resolution)
        if chosen.hessian is not None:
            from capibara.compress.calibration.gptq import gptq

            def scale(block: np.ndarray) -> np.ndarray:
                return search(executor, kind, book, block, top, resolution, last)[0]

            table = np.float64(np.float32(top)) * multipliers(resolution)
            scales, codes = gptq(
                rows, chosen.hessian, kind, book, chosen.group, scale, table, damping=chosen.damping
            )
            return scales, codes, book, top, resolution
        step = max(_BLOCK // max(groups.shape[1], 1), 1)
        scales = np.empty(len(groups), np.uint8)
        codes = np.empty(groups.shape, np.int8)

        def work(first: int) -> None:
            block = groups[first : first + step]
            found = search(executor, kind, book, block, top, resolution, last)
            scales[first : first + step], codes[first : first + step] = found

        starts = range(0, len(groups), step)
        if executor.name == "numpy" and len(starts) > 1:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                list(pool.map(work, starts))
        else:
            for first in starts:
                work(first)
        count = -(-rows.shape[1] // groups.shape[1])
        codes = codes.reshape(len(rows), -1)[:, : rows.shape[1]]
        return scales.reshape(len(rows), count), codes, book, top, resolution

    def parts(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Parts:
        """The tensor as it is stored: codes and scales, nothing multiplied.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes.
        """
        cursor = Cursor(payload)
        flags, resolution, group, top = _HEAD.unpack(cursor.take(_HEAD.size))
        nf4 = self.kind.name == "nf4"
        if (
            flags > 15
            or resolution not in RESOLUTIONS
            or not 4 <= group <= 1024
            or not 0 < top < math.inf
            or not form.is_float
            or bool(flags & _BOOK) != nf4
            or (flags & _TURNED and len(shape) < 2)
        ):
            raise DamagedError("a tensor's groups or scales are none: the file is damaged")
        levels = None
        if nf4:
            levels = np.frombuffer(cursor.take(32), "<i2").astype(np.float32)
        elif self.kind.bits == 4:
            levels = np.arange(-8, 8, dtype=np.float32)
        turned, count = bool(flags & _TURNED), math.prod(shape)
        length = _row_length(shape, turned)
        rows = count // length if length else 0
        positions, exact = np.empty(0, np.int64), np.empty(0, form.unsigned)
        if flags & _OUTLIERS:
            found, size = struct.unpack("<II", cursor.take(8))
            if not 0 < found <= count:
                raise DamagedError("more numbers are kept exactly than there are: the file is damaged")
            steps = lossless.decode(cursor.take(size), get_format("U32"), (found,))
            positions = np.cumsum(steps.astype(np.int64))
            if int(positions[-1]) >= count:
                raise DamagedError("a number that is kept exactly lies nowhere: the file is damaged")
            exact = np.frombuffer(cursor.take(found * form.bits // 8), form.unsigned)
        (size,) = struct.unpack("<I", cursor.take(4))
        across = -(-length // group) if length else 0
        scales = lossless.decode(cursor.take(size), get_format("U8"), (rows, across))
        codes = load_codes(cursor.rest(), self.kind, bool(flags & _CODED), rows, length)
        with np.errstate(over="ignore", under="ignore"):
            table = np.float32(top) * multipliers(resolution)
        table = np.concatenate([table, -table])
        return Parts(
            self.kind.name, shape, length, group, turned, codes,
            table[scales].reshape(rows, across), levels, positions, exact,
        )  # fmt: skip

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        parts = self.parts(payload, form, shape, settings)
        count = math.prod(shape)
        if not count:
            return np.empty(0, form.unsigned)
        out = np.empty((count // parts.length, parts.length), form.unsigned)
        step = max(_BLOCK // parts.length, 1)
        with np.errstate(over="ignore", under="ignore"):
            for first in range(0, len(out), step):
                values = parts.dequantise(first, first + step)
                # Only finite numbers were rounded: what rounding took past the largest one comes back as that.
                top = min(largest(form), float(np.finfo(np.float32).max))
                values = np.clip(values, -np.float32(top), np.float32(top))
                wide = values.astype(np.float64) if form.bits == 64 else values
                out[first : first + step] = from_float(wide, form).reshape(values.shape)
        out = out.reshape(-1)
        out[parts.positions] = parts.exact
        if parts.turned:
            out = np.ascontiguousarray(out.reshape(-1, parts.length).T).reshape(-1)
        return out

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        """One byte for a code and one for a scale at worst, and a sixteenth of the numbers exactly."""
        kept = count // 16 + 1
        return _HEAD.size + 32 + 8 + (1 + 4 * kept) + kept * form.bits // 8 + 4 + 2 * (1 + count)

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Relative errors of single numbers are not bounded: one below half a scale becomes 0."""
        return None


def _row_length(shape: tuple[int, ...], turned: bool) -> int:
    """Numbers of a row: the last axis, or all but the first where that is short, or everything."""
    count = math.prod(shape)
    if turned:
        return shape[0] if count else 0
    if len(shape) >= 2 and count:
        for length in (shape[-1], count // shape[0]):
            if length >= _SHORTEST:
                return length
    return count


def _grouped(rows: np.ndarray, group: int) -> np.ndarray:
    """[rows, length] as [rows · groups, size], the last group of a row filled up with zeros."""
    length = rows.shape[1]
    size = min(group, max(length, 1))
    if length % size:
        rows = np.pad(rows, ((0, 0), (0, -length % size)))
    return rows.reshape(-1, size)


def _outliers(values: np.ndarray, share: float, group: int) -> np.ndarray:
    """Where the numbers are that are kept exactly: what is not finite, and the largest for their surroundings."""
    odd = np.flatnonzero(~np.isfinite(values))
    if odd.size * 16 > values.size + 15:
        raise CompressError(
            f"values: {odd.size} of {values.size} are NaN or infinite, expected a sixteenth at most. "
            "Remedy: codec='lossless' for this tensor."
        )
    count = int(share * values.size)
    if not count:
        return odd
    with np.errstate(invalid="ignore"):
        size = np.where(np.isfinite(values), np.abs(values), 0)
    mean = np.add.reduceat(size, np.arange(0, size.size, group)) / group
    size /= np.maximum(np.repeat(mean, group)[: size.size], np.finfo(np.float64).tiny)
    size[odd] = np.inf
    count = max(count, odd.size)
    return np.sort(np.argpartition(-size, count - 1)[:count])


def _range(kind: Kind, groups: np.ndarray, step: float | None) -> tuple[float, int, int]:
    """The largest scale, how many codes halve one, and the code of the smallest."""
    size = np.abs(groups).max(1, initial=0) / kind.largest
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


def _fit(
    executor: Executor, kind: Kind, book: np.ndarray, groups: np.ndarray, top: float, resolution: int
) -> np.ndarray:
    """Levels that are the means of what is rounded to them, in turn with the codes."""
    some = groups[:: max(len(groups) >> 11, 1)]
    table = np.float64(np.float32(top)) * multipliers(resolution)
    table = np.concatenate([table, -table])
    for _ in range(4):
        scales, codes = search(executor, kind, book, some, top, resolution)
        scale = np.broadcast_to(table[scales][:, None], some.shape).ravel()
        weight = np.bincount(codes.ravel(), scale * scale, minlength=16)
        mean = np.bincount(codes.ravel(), some.ravel() * scale, minlength=16)
        level = np.where(weight > 0, mean / np.maximum(weight, np.finfo(np.float64).tiny), book)
        level *= 1024 / np.abs(level).max()
        fitted = np.rint(level).astype(np.int32)
        if not (np.diff(fitted) > 0).all():
            break
        book = fitted
    return book


INT8, INT4, NF4_CODEC = (Fixed(KINDS[name]) for name in ("int8", "int4", "nf4"))
