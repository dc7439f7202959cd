"""Lossless for tensors with many zeros: a bitmap of zeros, their signs, and the other values.

The codec ``lossless`` packs a sign and a fraction for every element, so a zero takes several bits. Here a zero only
takes one entry in an entropy-coded bitmap, about the entropy of the share of zeros. A product with a mask gives zeros
of both signs: if there are negative ones, a second bitmap has one bit for the sign of each zero.

A payload is made of parts (:mod:`capibara.compress.codecs.nested`): the bitmap of the nonzero elements, the signs of
the zeros, and the nonzero values, each a payload of ``lossless``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.nested import Part, check_size, join, may_hold, room_for_head, split
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, get_format

__all__ = ["ZEROS", "Zeros", "exact_codec"]

_SAMPLE, _RUNS = 1 << 17, 8  # elements that are looked at, and in how many places
_SHARE, _GAIN = 0.125, 0.97


class Zeros:
    """The codec ``"zeros"``; it has no settings."""

    chunk = 1 << 22

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: a setting is given, or the payload would be too small to be read back (elements per byte are
            limited).
        """
        if settings:
            raise CompressError(f"{next(iter(settings))}: not a setting of zeros, which has none")
        flat = np.ascontiguousarray(bits, form.unsigned).reshape(-1)
        kept = _magnitudes(flat, form) != 0
        parts = [_part(np.packbits(kept, bitorder="little"), get_format("U8"))]
        signs = flat[~kept] != 0
        parts.append(
            _part(np.packbits(signs[: len(signs) * int(signs.any())], bitorder="little"), get_format("U8"))
        )
        parts.append(_part(flat[kept], form))
        payload = join({}, parts)
        check_size(len(payload), flat.size, CompressError)
        return payload

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        """The bits of the tensor, [count] of ``form.unsigned``.

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        count = math.prod(shape)
        check_size(len(payload), count)
        bitmap, signs, numbers = split(payload, 3, count + 2 * -(-count // 8))[1]
        bytes_of = lambda n: (-(-n // 8),)  # noqa: E731
        forms = [bitmap.form.name, signs.form.name, numbers.form.name]
        if forms != ["U8", "U8", form.name] or bitmap.shape != bytes_of(count):
            raise DamagedError("a tensor's bitmap of zeros does not fit its shape: the file is damaged")
        kept = _unpacked(bitmap, count)
        left = count - int(np.count_nonzero(kept))
        if numbers.shape != (count - left,) or signs.shape not in ((0,), bytes_of(left)):
            raise DamagedError("a tensor's bitmap of zeros does not fit its numbers: the file is damaged")
        out = np.zeros(count, form.unsigned)
        out[kept] = numbers.bits()
        if left and signs.shape != (0,):
            negative = _sign(form)
            if not negative:
                raise DamagedError("zeros of a type without signs have some: the file is damaged")
            out[~kept] = _unpacked(signs, left).astype(form.unsigned) * form.unsigned.type(negative)
        return out

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        return may_hold(size, count)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        return lossless.size_bound(form, count) + 2 * (2 + count // 8) + room_for_head()

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        return 0.0

    def candidates(self, form: NumberFormat, shape: tuple[int, ...]) -> list[dict[str, Any]]:
        """Useful lossy settings: none."""
        return []


ZEROS = Zeros()


def exact_codec(bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]) -> str:
    """``"zeros"`` if a tensor has enough zeros for it to be smaller, otherwise ``"lossless"``; judged by some rows.

    Args:
      bits: in one dimension, of which slices are taken.
      form, shape: of the tensor.
    """
    flat = bits.reshape(-1)
    if flat.size < 4096:
        return "lossless"
    # Runs of rows from all over: of a file no more is read.
    row = lossless.row_length(shape)
    row = row if row <= _SAMPLE // _RUNS else 1
    each = max(_SAMPLE // _RUNS // row, 1) * row
    starts = [0] if flat.size <= _SAMPLE else [flat.size // row * k // _RUNS * row for k in range(_RUNS)]
    end = flat.size if len(starts) == 1 else each
    some = np.concatenate([np.asarray(flat[start : start + end]) for start in starts])
    some = np.ascontiguousarray(some, form.unsigned).reshape(-1, row if row > 1 else len(some))
    if not 0 < np.count_nonzero(_magnitudes(some, form)) <= (1 - _SHARE) * some.size:
        return "lossless"
    sizes = [len(c.encode(some.reshape(-1), form, some.shape, {})) for c in (ZEROS, lossless.LOSSLESS)]
    return "zeros" if sizes[0] < _GAIN * sizes[1] else "lossless"


def _sign(form: NumberFormat) -> int:
    return 1 << (form.bits - 1) if form.is_float and form.signed else 0


def _magnitudes(flat: np.ndarray, form: NumberFormat) -> np.ndarray:
    return flat & flat.dtype.type(((1 << form.bits) - 1) ^ _sign(form))


def _part(values: np.ndarray, form: NumberFormat) -> Part:
    return Part("lossless", form, values.shape, {}, lossless.encode(values, form, values.shape, threads=1))


def _unpacked(part: Part, count: int) -> np.ndarray:
    """Flags of a bitmap as bool [count]."""
    packed = part.bits()
    if count % 8 and packed[-1] >> (count % 8):
        raise DamagedError("a bitmap is longer than it states: the file is damaged")
    return np.unpackbits(packed, count=count, bitorder="little").view(bool)
