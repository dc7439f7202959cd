"""Host memory for large arrays, in whole pages, that goes back to the system when an array is dropped.

A CPU device uses it as it is (``jax.device_put`` copies nothing). While a model is loaded and its matrices are packed,
each in turn, memory that was dropped can be handed out again: new memory is filled with zeros first, and in a virtual
machine the host has to find it, which takes up to a millisecond for a megabyte. XLA does not own it: a program that is
given such an array to donate copies it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

__all__ = ["is_reusing", "reuse_rooms", "room"]

_PAGE = mmap.PAGESIZE
_LARGE = 4 << 20  # bytes from which NumPy asks for large pages, too


def room(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array whose numbers are not set. Memory of ``malloc`` of this size may stay with the process instead.

    Raises:
      MemoryError: the system has no more.
    """
    dtype = np.dtype(dtype)
    count = math.prod(map(int, shape))
    size = -(-max(count * dtype.itemsize, 1) // _PAGE) * _PAGE
    rooms = _in_use
    block = _Block(_Arena(size), 0, size) if rooms is None else rooms.take(size)
    return np.asarray(block)[: count * dtype.itemsize].view(dtype).reshape(shape)


@contextlib.contextmanager
def reuse_rooms() -> Iterator[None]:
    """Within it, memory that :func:`room` gave and that was dropped is handed out again; at the end what is free goes
    back to the system. It holds for all threads; one that begins while another is in use does nothing.
    """
    global _in_use
    with _starting:
        own = _Rooms() if _in_use is None else None
        _in_use = own or _in_use
    try:
        yield
    finally:
        if own is not None:
            _in_use = None
            own.close()


def is_reusing() -> bool:
    """Whether :func:`reuse_rooms` is in use."""
    return _in_use is not None


class _Arena:
    """Memory of one mapping, of which parts are taken."""

    def __init__(self, size: int) -> None:
        # Not shared, as it is by default: single pages of that do not go back, and rarely are there large ones.
        try:
            self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{size} bytes: {error}") from None
        if size >= _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # of a kernel without large pages
                self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.size = size
        self.free: list[tuple[int, int]] = []  # where they begin, and bytes; in order, none beside another
        # A part may be dropped at any time, also by the garbage collector in the midst of taking another.
        self.returned: deque[tuple[int, int]] = deque()
        self.reused = False

    def give(self, first: int, size: int) -> None:
        """Return a part that nothing holds."""
        self.returned.append((first, size))
        if not self.reused:
            self._drop_returned()

    def take(self, size: int) -> _Block | None:
        """The smallest free part that has so many bytes, if any; for one thread at a time."""
        while self.returned:
            self._join(*self.returned.popleft())
        fitting = [(length, first) for first, length in self.free if length >= size]
        if not fitting:
            return None
        length, first = min(fitting)
        place = self.free.index((first, length))
        self.free[place : place + 1] = [(first + size, length - size)] if length > size else []
        return _Block(self, first, size)

    def end_reuse(self) -> None:
        """Give the system what is free, and from now on each part that is returned."""
        self.reused = False
        self.returned.extend(self.free)
        self.free.clear()
        self._drop_returned()

    def _join(self, first: int, size: int) -> None:
        after = next((i for i, (begin, _) in enumerate(self.free) if begin > first), len(self.free))
        if after < len(self.free) and first + size == self.free[after][0]:
            size += self.free.pop(after)[1]
        if after and sum(self.free[after - 1]) == first:
            begin, length = self.free.pop(after - 1)
            first, size, after = begin, length + size, after - 1
        self.free.insert(after, (first, size))

    def _drop_returned(self) -> None:
        while True:
            try:
                first, size = self.returned.popleft()
            except IndexError:
                return
            if size < self.size and hasattr(mmap, "MADV_DONTNEED"):  # with the whole the mapping itself goes
                self.memory.madvise(mmap.MADV_DONTNEED, first, size)


class _Block:
    """A part of an arena as bytes; NumPy keeps it as long as there is an array of it."""

    def __init__(self, arena: _Arena, first: int, size: int) -> None:
        self._part = arena, first, size
        self.__array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (arena.address + first, False),
        }

    def __del__(self) -> None:
        arena, first, size = self._part
        arena.give(first, size)


class _Rooms:
    def __init__(self) -> None:
        self._arenas: list[_Arena] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> _Block:
        with self._lock:
            for arena in self._arenas:
                if (block := arena.take(size)) is not None:
                    return block
            arena = _Arena(size)
            arena.reused, arena.free = True, [(0, size)]
            self._arenas.append(arena)
            block = arena.take(size)
            assert block is not None
            return block

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas:
                arena.end_reuse()
            self._arenas.clear()


_starting = threading.Lock()
_in_use: _Rooms | None = None
