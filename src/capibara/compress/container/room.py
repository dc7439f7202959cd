"""Memory for tensors that come together."""

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
    """Memory for small tensors in pieces so large that the system hands out large pages, and for large ones.

    Page by page of 4 KiB, tensors would take as long to get their memory as to be decoded into it.

    Args:
      total: bytes of all the small ones, those below :data:`LARGE`.
    """

    def __init__(self, total: int) -> None:
        self._lock = threading.Lock()
        self._left = total
        self._slab, self._at = np.empty(0, np.uint8), 0

    @classmethod
    def of(cls, tensors: Iterable[_Sized]) -> Self:
        """For these."""
        return cls(sum(size for one in tensors if (size := one.original_bytes) < LARGE))

    def take(self, count: int, kind: np.dtype) -> np.ndarray:
        """An array [count] that nobody else has; from 64 bytes on it begins a line of the cache."""
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
