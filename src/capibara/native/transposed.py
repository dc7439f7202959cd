"""Matrices transposed in host memory, by all processors: NumPy copies such an array in one thread."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import numpy as np

from capibara.native.loading import open_library

__all__ = ["can_transpose", "transpose_into"]

_LEAST_BYTES = 1 << 18  # of a matrix: below that another thread takes longer than it saves


def can_transpose() -> bool:
    """Whether :func:`transpose_into` has its compiled function."""
    return open_library()[0] is not None


def transpose_into(matrices: np.ndarray, out: np.ndarray) -> None:
    """Write matrices with their last two dimensions swapped: ``out[...] = matrices.swapaxes(-1, -2)``.

    Args:
      matrices: at least two dimensions, of numbers of 2, 4 or 8 bytes; copied first if not contiguous.
      out: contiguous, of the same dtype, without a byte of ``matrices``.

    Raises:
      ValueError: shapes, dtypes or strides do not fit.
      NotImplementedError: the native library is missing; the message gives the reason.
    """
    if matrices.ndim < 2:
        raise ValueError(f"matrices: got {matrices.ndim} dimensions, expected at least 2")
    *several, rows, columns = matrices.shape
    if out.shape != (*several, columns, rows) or out.dtype != matrices.dtype or not out.flags.c_contiguous:
        raise ValueError(
            f"out: got {out.dtype}{list(out.shape)}, expected contiguous {matrices.dtype}"
            f"{[*several, columns, rows]}"
        )
    size = matrices.dtype.itemsize
    if size not in (2, 4, 8) or matrices.dtype.hasobject:
        raise ValueError(f"matrices: got {matrices.dtype}, expected numbers of 2, 4 or 8 bytes")
    if not out.flags.writeable:
        raise ValueError("out: is read-only")
    if np.may_share_memory(matrices, out):
        raise ValueError("out: has memory of the matrices")
    if matrices.size == 0:
        return
    matrices = np.ascontiguousarray(matrices)
    count = matrices.size // (rows * columns)
    threads = (os.cpu_count() or 1) if matrices.nbytes >= _LEAST_BYTES else 1
    _function()(matrices.ctypes.data, count, rows, columns, size, threads, out.ctypes.data)


@cache
def _function() -> Callable[..., None]:
    library, reason = open_library()
    if library is None:
        raise NotImplementedError(reason)
    transpose = library.capibara_transposed
    size = ctypes.c_int64
    transpose.argtypes = [ctypes.c_void_p, size, size, size, size, size, ctypes.c_void_p]
    transpose.restype = None
    return transpose
