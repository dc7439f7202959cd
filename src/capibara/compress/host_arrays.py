"""The lossless codec for arrays in memory: what :class:`capibara.memory.DeviceCache` keeps on the host."""

from __future__ import annotations

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.formats import FORMATS, NumberFormat

__all__ = ["LosslessArrays"]

_BY_NUMPY = {form.numpy: form for form in FORMATS.values() if form.numpy} | {
    "bfloat16": FORMATS["BF16"],
    "float8_e4m3fn": FORMATS["F8_E4M3"],
    "float8_e5m2": FORMATS["F8_E5M2"],
    # A complex number is two floats, side by side.
    "complex64": FORMATS["F32"],
    "complex128": FORMATS["F64"],
}


class LosslessArrays:
    """Encodes arrays of any dtype with :mod:`capibara.compress.codecs.lossless`, and returns the same bits.

    Dtypes that the codec has no format for (other 8-bit floats, 4-bit integers) are coded as bytes. Trained weights in
    bfloat16 shrink to about two thirds, random bits by nothing; an array takes at most one byte more than it has.
    """

    def encode(self, array: np.ndarray) -> bytes:
        """The payload of a C-contiguous array."""
        form, shape = _form(array.dtype, array.shape)
        bits = array.reshape(-1).view(form.unsigned)
        return lossless.encode(bits, form, shape)

    def decode(self, data: bytes, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """The array again.

        Raises:
          DamagedError: the payload is not one of an array of this dtype and shape.
        """
        form, coded = _form(dtype, shape)
        return lossless.decode(data, form, coded).view(dtype).reshape(shape)


def _form(dtype: np.dtype, shape: tuple[int, ...]) -> tuple[NumberFormat, tuple[int, ...]]:
    """The format, and the shape in elements of it."""
    form = _BY_NUMPY.get(dtype.name, FORMATS["U8"])
    factor = dtype.itemsize * 8 // form.bits
    if factor == 1:
        return form, shape
    return form, (*shape[:-1], shape[-1] * factor) if shape else (factor,)
