"""Bytes of a file by ``pread``.

A memory map would save a copy, but crashes the program (SIGBUS) if another process truncates the file; a short read
is an ordinary error.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Self

import numpy as np

from capibara.compress.errors import ArchiveError, DamagedError
from capibara.files import naming

__all__ = ["FileBytes", "FileNumbers"]

_ALIGNMENT = 64  # bytes
_FLAGS = getattr(os, "O_BINARY", 0) | getattr(
    os, "O_NONBLOCK", 0
)  # a pipe is not waited for: it has no bytes


class FileBytes:
    """A file open for reading from several threads; use it as a context manager, or close it.

    Attributes:
      path: the file.
      size: in bytes, when it was opened.

    Raises:
      OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._descriptor = os.open(self.path, os.O_RDONLY | _FLAGS)
        try:
            self.size = os.fstat(self._descriptor).st_size
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; repeated calls have no effect."""
        descriptor, self._descriptor = getattr(self, "_descriptor", -1), -1
        if descriptor >= 0:
            os.close(descriptor)

    def fileno(self) -> int:
        """The descriptor of the open file.

        Raises:
          ArchiveError: it was closed.
        """
        if self._descriptor < 0:
            raise ArchiveError(f"{self.path}: was closed before this was read")
        return self._descriptor

    def read_into(self, out: np.ndarray | memoryview, offset: int) -> None:
        """Fill a contiguous array or buffer with the data from ``offset`` on.

        Raises:
          DamagedError: the file ends earlier.
          ArchiveError: it was closed.
        """
        view = memoryview(out.view(np.uint8).data if isinstance(out, np.ndarray) else out).cast("B")
        descriptor = self.fileno()
        at = 0
        while at < len(view):
            with naming(self.path):
                got = os.preadv(descriptor, [view[at:]], offset + at)
            if not got:
                raise DamagedError(
                    f"{self.path}: ends after {offset + at} bytes, {self.size} were there when it was opened. "
                    "Remedy: wait until the file is complete, or copy it again."
                )
            at += got

    def read(self, offset: int, length: int) -> bytearray:
        """Read bytes from ``offset`` on; errors as for :meth:`read_into`."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise DamagedError(f"{self.path}: bytes {offset} to {offset + length} are beyond its end")
        out = bytearray(length)
        self.read_into(memoryview(out), offset)
        return out


class FileNumbers:
    """A one-dimensional array in a file, which is read when NumPy converts it to an array.

    It can be sliced like an array; ``np.asarray`` reads the slice.

    Args:
      file: must stay open while elements are read.
      kind: the dtype.
      offset: of the first element, in bytes.
      size: number of elements.

    Attributes:
      file, offset: as given.
    """

    ndim = 1

    def __init__(self, file: FileBytes, kind: np.dtype, offset: int, size: int) -> None:
        self.file, self.dtype, self.offset, self.size = file, kind, offset, size

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def shape(self) -> tuple[int]:
        return (self.size,)

    def __len__(self) -> int:
        return self.size

    def reshape(self, *shape: int) -> Self:
        """Itself, since it is one-dimensional."""
        if math.prod(shape) not in (-1, self.size) or len(shape) != 1:
            raise ValueError(f"shape: got {shape}, expected -1: np.asarray(…) first")
        return self

    def __getitem__(self, part: slice) -> FileNumbers:
        first, last, step = part.indices(self.size)
        if step != 1:
            raise ValueError(f"got a slice of step {step}, expected 1")
        return FileNumbers(
            self.file, self.dtype, self.offset + first * self.dtype.itemsize, max(last - first, 0)
        )

    def read_into(self, out: np.ndarray) -> None:
        """Fill a contiguous array of as many bytes; errors as for :meth:`FileBytes.read_into`."""
        self.file.read_into(out, self.offset)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # Aligned, so that a device that is this machine can use the memory as it is.
        room = np.empty(self.nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        out = room[start : start + self.nbytes].view(self.dtype)
        self.file.read_into(out, self.offset)
        return out if dtype is None else out.astype(dtype, copy=False)
