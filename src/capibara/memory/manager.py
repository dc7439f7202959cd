"""A device's memory in one object: its budget, what watches it, and the caches that give memory back.

Above a threshold it collects garbage, and caches move their entries to the host, until use is below it. What cannot be
freed is an error that names what holds the memory; it is never only logged.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any

import jax

from capibara.measure.sizes import size_text
from capibara.memory.arguments import GIB, bytes_of, checked_flag, checked_fraction
from capibara.memory.budget import MemoryBudget
from capibara.memory.cache import DeviceCache
from capibara.memory.cleanup import free_until, pressure_error
from capibara.memory.errors import MemoryPressureWarning, MemorySettingError
from capibara.memory.host_copies import ArrayCodec
from capibara.memory.monitor import TpuMemoryMonitor
from capibara.memory.scope import MemoryReport, MemoryScope

__all__ = ["MemoryManager"]

_PREFETCH_DEPTH = 2


class MemoryManager:
    """Keeps the memory of a device below a limit.

    Args:
      memory_limit_gb: GiB that may be used on the device; by default what it has, and never more than that.
      cleanup_threshold: share of the limit above which memory is freed.
      prefetch_enabled: whether caches and ``scope.prefetch`` bring data to the device before it is asked for.
      codec: how caches store cold arrays on the host; as they are by default.
      device: a ``jax.Device``; the first local one by default.
      interval_seconds: between samples within a context.

    Attributes:
      budget: the limit and its source.
      monitor: samples and metrics.
      last_report: of the last context that ended; None before.

    Raises:
      MemorySettingError: an argument is invalid.
    """

    def __init__(
        self,
        memory_limit_gb: float | None = None,
        cleanup_threshold: float = 0.85,
        prefetch_enabled: bool = True,
        *,
        codec: ArrayCodec | None = None,
        device: Any = None,
        interval_seconds: float = 0.05,
    ) -> None:
        self.cleanup_threshold = checked_fraction("cleanup_threshold", cleanup_threshold)
        self.prefetch_enabled = checked_flag("prefetch_enabled", prefetch_enabled)
        self.monitor = TpuMemoryMonitor(
            memory_limit_gb, cleanup_threshold, device=device, interval_seconds=interval_seconds
        )
        self.last_report: MemoryReport | None = None
        self.evicted_bytes = 0
        self._codec = codec
        self._caches: list[DeviceCache] = []
        self._releases: list[Callable[[int], Any]] = []
        self._lock = threading.RLock()
        self._open = 0
        self.monitor.add_cleanup(self._release)

    @property
    def budget(self) -> MemoryBudget:
        """The device and its limit."""
        return self.monitor.budget

    # What can be given back

    def create_cache(self, cache_size_gb: float, *, policy: str = "lru", **options: Any) -> DeviceCache:
        """A :class:`DeviceCache` whose entries move to the host when the device's memory is needed.

        Args:
          cache_size_gb: GiB on the device, at most the manager's limit.
          policy: ``"lru"`` or ``"lfu"``.
          options: further arguments of :class:`DeviceCache`.

        Raises:
          MemorySettingError: it is larger than the limit, or an argument is invalid.
        """
        size = bytes_of("cache_size_gb", cache_size_gb)
        if size > self.budget.limit:
            raise MemorySettingError(
                f"cache_size_gb: got {cache_size_gb:g}, more than the limit of {size_text(self.budget.limit)} "
                f"({self.budget.limit.source}). Make it smaller."
            )
        options.setdefault("prefetch_depth", _PREFETCH_DEPTH if self.prefetch_enabled else 0)
        options.setdefault("codec", self._codec)
        cache = DeviceCache(size, policy=policy, **options)
        self.add_cache(cache)
        return cache

    def add_cache(self, cache: DeviceCache) -> None:
        """Evict entries of this cache, too, when memory is needed."""
        with self._lock:
            self._caches.append(cache)

    def remove_cache(self, cache: DeviceCache) -> None:
        """The reverse of :meth:`add_cache`."""
        with self._lock, contextlib.suppress(ValueError):
            self._caches.remove(cache)

    def add_release(self, release: Callable[[int], Any]) -> None:
        """Call ``release(nbytes)`` when memory is needed and the caches have no more: it should free so many bytes."""
        with self._lock:
            self._releases.append(release)

    def _release(self, nbytes: int) -> None:
        with self._lock:
            caches, others = list(self._caches), list(self._releases)
        # What left a cache is free only if nobody else holds it: so what is missing is measured each time.
        target = self.budget.in_use() - nbytes
        for cache in caches:
            while (left := self.budget.in_use() - target) > 0:
                if not (evicted := cache.evict(int(left))):
                    break
                with self._lock:
                    self.evicted_bytes += evicted
        for release in others:
            if (left := self.budget.in_use() - target) <= 0:
                return
            release(int(left))

    def _label(self, array: Any) -> str | None:
        for cache in list(self._caches):
            if (key := cache.holds(array)) is not None:
                return f"{cache.name}[{key!r}]"
        return None

    # Making room

    def cleanup(self) -> int:
        """Free memory until use is below the threshold; returns the bytes that are in use less.

        Raises:
          DeviceMemoryError: it cannot be brought below. The error names what holds the memory.
        """
        target = int(self.cleanup_threshold * self.budget.limit)
        freed = free_until(self.budget, target, [self._release])
        if self.budget.in_use() > target:
            raise pressure_error(
                self.budget, f"{self.cleanup_threshold:.0%} of the limit are exceeded", self._label
            )
        return freed

    def reserve(self, nbytes: int) -> None:
        """Make room for an allocation: evict as for the threshold, so that it stays below it if possible.

        Args:
          nbytes: bytes on the device.

        Raises:
          DeviceMemoryError: with it, more than the limit would be in use. The error names what holds the memory.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
            raise MemorySettingError(f"nbytes: got {nbytes!r}, expected an integer from 0.")
        limit = int(self.budget.limit)
        target = int(self.cleanup_threshold * limit) - nbytes
        if self.monitor.sample().in_use > target:
            free_until(self.budget, max(0, target), [self._release])
        if self.budget.in_use() + nbytes > limit:
            raise pressure_error(self.budget, f"no room for {size_text(nbytes)} more", self._label)

    @contextlib.contextmanager
    def managed_context(self) -> Generator[MemoryScope, None, None]:
        """Watch the memory, free it at the threshold, and delete at the end what the context owns.

        Only what is handed over is owned: ``scope.own(arrays)``, ``scope.put(arrays)``, ``scope.create_cache(…)``.
        Other arrays that are made within, such as results, stay.

        Yields:
          A :class:`MemoryScope`; its ``report`` has the high-water marks afterwards.

        Raises:
          DeviceMemoryError: at the end more than the threshold is in use, and it cannot be freed; or the device ran out
            of memory within, in place of JAX's error, which does not name what holds the memory.

        A threshold that was exceeded only meanwhile is a :class:`MemoryPressureWarning`.
        """
        with self._lock:
            if not self._open:
                self.monitor.reset()
                self.monitor.start()
            self._open += 1
        scope = MemoryScope(self)
        failed: BaseException | None = None
        try:
            yield scope
        except jax.errors.JaxRuntimeError as error:
            failed = error
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            first = str(error).split("\n", 1)[0]
            raise pressure_error(
                self.budget, f"the device has no memory left ({first})", self._label
            ) from error
        except BaseException as error:
            failed = error
            raise
        finally:
            self._end(scope, failed)

    def _end(self, scope: MemoryScope, failed: BaseException | None) -> None:
        self.last_report = scope.end()
        with self._lock:
            self._open -= 1
            last = self._open == 0
        if last:
            self.monitor.stop(raise_failure=False)
            with self._lock:
                if self._open:  # a context of another thread began meanwhile, and found the monitor running
                    self.monitor.start()
        pressure, failure = self.monitor.take_pressure(), self.monitor.take_failure()
        if failed is not None:
            return
        self.cleanup()  # raises, if too much is in use still
        if failure is not None:  # what a callback or a codec raised
            raise failure
        if pressure is not None:
            warnings.warn(MemoryPressureWarning(str(pressure)), stacklevel=4)

    # Figures

    def get_metrics(self) -> dict[str, Any]:
        """The monitor's figures, and ``evicted_gb``: what left caches for the host to get below the threshold."""
        return {**self.monitor.get_metrics(), "evicted_gb": self.evicted_bytes / GIB}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.budget})"
