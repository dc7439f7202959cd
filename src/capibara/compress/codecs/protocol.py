"""What a codec is, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from capibara.compress.codecs import fixed, lossless, uniform
from capibara.compress.errors import ArchiveError
from capibara.compress.formats import NumberFormat

__all__ = ["CODECS", "Codec", "get_codec"]


class Codec(Protocol):
    """A way to store the numbers of a tensor; a module of :mod:`capibara.compress.codecs` each."""

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """The payload of numbers that are given as unsigned integers [count]."""
        ...

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        """The numbers again, as unsigned integers [count], exactly or nearly."""
        ...

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        """The most bytes that a payload of ``count`` numbers takes."""
        ...

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """The largest relative error of a number; 0 where decoding is exact, ``None`` where it is not bounded."""
        ...


CODECS: dict[str, Codec] = {
    "lossless": lossless.LOSSLESS,
    "uniform": uniform.UNIFORM,
    "int8": fixed.INT8,
    "int4": fixed.INT4,
    "nf4": fixed.NF4_CODEC,
}


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
      ArchiveError: there is none here.
    """
    if (found := CODECS.get(name)) is None:
        raise ArchiveError(
            f"codec: {name!r} is not known here ({', '.join(CODECS)} are). Remedy: read the file with a newer Capibara."
        )
    return found
