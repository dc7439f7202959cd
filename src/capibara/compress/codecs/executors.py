"""Who does the arithmetic of the lossless codec. All of them come to the same bytes.

What is chosen (where numbers are cut, which rows go together) is decided from whole numbers in one place,
:mod:`capibara.compress.codecs.lossless`; an executor only counts, cuts, codes, and undoes that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from capibara.compress.codecs.cut import Cut
from capibara.compress.entropy import Stream, pack_bits, rans, unpack_bits
from capibara.compress.errors import DamagedError

__all__ = ["Executor", "NumpyExecutor"]


class Executor(Protocol):
    """The steps of the lossless codec. ``rows`` is [count, length] of unsigned integers, in C order."""

    name: str

    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        """For each row: the sum of its symbols without their last ``coarse`` bits, int64; its numbers or-ed, uint64."""
        ...

    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        """How often each symbol occurs in the rows of each kind: int64 [count, 2 ** cut.symbol]."""
        ...

    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        """Of chosen rows: each symbol's entry (uint8), the packed rest, and the symbols whose entry is ``escape``."""
        ...

    def join(
        self,
        out: np.ndarray,
        chosen: np.ndarray,
        cut: Cut,
        drop: int,
        values: np.ndarray,
        symbols: np.ndarray,
        rest: np.ndarray,
        escaped: np.ndarray,
    ) -> None:
        """The reverse, into rows of ``out``; ``values``: each entry's symbol, the entry after them being the escape."""
        ...

    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        """As :func:`capibara.compress.entropy.rans.encode`."""
        ...

    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        """As :func:`capibara.compress.entropy.rans.decode`."""
        ...


class NumpyExecutor:
    """With NumPy alone: for where nothing was compiled, and to compare the others with."""

    name = "numpy"

    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        sums = (cut.symbols(rows) >> rows.dtype.type(coarse)).sum(1, dtype=np.int64)
        return sums, np.bitwise_or.reduce(rows, axis=1).astype(np.uint64)

    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        size = 1 << cut.symbol
        where = cut.symbols(rows).astype(np.int64) + (kinds.astype(np.int64) * size)[:, None]
        return np.bincount(where.ravel(), minlength=count * size).reshape(count, size)

    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        numbers = rows[chosen].ravel()
        symbols = cut.symbols(numbers)
        coded = entry[symbols]
        return (
            coded,
            pack_bits(cut.rest(numbers, drop), cut.width(drop)),
            symbols[coded == escape].astype(np.uint16),
        )

    def join(
        self,
        out: np.ndarray,
        chosen: np.ndarray,
        cut: Cut,
        drop: int,
        values: np.ndarray,
        symbols: np.ndarray,
        rest: np.ndarray,
        escaped: np.ndarray,
    ) -> None:
        found = np.append(values, 0).astype(out.dtype)[symbols]
        odd = np.flatnonzero(symbols == len(values))
        if len(odd) != len(escaped):
            raise DamagedError(
                "a block holds another number of escapes than its header says: the file is damaged"
            )
        found[odd] = escaped
        low = unpack_bits(rest, len(symbols), cut.width(drop), out.dtype)
        numbers = cut.join(found, low, drop) + out.dtype.type(cut.base & int(np.iinfo(out.dtype).max))
        out[chosen] = numbers.reshape(len(chosen), -1)

    encode = staticmethod(rans.encode)
    decode = staticmethod(rans.decode)
