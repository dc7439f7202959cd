"""Default allocating wrappers for in-place codecs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compress.errors import DamagedError
from capibara.compress.formats import NumberFormat

__all__ = ["DecodesInPlace", "InPlace"]


class DecodesInPlace:
    """A codec with ``decode_into`` and ``may_hold`` gets ``decode``."""

    def may_hold(self, size: int, form: NumberFormat, count: int) -> bool:
        """Whether ``size`` payload bytes can hold ``count`` elements; checked before decoding."""
        raise NotImplementedError

    def decode_into(
        self,
        out: np.ndarray,
        payload: memoryview,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> None:
        """As :meth:`decode`, into an existing array [count]."""
        raise NotImplementedError

    def check_count(self, size: int, form: NumberFormat, count: int) -> None:
        """Check that ``size`` bytes can hold ``count`` elements, before allocating memory for them.

        Raises:
          DamagedError: they cannot.
        """
        if not self.may_hold(size, form, count):
            raise DamagedError(f"{size} bytes cannot hold {count} numbers: the file is damaged")

    def decode(
        self, payload: memoryview, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> np.ndarray:
        """Decode a payload to unsigned integers [count].

        Raises:
          DamagedError: the payload is not what :meth:`encode` writes for this type and shape.
        """
        self.check_count(len(payload), form, math.prod(shape))
        out = np.empty(math.prod(shape), form.unsigned)
        self.decode_into(out, payload, form, shape, settings)
        return out


class InPlace(DecodesInPlace):
    """A codec with ``encode_into`` and ``size_bound`` as well gets ``encode``."""

    def size_bound(self, form: NumberFormat, count: int, settings: Mapping[str, Any]) -> int:
        """The maximum number of bytes of a payload of ``count`` elements."""
        raise NotImplementedError

    def encode_into(
        self,
        out: np.ndarray,
        bits: np.ndarray,
        form: NumberFormat,
        shape: tuple[int, ...],
        settings: Mapping[str, Any],
    ) -> int:
        """As :meth:`encode`, into a buffer of :meth:`size_bound` bytes; returns the number of bytes used."""
        raise NotImplementedError

    def encode(
        self, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], settings: Mapping[str, Any]
    ) -> bytes:
        """Encode unsigned integers [count].

        Raises:
          CompressError: unknown settings, or values that the codec does not support.
        """
        out = np.empty(self.size_bound(form, math.prod(shape), settings), np.uint8)
        return out[: self.encode_into(out, bits, form, shape, settings)].tobytes()
