"""Fixed-width codes with a scale per group: tensors that can be multiplied in their stored form.

A row is split into groups; an element is ``level(code) · scale(group)``. ``int8`` and ``int4`` have integer levels,
``nf4`` has sixteen levels for a normal distribution, those of QLoRA or ones fitted to the tensor (S. Lloyd, "Least
squares quantization in PCM", 1957). A group's scale is the one with the least squared error
(:mod:`capibara.compress.codecs.fixed_search`), in eight bits: seven for its magnitude, one for its sign, which flips
asymmetric levels to the side that needs them. With groups of 32 elements that is 4.25 bits per element.

Codes can be entropy-coded in the file (``coded``), without loss. For eight bits this is worthwhile: with ``step``,
the smallest scale, groups of small values use few of the codes, which then take fewer bits.

A few values that are much larger than their neighbours can be kept exactly, besides the codes (``outliers``); NaN and
infinity always are. With the second moments of a layer's inputs (``hessian``) codes are chosen by the error of the
layer's output: :mod:`capibara.compress.calibration.gptq`.

A payload is, little-endian: flags u8, resolution u8, group u16, top f32; sixteen levels i16 (with a codebook); count
u32, length u32, positions and values (with outliers); length u32 and the groups' scales; the codes.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.fixed_levels import (
    BLOCK,
    as_groups,
    find_outliers,
    fit_levels,
    floats,
    scale_range,
)
from capibara.compress.codecs.fixed_native import NativeExecutor
from capibara.compress.codecs.fixed_search import (
    KINDS,
    NF4,
    RESOLUTIONS,
    Kind,
    default_executor,
    get_executor,
    multipliers,
    search,
)
from capibara.compress.codecs.fixed_settings import Choices, choices
from capibara.compress.codecs.fixed_storage import Cursor, load_codes, store_codes
from capibara.compress.codecs.in_place import InPlace
from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest, to_float

__all__ = ["HEAD_BYTES", "INT4", "INT8", "NF4_CODEC", "Fixed", "Layout", "Parts"]

_HEAD = struct.Struct("<BBHf")
_CODED, _TURNED, _BOOK, _OUTLIERS = 1, 2, 4, 8
_BOOK_SIZE = 32  # bytes
HEAD_BYTES = _HEAD.size + _BOOK_SIZE + 4
"""So many bytes of a payload are enough for :meth:`Fixed.layout`."""
_SHORTEST = 32  # a last axis below this is not a row of its own


@dataclass(frozen=True)
class Layout:
    """The form of the arrays of :class:`Parts`, where the names are the same.

    Attributes:
      rows: of codes. width: bytes of a row of them. groups: of a row.
      exact: how many values are kept exactly.
    """

    kind: str
    shape: tuple[int, ...]
    rows: int
    length: int
    group: int
    turned: bool
    width: int
    groups: int
    exact: int


@dataclass(frozen=True)
class Parts:
    """A tensor in its stored form, for products without decoding.

    Attributes:
      kind: ``"int8"``, ``"int4"`` or ``"nf4"``.
      shape: of the tensor.
      length: elements of a row.
      group: elements that share a scale; the last group of a row may have fewer.
      turned: rows run along the tensor's first axis: it is the transpose of [rows, length].
      codes: int8 [rows, length]; of four bits uint8 [rows, ceil(length / 2)], the first of two in the lower half.
        Codes of ``int4`` are the level + 8.
      scale_codes: uint8 [rows, groups]. table: float32 [256], the scale of each scale code, of either sign.
      levels: float32 [16], the value of each four-bit code; ``None`` for ``int8``, whose codes are the levels.
      positions: int64 [count], indices in [rows · length] of values that are kept exactly instead of their codes.
      exact: float [count], those values.
    """

    kind: str
    shape: tuple[int, ...]
    length: int
    group: int
    turned: bool
    codes: np.ndarray
    scale_codes: np.ndarray
    table: np.ndarray
    levels: np.ndarray | None
    positions: np.ndarray
    exact: np.ndarray

    @functools.cached_property
    def scales(self) -> np.ndarray:
        """float32 [rows, groups]."""
        return self.table[self.scale_codes]

    def dequantise(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows ``first`` to ``last`` as float32 [rows, length], without the exact values."""
        return _dequantise(
            self.codes[first:last], self.scales[first:last], self.levels, self.group, self.length
        )


class Fixed(InPlace):
    """The codecs ``"int8"``, ``"int4"`` and ``"nf4"``. Settings, all of them optional:

    - ``group``: elements that share a scale, 4 to 1024; 32 by default, 64 for int8.
    - ``axis``: groups run along the last axis (-1, the default) or along the first (0).
    - ``coded``: codes are entropy-coded in the file; False by default.
    - ``step``: the smallest scale (int8 with ``coded``); ``None`` by default.
    - ``levels``: of nf4, ``"fitted"`` to the tensor (the default), or ``"nf4"``, QLoRA's.
    - ``outliers``: the share of elements to keep exactly, 0 to 0.05; 0 by default.
    - ``hessian`` [length, length], ``input_axes``, ``damping``: for
      :func:`~capibara.compress.calibration.gptq.gptq`, in encoding only. Groups run along the input axis then.
    - ``executor``: ``"native"`` (compiled code), ``"numpy"``, ``"torch"`` or ``"jax"``, the engine of the search; the
      bytes are the same. By default that of :func:`~capibara.compress.codecs.engine.use_engine`; on the CPU compiled
      code, or NumPy if it was not built.

    Args:
      kind: what codes mean.
    """

    keeps_strange = True  # NaN and infinities stay as they are, beside the codes

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def candidates(self, form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        """Useful settings, from the largest payload to the smallest."""
        if not form.is_float or math.prod(shape) < _SHORTEST:
            return []
        return [{"group": g} for g in ((32, 64, 128) if self.kind.bits == 8 else (16, 32, 64, 128))]

    def encode_into(
        self,
        out: np.ndarray,
        bits: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> int:
        """As :meth:`encode`, into a buffer of :meth:`size_bound` bytes; returns the number of bytes used.

        Raises:
          CompressError: an unknown setting, integers, or more than a sixteenth of the values are NaN or infinite.
        """
        chosen = choices(self.kind, settings, shape)
        exact_bits = np.asarray(bits).reshape(-1)
        to_float(exact_bits[:0], form)  # refuses integers, also where there are none
        length = _row_length(shape, chosen.turned)
        if chosen.turned and exact_bits.size:
            exact_bits = np.ascontiguousarray(exact_bits.reshape(length, -1).T).reshape(-1)
        odd = find_outliers(exact_bits, form, chosen.outliers, chosen.group)
        rounded = exact_bits
        if odd.size:
            rounded = rounded.copy()
            rounded[odd] = 0
        rows = rounded.reshape(-1, length) if length else rounded.reshape(0, 1)
        exact = b""
        if odd.size:
            steps = np.diff(odd, prepend=0).astype("<u4")
            where = lossless.encode(steps, get_format("U32"), (odd.size,))
            exact = struct.pack("<II", odd.size, len(where)) + where + exact_bits[odd].tobytes()
        # Codes come to be behind the most that may stand before them, and move down when that is known.
        across = -(-rows.shape[1] // min(chosen.group, rows.shape[1]))
        begin = (
            _HEAD.size
            + _BOOK_SIZE
            + len(exact)
            + 4
            + lossless.size_bound(get_format("U8"), len(rows) * across)
        )
        room = out[begin : begin + rows.size].view(np.int8)
        scales, codes, book, top, resolution = self._quantise(rows, form, chosen, room)
        flags = _CODED * chosen.coded + _TURNED * chosen.turned + _BOOK * (book is not None)
        parts = [_HEAD.pack(flags + _OUTLIERS * bool(odd.size), resolution, chosen.group, top)]
        if book is not None:
            parts.append(book.astype("<i2").tobytes())
        packed = lossless.encode(scales.reshape(-1), get_format("U8"), scales.shape)
        parts += [exact, struct.pack("<I", len(packed)), packed]
        first = b"".join(parts)
        end = store_codes(out, len(first), codes, self.kind, chosen.coded)
        out.data[: len(first)] = first
        return end

    def _quantise(
        self, rows: np.ndarray, form: NumberFormat, chosen: Choices, room: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, float, int]:
        """Of bits [rows, length]: scales uint8 [rows, groups], codes int8 [rows, length], levels, top and resolution.

        Codes lie in ``room``, int8 [rows · length], unless groups are filled up or there is a hessian. Floats are made
        of a block at a time: there is no room for those of a whole tensor.
        """
        kind, executor = self.kind, get_executor(chosen.executor)
        book = NF4 if kind.name == "nf4" else None
        if not rows.size:
            return np.empty((0, 1), np.uint8), np.empty((0, 1), np.int8), book, 1.0, RESOLUTIONS[0]
        groups = as_groups(rows, chosen.group)
        step = max(BLOCK // max(groups.shape[1], 1), 1)
        starts = range(0, len(groups), step)
        native = executor if isinstance(executor, NativeExecutor) else None
        # Compiled code takes float32 as it is.
        numbers = floats if native is None else to_float

        def largest(first: int) -> np.ndarray:
            block = numbers(groups[first : first + step], form)
            return np.abs(block).max(1, initial=0) if native is None else native.largest(block)

        several = executor.name in ("native", "numpy") and len(starts) > 1
        largest_of = np.concatenate(_each(largest, starts, several))
        top, resolution, last = scale_range(kind, largest_of / kind.largest, chosen.step)
        if book is not None and chosen.fitted:
            some = floats(groups[:: max(len(groups) >> 11, 1)], form)
            book = fit_levels(executor, kind, book, some, top, resolution)
        if chosen.hessian is not None:
            from capibara.compress.calibration.gptq import gptq

            def scale(block: np.ndarray) -> np.ndarray:
                return search(executor, kind, book, block, top, resolution, last)[0]

            table = np.float64(np.float32(top)) * multipliers(resolution)
            scales, codes = gptq(
                floats(rows, form),
                chosen.hessian,
                kind,
                book,
                chosen.group,
                scale,
                table,
                damping=chosen.damping,
            )
            return scales, codes, book, top, resolution
        scales = np.empty(len(groups), np.uint8)
        codes = room.reshape(groups.shape) if groups.size == rows.size else np.empty(groups.shape, np.int8)

        def work(first: int) -> None:
            block = numbers(groups[first : first + step], form)
            found = search(executor, kind, book, block, top, resolution, last)
            scales[first : first + step], codes[first : first + step] = found

        _each(work, starts, several)
        count = -(-rows.shape[1] // groups.shape[1])
        codes = codes.reshape(len(rows), -1)[:, : rows.shape[1]]
        return scales.reshape(len(rows), count), codes, book, top, resolution

    def layout(self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...]) -> Layout:
        """The form of a tensor's codes and scales: of a payload, or of its first :data:`HEAD_BYTES`.

        Raises:
          DamagedError: they are not what :meth:`encode` writes.
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
            raise DamagedError("a tensor's groups or scales are invalid: the file is damaged")
        turned, count, exact = bool(flags & _TURNED), math.prod(shape), 0
        if flags & _OUTLIERS:
            cursor.take(_BOOK_SIZE * nf4)
            (exact,) = struct.unpack("<I", cursor.take(4))
            if not 0 < exact <= count:
                raise DamagedError("more numbers are kept exactly than there are: the file is damaged")
        length = _row_length(shape, turned)
        rows, groups = (count // length, -(-length // group)) if length else (0, 0)
        width = length if self.kind.bits == 8 else -(-length // 2)
        return Layout(self.kind.name, shape, rows, length, group, turned, width, groups, exact)

    def parts(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> Parts:
        """The tensor in its stored form: codes and scales.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes.
        """
        layout, cursor = self.layout(payload, form, shape), Cursor(payload)
        flags, resolution, _, top = _HEAD.unpack(cursor.take(_HEAD.size))
        levels = None
        if self.kind.name == "nf4":
            levels = np.frombuffer(cursor.take(_BOOK_SIZE), "<i2").astype(np.float32)
        elif self.kind.bits == 4:
            levels = np.arange(-8, 8, dtype=np.float32)
        rows, length = layout.rows, layout.length
        positions, exact = np.empty(0, np.int64), np.empty(0, form.unsigned)
        if layout.exact:
            _, size = struct.unpack("<II", cursor.take(8))
            steps = lossless.decode(cursor.take(size), get_format("U32"), (layout.exact,))
            positions = np.cumsum(steps.astype(np.int64))
            if int(positions[-1]) >= math.prod(shape):
                raise DamagedError("an exact value has an invalid position: the file is damaged")
            exact = np.frombuffer(cursor.take(layout.exact * form.bits // 8), form.unsigned)
        (size,) = struct.unpack("<I", cursor.take(4))
        scales = lossless.decode(cursor.take(size), get_format("U8"), (rows, layout.groups))
        codes = load_codes(cursor.rest(), self.kind, bool(flags & _CODED), rows, length)
        with np.errstate(over="ignore", under="ignore"):
            table = np.float32(top) * multipliers(resolution)
        return Parts(
            self.kind.name, shape, length, layout.group, layout.turned, codes,
            scales.reshape(rows, layout.groups), np.concatenate([table, -table]), levels, positions, exact,
        )  # fmt: skip

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an existing array [count]."""
        parts = self.parts(payload, form, shape, settings)
        if not out.size:
            return
        length, group = parts.length, parts.group
        # As rows and columns of groups, however the tensor lies.
        rows = out.reshape(length, -1).T if parts.turned else out.reshape(-1, length)
        # Only finite numbers were rounded: what rounding took past the largest one comes back as that.
        top = np.float32(min(largest(form), float(np.finfo(np.float32).max)))
        executor = get_executor(default_executor())
        if isinstance(executor, NativeExecutor):
            width = min(BLOCK, length)
            step = max(BLOCK // width, 1)
            for column in range(0, length, width):
                columns = slice(column, min(column + width, length))
                for first in range(0, len(rows), step):
                    block = slice(first, first + step)
                    values = executor.decode(
                        parts.codes, parts.scales, parts.levels, group, length, block, columns, top
                    )
                    wide = values.astype(np.float64) if form.bits == 64 else values
                    rows[block, columns] = from_float(wide, form).reshape(values.shape)
            rows[np.divmod(parts.positions, length)] = parts.exact
            return
        # Blocks of whole groups, of an even number of codes.
        width = min(max(BLOCK // (2 * group), 1) * 2 * group, length)
        step = max(BLOCK // width, 1)
        codes_of = 1 if parts.levels is None else 2
        for column in range(0, length, width):
            last = min(column + width, length)
            codes = parts.codes[:, column // codes_of : -(-last // codes_of)]
            scales = parts.scales[:, column // group : -(-last // group)]
            for first in range(0, len(rows), step):
                block = slice(first, first + step)
                with np.errstate(over="ignore", under="ignore"):
                    values = _dequantise(codes[block], scales[block], parts.levels, group, last - column)
                    values = np.clip(values, -top, top)
                    wide = values.astype(np.float64) if form.bits == 64 else values
                    rows[block, column:last] = from_float(wide, form).reshape(values.shape)
        rows[np.divmod(parts.positions, length)] = parts.exact

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        return count <= 2 * size or lossless.LOSSLESS.may_hold(size, get_format("U8"), count)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        """At worst one byte per code and one per scale, and a sixteenth of the values kept exactly."""
        kept = count // 16 + 1
        return _HEAD.size + 32 + 8 + (1 + 4 * kept) + kept * form.bits // 8 + 4 + 2 * (1 + count)

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Relative errors of single values are not bounded: one below half a scale becomes 0."""
        return None


def _each(work: Callable[[int], Any], starts: Sequence[int], several: bool) -> list[Any]:
    """``work`` of each of ``starts``, on several threads or on this one."""
    if not several:
        return [work(first) for first in starts]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        return list(pool.map(work, starts))


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


def _dequantise(
    codes: np.ndarray, scales: np.ndarray, levels: np.ndarray | None, group: int, length: int
) -> np.ndarray:
    if levels is None:
        values = codes.astype(np.float32)
    else:
        values = levels[np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)[:, :length]]
    return values * np.repeat(scales, group, 1)[:, :length]


INT8, INT4, NF4_CODEC = (Fixed(KINDS[name]) for name in ("int8", "int4", "nf4"))
