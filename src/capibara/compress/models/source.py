"""Named tensors, one in memory at a time: the input of allocation and archives, for any source."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from capibara.compress.formats import NumberFormat

__all__ = ["TensorSource", "Tensors", "find_tied", "numbers_of"]

_PART = 1 << 22  # numbers that are compared at a time


class TensorSource(Protocol):
    """Tensors by name. :class:`capibara.compress.safetensors_file.SafetensorsFile` is one."""

    def __iter__(self) -> Iterator[tuple[str, NumberFormat, tuple[int, ...]]]:
        """Name, format and shape of each."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor, [count] of ``form.unsigned``."""
        ...


class Tensors:
    """Tensors whose bits are returned by a function.

    Args:
      tensors: name → (format, shape), in order.
      read: returns the bits of a tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]],
        read: Callable[[str], np.ndarray],
    ) -> None:
        self.forms, self._read = dict(tensors), read

    def __iter__(self) -> Iterator[tuple[str, NumberFormat, tuple[int, ...]]]:
        for name, (form, shape) in self.forms.items():
            yield name, form, shape

    def read(self, name: str) -> np.ndarray:
        return self._read(name)


def find_tied(source: TensorSource, least: int = 1024) -> dict[str, str]:
    """Names of tensors of at least ``least`` elements with the same bytes as an earlier one, and that one's name."""
    tied: dict[str, str] = {}
    seen: dict[tuple[object, ...], str] = {}
    for name, form, shape in source:
        bits = numbers_of(source, name)
        if bits.size >= least:
            crc = 0
            for part in _parts(bits):
                crc = zlib.crc32(part.data, crc)
            first = seen.setdefault((form.name, shape, crc), name)
            if first != name and all(map(np.array_equal, _parts(numbers_of(source, first)), _parts(bits))):
                tied[name] = first
    return tied


def numbers_of(source: TensorSource, name: str) -> Any:
    """The bits of a tensor as returned by :meth:`TensorSource.read`, or an object that reads them in parts.

    It is sliced like an array, and ``np.asarray`` reads a slice
    (:class:`~capibara.compress.container.file_bytes.FileNumbers`).
    """
    return getattr(source, "numbers", source.read)(name)


def _parts(bits: Any) -> Iterator[np.ndarray]:
    flat = bits.reshape(-1)
    for first in range(0, len(flat), _PART):
        yield np.ascontiguousarray(flat[first : first + _PART])
