"""Number formats by the names that safetensors files give them, and their fields of bits.

A codec sees a tensor as unsigned integers of the same width: so bfloat16 and the eight-bit floats need no package
that knows them, and NaN payloads and the sign of zero are bits like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean

__all__ = ["FORMATS", "NumberFormat", "get_format"]


@dataclass(frozen=True)
class NumberFormat:
    """How numbers lie in bits.

    Attributes:
      name: as in a safetensors header: ``"F32"``, ``"BF16"`` …
      bits: of one number: 8, 16, 32 or 64.
      exponent: bits of the exponent; 0 for integers.
      mantissa: bits of the fraction; 0 for integers. The rest, one bit or none, is the sign.
      signed: an integer with a sign; floats have theirs in the topmost bit.
      numpy: NumPy's own name of the type, ``None`` where it has none.
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

    @property
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
      CompressError: there is none.
    """
    if (found := FORMATS.get(name)) is None:
        raise CompressError(
            f"dtype: got {name!r}, expected one of {', '.join(FORMATS)}.{did_you_mean(str(name), FORMATS)} "
            "Remedy: convert the tensor first."
        )
    return found
