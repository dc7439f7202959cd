"""The checksum of chunks: zlib's CRC-32, in compiled code if that is faster."""

from __future__ import annotations

import ctypes
import zlib
from functools import cache
from typing import Any

import numpy as np

from capibara.native.loading import open_library

__all__ = ["crc32"]

_SMALL = 1 << 14  # bytes: below, the call takes longer than the sum


@cache
def _compiled() -> Any:
    library, _ = open_library()
    if library is None:
        return None
    function = library.capibara_crc32
    function.argtypes = (ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int64, ctypes.POINTER(ctypes.c_uint32))
    function.restype = ctypes.c_int32
    return function


def crc32(data: bytes | memoryview) -> int:
    """The same value as ``zlib.crc32(data)``."""
    if len(data) < _SMALL or (function := _compiled()) is None:
        return zlib.crc32(data)
    numbers, out = np.frombuffer(data, np.uint8), ctypes.c_uint32()
    size = len(data) - len(data) % 16
    if not function(0, numbers.ctypes.data, size, ctypes.byref(out)):
        return zlib.crc32(data)
    return zlib.crc32(data[size:], out.value)
