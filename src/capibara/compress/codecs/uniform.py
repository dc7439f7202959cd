"""Numbers rounded to multiples of a step, and the multiples entropy-coded: the smallest files at a given error.

At moderate and high rates, uniform steps with an entropy coder come within a quarter of a bit of what any
quantiser of single numbers or of vectors can reach (H. Gish and J. Pierce, "Asymptotically efficient quantizing", IEEE
Trans. Inf. Theory, 1968), whatever the numbers' distribution; a coder that knows how rows differ in scale, as the
lossless one does, keeps that for weights. The least squared error for a number of bits has one step for all numbers
that count alike; a tensor that counts more takes a smaller one.

A decoded number is not the middle of its step but the mean of what fell into it, which lies nearer to zero: that mean
is kept for the sixteen smallest multiples.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.in_place import DecodesInPlace
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest, to_float

__all__ = ["UNIFORM", "Uniform"]

_MEANS = 16
_BLOCK = 1 << 14
_HEAD = struct.Struct(
    f"<d{_MEANS}bB"
)  # the step, the means' offsets in 1/256 of it, and the bytes of a multiple
_WHOLE = {2: "I16", 4: "I32", 8: "I64"}


class Uniform(DecodesInPlace):
    """The codec ``"uniform"``. Settings: ``step``, a finite number above 0.

    Attributes:
      chunk: numbers of a tensor that an archive codes together.
      cuts_rows: a part of a row can be coded as well.
    """

    chunk = 1 << 20
    cuts_rows = True

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload.

        Raises:
          CompressError: no ``step``, integers, or numbers that are not finite.
        """
        step = settings.get("step")
        if (
            not isinstance(step, float | int | np.floating | np.integer)
            or isinstance(step, bool)
            or not 1e-300 < step < 1e300
        ):
            raise CompressError(f"step: got {step!r}, expected a number between 1e-300 and 1e300")
        step = float(step)
        flat, top = bits.reshape(-1), 0.0
        for part in _blocks(flat):
            values = to_float(part, form).astype(np.float64)
            if not np.isfinite(values).all():
                raise CompressError("values: NaN or infinite. Remedy: codec='lossless' for this tensor.")
            with np.errstate(over="ignore"):
                top = max(top, float(np.abs(np.rint(values / step)).max()))
        size = 2 if top < 1 << 15 else 4 if top < 1 << 31 else 8
        if not top < 1 << 62:
            most = max(float(np.abs(to_float(part, form)).max()) for part in _blocks(flat))
            raise CompressError(f"step: got {step!r}, which is too small for numbers up to {most!r}")
        whole = np.empty(flat.size, f"<i{size}")
        counts, offsets = np.zeros(_MEANS, np.int64), np.zeros(_MEANS)
        for part, multiples in zip(_blocks(flat), _blocks(whole), strict=True):
            values = to_float(part, form).astype(np.float64)
            multiples[:] = np.rint(values / step)
            magnitude = np.abs(multiples)
            small = magnitude < _MEANS
            offset = np.abs(values[small]) / step - magnitude[small]
            counts += np.bincount(magnitude[small], minlength=_MEANS)
            offsets += np.bincount(magnitude[small], offset, minlength=_MEANS)
        # Where nothing fell there is nothing to move; 0 has two sides.
        means = offsets / np.maximum(counts, 1)
        means[0] = 0
        means = np.clip(np.rint(means * 256), -127, 127).astype(int)
        head = _HEAD.pack(step, *means.tolist(), size)
        inner = get_format(_WHOLE[size])
        return head + lossless.encode(whole.view(inner.unsigned), inner, shape)

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an array [count] that is there."""
        if len(payload) < _HEAD.size:
            raise DamagedError("a tensor's payload ends too early: the file is damaged")
        step, *means, size = _HEAD.unpack(payload[: _HEAD.size])
        # Of no numbers the type does not matter: what has none of any type is encoded.
        if not 0 < step < math.inf or size not in _WHOLE or not (form.is_float or not out.size):
            raise DamagedError("a tensor's step or type is none: the file is damaged")
        # Multiples that are no longer than the numbers lie where these come to be, at the end: each is read before
        # a number takes its place.
        unused = out.nbytes - out.size * size
        inner = get_format(_WHOLE[size])
        room = np.empty(out.size * size, np.uint8) if unused < 0 else out.view(np.uint8)[unused:]
        lossless.LOSSLESS.decode_into(room.view(inner.unsigned), payload[_HEAD.size :], inner, shape, {})
        whole = room.view(f"<i{size}")
        if whole.size and int(whole.min()) == np.iinfo(whole.dtype).min:
            raise DamagedError("a multiple is out of range: the file is damaged")
        if out.size:
            _restore(out, step, np.append(np.array(means) / 256, 0.0), whole, form)

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether a payload of ``size`` bytes may be ``count`` numbers: what is claimed can be checked beforehand."""
        whole = map(get_format, _WHOLE.values())
        return any(lossless.LOSSLESS.may_hold(size - _HEAD.size, inner, count) for inner in whole)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        return _HEAD.size + 1 + 8 * count

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Relative errors are not bounded: a number below half a step becomes 0. The absolute one is a step."""
        return None


def _blocks(flat: np.ndarray) -> Iterator[np.ndarray]:
    """Pieces of an array: floats are made of a few numbers at a time."""
    for first in range(0, len(flat), _BLOCK):
        yield flat[first : first + _BLOCK]


def _restore(
    out: np.ndarray, step: float, offsets: np.ndarray, whole: np.ndarray, form: NumberFormat
) -> None:
    """Numbers of multiples, from the first on; ``offsets`` [17]: by how many steps they lie off them."""
    most = largest(form)
    for part, multiples in zip(_blocks(out), _blocks(whole), strict=True):
        magnitude = np.abs(multiples)
        with np.errstate(over="ignore"):
            values = np.copysign((magnitude + offsets[np.minimum(magnitude, _MEANS)]) * step, multiples)
            # Only finite numbers were rounded: what rounding took past the largest one comes back as that.
            values = np.clip(values, -most, most)
            part[:] = from_float(values if form.bits == 64 else values.astype(np.float32), form)


UNIFORM = Uniform()
