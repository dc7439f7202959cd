"""The interface of codecs, and their list."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from capibara.compress.calibration.activations import stack_of
from capibara.compress.codecs import exponent, fixed, lossless, low_rank, sparse, uniform, zeros
from capibara.compress.codecs.matrices import get_axes
from capibara.compress.errors import ArchiveError, CompressError
from capibara.compress.formats import NumberFormat

__all__ = ["CALIBRATION", "CODECS", "Codec", "get_codec", "settings_of_rows", "stored_settings"]


class Codec(Protocol):
    """A way to store the elements of a tensor; each is a module of :mod:`capibara.compress.codecs`."""

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """Encode unsigned integers [count]."""
        ...

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        """Decode to unsigned integers [count], exactly or approximately."""
        ...

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        """The maximum number of bytes of a payload of ``count`` elements."""
        ...

    def error_bound(self, settings: Mapping[str, Any]) -> float | None:
        """The largest relative error of an element; 0 if decoding is exact, ``None`` if it is not bounded."""
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
    """The settings of a codec that an archive stores: all but :data:`CALIBRATION`."""
    return {name: value for name, value in settings.items() if name not in CALIBRATION}


def settings_of_rows(
    settings: Mapping[str, Any], shape: tuple[int, ...], start: int, stop: int
) -> Mapping[str, Any]:
    """The settings for some rows of a tensor along its first axis.

    If a layer's inputs run along that axis, only the block of ``hessian`` for these rows is used; correlations with
    other rows are ignored. For a stack, the moments of these entries.

    Raises:
      CompressError: the number of entries with moments is not that of the tensor.
    """
    second = settings.get("hessian")
    if (stack := stack_of(second)) is not None:
        if not shape or len(stack) != shape[0] or 0 in get_axes(settings, shape):
            raise CompressError(
                f"hessian: got those of {len(stack)} entries for the shape {shape} with input_axes "
                f"{settings.get('input_axes')!r}, expected one for each index of the first axis, inputs along others"
            )
        return {**settings, "hessian": stack[start:stop]}
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
      ArchiveError: this release has no such codec.
    """
    if (found := CODECS.get(name)) is None:
        raise ArchiveError(
            f"codec: {name!r} is not known here ({', '.join(CODECS)} are). Remedy: read the file with a newer Capibara."
        )
    return found
