"""The split of a value into a symbol, which is entropy-coded, and the rest, which is packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Cut"]


@dataclass(frozen=True)
class Cut:
    """The lowest ``shift`` bits are in the rest, the ``symbol`` bits above them are the symbol.

    Attributes:
      shift: bits below the symbol.
      symbol: bits of the symbol, at most 14.
      sign: the topmost bit is a sign and belongs to the rest.
      base: the smallest value, which is subtracted from all before splitting; 0 with a sign.
      alternating: values are numbered 0, -1, 1, -2, 2 …

    Its methods take arrays of unsigned integers, NumPy's or JAX's.
    """

    shift: int
    symbol: int
    sign: bool
    base: int = 0
    alternating: bool = False

    def symbols(self, bits: Any) -> Any:
        return (bits >> bits.dtype.type(self.shift)) & bits.dtype.type((1 << self.symbol) - 1)

    def rest(self, bits: Any, drop: int) -> Any:
        """The lowest bits without the last ``drop``, and above them the sign."""
        kind = bits.dtype.type
        low = (bits & kind((1 << self.shift) - 1)) >> kind(drop)
        if self.sign:
            low |= (bits >> kind(bits.itemsize * 8 - 1)) << kind(self.shift - drop)
        return low

    def width(self, drop: int) -> int:
        """Bits of the rest."""
        return self.shift - drop + self.sign

    def join(self, symbols: Any, rest: Any, drop: int) -> Any:
        """The inverse of the split."""
        kind = rest.dtype.type
        low = self.shift - drop
        out = (rest & kind((1 << low) - 1)) << kind(drop)
        out |= symbols.astype(rest.dtype) << kind(self.shift)
        if self.sign:
            out |= (rest >> kind(low)) << kind(rest.itemsize * 8 - 1)
        return out

    def restore(self, numbers: Any) -> Any:
        """Convert the result of :meth:`join` to the tensor's own values."""
        kind = numbers.dtype.type
        if self.alternating:
            return (numbers >> kind(1)) ^ (~(numbers & kind(1)) + kind(1))
        return numbers + kind(self.base & int(np.iinfo(numbers.dtype).max))
