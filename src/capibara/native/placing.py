"""Matrices from files or memory, put where they are wanted: as they lie, transposed, or in panels.

Many in one call, by all processors, while Python's other threads go on. NumPy copies such arrays in one thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

from capibara.native.loading import open_library

__all__ = ["PANEL", "InFile", "Placing", "can_place", "place"]

PANEL = 16
"""Columns of a panel."""
_LEAST_BYTES = 1 << 18  # below that another thread takes longer than it saves
_LAYOUTS = ("same", "transposed", "panels", "turned panels")
_PAUSE_MS = 100  # from one look at signals to the next


@dataclass(frozen=True)
class InFile:
    """Bytes of an open file: its descriptor, and where they begin."""

    descriptor: int
    offset: int


@dataclass(frozen=True)
class Placing:
    """Matrices ``[count, rows, columns]`` of numbers of 1, 2, 4 or 8 bytes, and where they are to be.

    Attributes:
      source: a contiguous array of as many bytes, or where they are in a file.
      shape: ``(count, rows, columns)``.
      out: contiguous, without a byte of the source.
      layout: of each matrix in ``out``. ``"same"``; ``"transposed"``: ``[columns, rows]``; ``"panels"``:
        ``[columns / 16, rows, 16]``; ``"turned panels"``: ``[rows / 16, columns, 16]``, those of its transpose. Numbers
        of 2, 4 or 8 bytes can be transposed, in panels they have 2 or 4.
    """

    source: np.ndarray | InFile
    shape: tuple[int, int, int]
    out: np.ndarray
    layout: Literal["same", "transposed", "panels", "turned panels"] = "same"

    def __post_init__(self) -> None:
        count, rows, columns = self.shape
        size, out = self.out.dtype.itemsize, self.out
        if out.size != count * rows * columns or not out.flags.c_contiguous or out.dtype.hasobject:
            raise ValueError(
                f"out: got {out.dtype}{list(out.shape)}, expected {count * rows * columns} numbers, contiguous"
            )
        if not out.flags.writeable:
            raise ValueError("out: is read-only")
        sizes = {"same": (1, 2, 4, 8), "transposed": (2, 4, 8)}.get(self.layout, (2, 4))
        if self.layout not in _LAYOUTS or size not in sizes:
            raise ValueError(f"layout: got {self.layout!r} of {out.dtype}, expected numbers of {sizes} bytes")
        across = {"panels": columns, "turned panels": rows}.get(self.layout, 0)
        if across % PANEL:
            raise ValueError(f"shape: got {self.shape}, expected a multiple of {PANEL} for panels")
        if isinstance(self.source, InFile):
            if self.source.descriptor < 0 or self.source.offset < 0:
                raise ValueError(f"source: got {self.source}, expected an open file, and an offset from 0")
            return
        if (
            self.source.nbytes != out.nbytes
            or not self.source.flags.c_contiguous
            or self.source.dtype.hasobject
        ):
            raise ValueError(
                f"source: got {self.source.dtype}{list(self.source.shape)}, expected {out.nbytes} bytes, contiguous"
            )
        if np.may_share_memory(self.source, out):
            raise ValueError("out: has memory of the source")


def can_place() -> bool:
    """Whether :func:`place` has its compiled function."""
    return _function()[0] is not None


def place(parts: Sequence[Placing]) -> int | None:
    """Put all of them in their places.

    Returns:
      The index of one that could not be read, of a file that ended or failed; ``None``: all are there.

    Raises:
      NotImplementedError: the native library is missing; the message gives the reason.
    """
    run, reason = _function()
    if run is None:
        raise NotImplementedError(reason)
    table = np.empty((len(parts), 8), np.int64)
    for row, part in zip(table, parts, strict=True):
        source = part.source
        at = (source.descriptor, source.offset) if isinstance(source, InFile) else (-1, source.ctypes.data)
        layout = _LAYOUTS.index(part.layout)
        row[:] = (*at, *part.shape, part.out.dtype.itemsize, layout, part.out.ctypes.data)
    threads = (os.cpu_count() or 1) if sum(part.out.nbytes for part in parts) >= _LEAST_BYTES else 1
    unit = ctypes.c_int64(0)
    while unit.value >= 0:  # in between Python handles signals, such as Ctrl-C
        failed = run(table.ctypes.data, len(parts), threads, _PAUSE_MS, ctypes.byref(unit))
        if failed >= 0:
            return failed
    return None


@cache
def _function() -> tuple[Callable[..., int] | None, str | None]:
    library, reason = open_library()
    if library is None:
        return None, reason
    run, size = library.capibara_placed, ctypes.c_int64
    run.argtypes = (ctypes.c_void_p, size, size, size, ctypes.POINTER(size))
    run.restype = size
    return run, None
