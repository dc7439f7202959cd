"""Memory for groups of tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol, Self

import numpy as np

__all__ = ["LARGE", "Room"]

LARGE = 4 << 20  # bytes: from here on NumPy asks for large pages itself
_SLAB = 32 << 20
_LINE = 64  # bytes of a line of the cache; JAX's arrays on CPUs begin with one, and numbers can go past the caches then


class _Sized(Protocol):
    @property
    def original_bytes(self) -> int: ...


class Room:
    """Memory for small tensors in blocks large enough for huge pages, and for large ones.

    With 4 KiB pages, allocating tensors would take as long as decoding them.

    Args:
      total: bytes of all small tensors (those below :data:`LARGE`).
    """

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._left = total
        self._slab, self._at = np.empty(0, np.uint8), 0

    @classmethod
    def of(cls, tensors: Iterable[_Sized]) -> Self:
        """Memory for these entries."""
        return cls(sum(size for one in tensors if (size := one.original_bytes) < LARGE))

    def take(self, count: int, kind: np.dtype) -> np.ndarray:
        """A new array [count]; from 64 bytes on it is aligned to a cache line."""
        size = count * kind.itemsize
        if size < _LINE:
            return np.empty(count, kind)
        if size >= LARGE:
            return _lined(size).view(kind)
        with self._lock:
            if self._at + size > len(self._slab):
                self._slab, self._at = _lined(max(min(self._left, _SLAB), size)), 0
            part = self._slab[self._at : self._at + size]
            self._at += -(-size // _LINE) * _LINE
            self._left -= size
        return part.view(kind)


def _lined(size: int) -> np.ndarray:
    """Bytes that begin a line of the cache."""
    memory = np.empty(size + _LINE, np.uint8)
    return memory[(at := -memory.ctypes.data % _LINE) : at + size]
