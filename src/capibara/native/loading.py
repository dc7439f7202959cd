"""Opening the library; without JAX, for what calls it through ctypes."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from capibara.native.build import LIBRARY, source_digest

__all__ = ["REMEDY", "open_library"]

REMEDY = "python -m capibara.native builds it (a C++ compiler is needed)"


def open_library(path: Path = LIBRARY, digest: str | None = None) -> tuple[ctypes.CDLL | None, str | None]:
    """The library, if it is there and was built from these sources, or the reason why not.

    Args:
      path: where it is.
      digest: of the sources that it must have been built from; by default of those beside this file.
    """
    if os.environ.get("CAPIBARA_NATIVE", "1") == "0":
        return None, "CAPIBARA_NATIVE=0 is set"
    if not path.is_file():
        return None, f"the native library is not built: {REMEDY}"
    try:
        library = ctypes.CDLL(str(path))
        library.capibara_native_sources.restype = ctypes.c_char_p
        library.capibara_native_isa.restype = ctypes.c_char_p
        built_from = library.capibara_native_sources().decode()
    except (OSError, AttributeError) as error:
        return None, f"the native library {path} does not load ({error}): {REMEDY}"
    if built_from != (source_digest() if digest is None else digest):
        return None, f"the native library was built from other sources than these: {REMEDY}"
    return library, None
