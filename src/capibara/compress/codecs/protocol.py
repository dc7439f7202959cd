"""What a codec is, and the list of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from capibara.compress.codecs import exponent, fixed, lossless, low_rank, sparse, uniform, zeros
from capibara.compress.codecs.matrices import get_axes
from capibara.compress.errors import ArchiveError
from capibara.compress.formats import NumberFormat

__all__ = ["CALIBRATION", "CODECS", "Codec", "get_codec", "settings_of_rows", "stored_settings"]


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
    "exponent": exponent.EXPONENT,
    "int8": fixed.INT8,
    "int4": fixed.INT4,
    "nf4": fixed.NF4_CODEC,
    "low_rank": low_rank.LOW_RANK,
    "sparse": sparse.SPARSE,
    "zeros": zeros.ZEROS,
}

# Settings that say something of a layer's inputs: for the encoder alone, and too large for an index.
CALIBRATION = ("hessian", "input_axes")


def stored_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What an archive keeps of a codec's settings: all but :data:`CALIBRATION`."""
    return {name: value for name, value in settings.items() if name not in CALIBRATION}


def settings_of_rows(
    settings: Mapping[str, Any], shape: tuple[int, ...], start: int, stop: int
) -> Mapping[str, Any]:
    """The settings for some rows of a tensor along its first axis.

    Where a layer's inputs run along that axis, only the block of ``hessian`` that belongs to these rows remains: what
    they have to do with inputs of other rows is left out.
    """
    second = settings.get("hessian")
    if second is None or not shape or stop - start == shape[0]:
        return settings
    axes = get_axes(settings, shape)
    if 0 not in axes:
        return settings
    second = np.asarray(second)
    inner = max(len(second) // shape[0], 1)
    block = slice(start * inner, stop * inner)
    return {**settings, "hessian": second[block, block]}


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
