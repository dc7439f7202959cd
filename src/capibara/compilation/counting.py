"""How many programs XLA compiled, and how many came from the persistent cache.

JAX reports each of these to the listeners of ``jax.monitoring``. It reports the time of a "compilation" even if the
program was read from the cache, so the programs that were really compiled are the difference.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["COMPILED", "DISK_HIT", "DISK_MISS", "DISK_REQUEST", "CompilationCounts", "count_compilations"]

COMPILED = "/jax/core/compile/backend_compile_duration"
DISK_HIT = "/jax/compilation_cache/cache_hits"
DISK_MISS = (
    "/jax/compilation_cache/cache_misses"  # reported for programs that are then kept, and only for those
)
DISK_REQUEST = "/jax/compilation_cache/compile_requests_use_cache"


@dataclass
class CompilationCounts:
    """What happened in a ``with count_compilations()`` block.

    Attributes:
      programs: programs that were asked for and were not in JAX's memory.
      requests: those for which JAX asked its persistent cache. JAX also reports this if the cache has no folder.
      hits: those that it had.
      kept: programs written to it. Short compilations are not (``jax_persistent_cache_min_compile_time_secs``).
      seconds: compiling and reading programs, tracing and lowering not included.
    """

    programs: int = 0
    requests: int = 0
    hits: int = 0
    kept: int = 0
    seconds: float = 0.0
    _thread: int | None = field(default=None, repr=False, compare=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    @property
    def compiled(self) -> int:
        """Programs that XLA compiled."""
        return self.programs - self.hits

    @property
    def misses(self) -> int:
        """Programs that the persistent cache was asked for and did not have."""
        return self.requests - self.hits

    def __str__(self) -> str:
        cache = f", {self.hits} of {self.requests} from the cache on disk" if self.hits or self.kept else ""
        return f"{self.compiled} compiled{cache}, {self.seconds:.2f} s"

    def _counts_here(self) -> bool:
        return self._thread in (None, threading.get_ident())

    def _event(self, event: str, **_: Any) -> None:
        if not self._counts_here():
            return
        with self._lock:
            self.requests += event == DISK_REQUEST
            self.hits += event == DISK_HIT
            self.kept += event == DISK_MISS

    def _duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == COMPILED and self._counts_here():
            with self._lock:
                self.programs += 1
                self.seconds += duration_secs


@contextlib.contextmanager
def count_compilations(*, every_thread: bool = True) -> Iterator[CompilationCounts]:
    """Count the programs that are compiled in this block, by any library.

    Args:
      every_thread: also those that other threads compile.

    Yields:
      :class:`CompilationCounts`, which grows while the block runs.
    """
    import jax.monitoring

    counts = CompilationCounts(_thread=None if every_thread else threading.get_ident())
    jax.monitoring.register_event_listener(counts._event)
    jax.monitoring.register_event_duration_secs_listener(counts._duration)
    try:
        yield counts
    finally:
        with contextlib.suppress(Exception):  # a program may have removed all listeners
            jax.monitoring.unregister_event_listener(counts._event)
            jax.monitoring.unregister_event_duration_listener(counts._duration)
