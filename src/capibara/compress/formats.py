"""Number formats by their safetensors names, and their bit fields.

A codec sees a tensor as unsigned integers of the same width: so bfloat16 and the eight-bit floats need no package
that supports them, and NaN payloads and the sign of zero are bits like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean

__all__ = ["FORMATS", "NumberFormat", "from_float", "get_format", "largest", "to_float"]


@dataclass(frozen=True)
class NumberFormat:
    """The bit layout of a number format.

    Attributes:
      name: as in a safetensors header: ``"F32"``, ``"BF16"`` …
      bits: per element: 8, 16, 32 or 64.
      exponent: bits of the exponent; 0 for integers.
      mantissa: bits of the fraction; 0 for integers. The remaining bit, if any, is the sign.
      signed: whether an integer has a sign; floats have theirs in the top bit.
      numpy: NumPy's name of the type; ``None`` if it has none.
    """

    name: str
    bits: int
    exponent: int = 0
    mantissa: int = 0
    signed: bool = True
    numpy: str | None = None

    @property
    def is_float(self) -> bool:
        return self.exponent > 0

    @cached_property
    def unsigned(self) -> np.dtype:
        """The little-endian unsigned integer of this width."""
        return np.dtype(f"<u{self.bits // 8}")


FORMATS = {
    f.name: f
    for f in (
        NumberFormat("F64", 64, 11, 52, numpy="float64"),
        NumberFormat("F32", 32, 8, 23, numpy="float32"),
        NumberFormat("F16", 16, 5, 10, numpy="float16"),
        NumberFormat("BF16", 16, 8, 7),
        NumberFormat("F8_E4M3", 8, 4, 3),
        NumberFormat("F8_E5M2", 8, 5, 2),
        NumberFormat("I64", 64, numpy="int64"),
        NumberFormat("I32", 32, numpy="int32"),
        NumberFormat("I16", 16, numpy="int16"),
        NumberFormat("I8", 8, numpy="int8"),
        NumberFormat("U64", 64, signed=False, numpy="uint64"),
        NumberFormat("U32", 32, signed=False, numpy="uint32"),
        NumberFormat("U16", 16, signed=False, numpy="uint16"),
        NumberFormat("U8", 8, signed=False, numpy="uint8"),
        NumberFormat("BOOL", 8, signed=False, numpy="bool"),
    )
}


def get_format(name: str) -> NumberFormat:
    """The format of that name.

    Raises:
      CompressError: the name is unknown.
    """
    if (found := FORMATS.get(name)) is None:
        raise CompressError(
            f"dtype: got {name!r}, expected one of {', '.join(FORMATS)}.{did_you_mean(str(name), FORMATS)} "
            "Remedy: convert the tensor first."
        )
    return found


def to_float(bits: np.ndarray, form: NumberFormat) -> np.ndarray:
    """The values of the bits: float64 for F64, otherwise float32, which represents all of them exactly.

    Raises:
      CompressError: the format is an integer format.
    """
    if not form.is_float:
        raise CompressError(
            f"dtype: got {form.name}, expected numbers with a fraction. Remedy: codec='lossless'."
        )
    if form.numpy is not None:
        values = bits.view(form.numpy)
        return values if form.bits == 64 else values.astype(np.float32)
    if form.name == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return _small_floats(form)[bits]


def from_float(values: np.ndarray, form: NumberFormat) -> np.ndarray:
    """The bits of the nearest values in a float format, rounding ties to even."""
    if form.numpy is not None:
        with np.errstate(over="ignore"):
            return values.astype(form.numpy).view(form.unsigned)
    if form.name == "BF16":
        wide = values.astype(np.float32).view(np.uint32)
        rounded = wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))
        nan = np.isnan(values)
        return np.where(nan, (wide >> np.uint32(16)) | np.uint32(0x40), rounded >> np.uint32(16)).astype(
            np.uint16
        )
    table = _small_floats(form)
    finite = np.flatnonzero(np.isfinite(table[:128]))
    positive = table[finite].astype(np.float64)
    # Halfway points: above one the next number is nearer; at one, the number with an even last bit.
    edges = (positive[1:] + positive[:-1]) / 2
    size = np.abs(np.asarray(values, np.float64))
    index = np.searchsorted(edges, size, side="left")
    tie = (index < len(edges)) & (size == edges[np.minimum(index, len(edges) - 1)])
    index = np.where(tie & (index % 2 == 1), index + 1, index)
    out = finite[index].astype(np.uint8)
    out = np.where(np.isnan(values), np.flatnonzero(np.isnan(table[:128]))[0], out)
    return (out | (np.signbit(values).astype(np.uint8) << np.uint8(7))).astype(np.uint8)


@cache
def largest(form: NumberFormat) -> float:
    """The largest finite value of a float format."""
    if form.bits == 8:
        table = _small_floats(form)
        return float(table[np.isfinite(table)].max())
    bias = (1 << (form.exponent - 1)) - 1
    return (2 - 2.0**-form.mantissa) * 2.0**bias


@cache
def _small_floats(form: NumberFormat) -> np.ndarray:
    """All 256 numbers of an eight-bit format."""
    codes = np.arange(256)
    exponent = (codes >> form.mantissa) & ((1 << form.exponent) - 1)
    fraction = (codes & ((1 << form.mantissa) - 1)) / (1 << form.mantissa)
    bias = (1 << (form.exponent - 1)) - 1
    size = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    last = (1 << form.exponent) - 1
    if form.name == "F8_E4M3":  # no infinity; one NaN of each sign
        size = np.where(codes & 127 == 127, np.nan, size)
    else:
        size = np.where(exponent == last, np.where(fraction == 0, np.inf, np.nan), size)
    return np.where(codes >> 7, -size, size).astype(np.float32)
