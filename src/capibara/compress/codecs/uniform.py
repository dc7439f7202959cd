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
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import NumberFormat, from_float, get_format, largest, to_float

__all__ = ["UNIFORM", "Uniform"]

_MEANS = 16
_HEAD = struct.Struct(
    f"<d{_MEANS}bB"
)  # the step, the means' offsets in 1/256 of it, and the bytes of a multiple
_WHOLE = {2: "I16", 4: "I32", 8: "I64"}


class Uniform:
    """The codec ``"uniform"``. Settings: ``step``, a finite number above 0.

    Attributes:
      chunk: numbers of a tensor that an archive codes together; each takes some fifty bytes of memory meanwhile.
    """

    chunk = 1 << 22

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
        values = to_float(bits, form).astype(np.float64)
        if not np.isfinite(values).all():
            raise CompressError("values: NaN or infinite. Remedy: codec='lossless' for this tensor.")
        with np.errstate(over="ignore"):
            multiples = np.rint(values / step)
        top = float(np.abs(multiples).max(initial=0))
        size = 2 if top < 1 << 15 else 4 if top < 1 << 31 else 8
        if not top < 1 << 62:
            raise CompressError(
                f"step: got {step!r}, which is too small for numbers up to {np.abs(values).max()!r}"
            )
        whole = multiples.astype(f"<i{size}")
        magnitude = np.abs(whole).ravel()
        small = magnitude < _MEANS
        offset = np.abs(values.ravel()[small]) / step - magnitude[small]
        # Where nothing fell there is nothing to move; 0 has two sides.
        count = np.maximum(np.bincount(magnitude[small], minlength=_MEANS), 1)
        means = np.bincount(magnitude[small], offset, minlength=_MEANS) / count
        means[0] = 0
        means = np.clip(np.rint(means * 256), -127, 127).astype(int)
        head = _HEAD.pack(step, *means.tolist(), size)
        inner = get_format(_WHOLE[size])
        return head + lossless.encode(whole.view(inner.unsigned).reshape(-1), inner, shape)

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        if len(payload) < _HEAD.size:
            raise DamagedError("a tensor's payload ends too early: the file is damaged")
        step, *means, size = _HEAD.unpack(payload[: _HEAD.size])
        if not 0 < step < math.inf or size not in _WHOLE or not form.is_float:
            raise DamagedError("a tensor's step or type is none: the file is damaged")
        inner = get_format(_WHOLE[size])
        whole = lossless.decode(payload[_HEAD.size :], inner, shape).view(f"<i{size}")
        if whole.size and int(whole.min()) == np.iinfo(whole.dtype).min:
            raise DamagedError("a multiple is out of range: the file is damaged")
        magnitude = np.abs(whole)
        offsets = np.append(np.array(means) / 256, 0.0)[np.minimum(magnitude, _MEANS)]
        with np.errstate(over="ignore"):
            values = np.copysign((magnitude + offsets) * step, whole)
            # Only finite numbers were rounded: what rounding took past the largest one comes back as that.
            values = np.clip(values, -largest(form), largest(form))
            return from_float(values if form.bits == 64 else values.astype(np.float32), form)

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        return _HEAD.size + 1 + 8 * count

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """Relative errors are not bounded: a number below half a step becomes 0. The absolute one is a step."""
        return None


UNIFORM = Uniform()
