"""NumPy's matrix products on one thread, for many small ones.

OpenBLAS, which NumPy's wheels include, divides a product among threads that wait for the next one by spinning. For a
sequence of small products that takes ten times the processor time of one thread, and is not faster.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np

__all__ = ["one_thread"]

_NAMES = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads", "openblas_{}_num_threads")
_MOST = 1024
_lock = threading.Lock()
_inside, _before = 0, 0


@cache
def _library() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """How to get and set the number of threads; ``None`` for another library, which is left as it is."""
    for path in sorted((Path(np.__file__).parent.parent / "numpy.libs").glob("*openblas*")):
        library = ctypes.CDLL(str(path))
        for name in _NAMES:
            if hasattr(library, name.format("set")):
                get, put = getattr(library, name.format("get")), getattr(library, name.format("set"))
                get.restype, put.argtypes, put.restype = ctypes.c_int, (ctypes.c_int,), None
                return get, put
    return None


@contextlib.contextmanager
def one_thread(features: int) -> Iterator[None]:
    """Inside, on any thread, OpenBLAS computes on the thread that calls it; afterwards, on as many as before.

    Args:
      features: the shorter side of the matrices; above 1,024 threads are worth their wait, and nothing changes.
    """
    global _inside, _before
    if features > _MOST or (found := _library()) is None:
        yield
        return
    get, put = found
    with _lock:
        if not _inside:
            _before = get()
            put(1)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                put(_before)
