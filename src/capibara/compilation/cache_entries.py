"""The files of JAX's persistent cache: a compressed program, with the time that it took to compile.

JAX compresses with Zstandard where Python has it (3.14, or the package ``zstandard``), else with zlib, and reads only
what it would write itself.
"""

from __future__ import annotations

import importlib
import sys
import zlib
from typing import Any

__all__ = ["compress", "decompress", "is_whole"]

_ZSTANDARD = b"\x28\xb5\x2f\xfd"


def _zstd() -> Any:
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "zstandard")
    except ImportError:
        return None


def compress(content: bytes) -> bytes:
    """As JAX does in this process."""
    zstd = _zstd()
    if zstd is None:
        return zlib.compress(content)
    return zstd.compress(content) if sys.version_info >= (3, 14) else zstd.ZstdCompressor().compress(content)


def decompress(data: bytes) -> bytes:
    """What JAX wrote in this process."""
    if not data.startswith(_ZSTANDARD):
        return zlib.decompress(data)
    zstd = _zstd()
    return zstd.decompress(data) if sys.version_info >= (3, 14) else zstd.ZstdDecompressor().decompress(data)


def is_whole(data: bytes) -> bool:
    """Whether compressed data is complete: zlib's, or Zstandard's where JAX can write that."""
    if not data.startswith(_ZSTANDARD):
        inflate = zlib.decompressobj()
        try:
            inflate.decompress(data)
        except zlib.error:
            return False
        return inflate.eof
    zstd = _zstd()
    if zstd is None:
        return True  # from a Python that has it; its own sessions look at it
    try:
        zstd.decompress(data)
    except (zstd.ZstdError, EOFError):
        return False
    return True
