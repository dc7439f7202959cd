"""Events reported by JAX: compilations, its persistent compilation cache, its memory.

``jax.monitoring`` calls every listener of a process, and a listener stays registered for the life of the process. So
there is only one, which forwards events to the active monitors.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax.monitoring

from capibara.compilation.counting import COMPILED, DISK_HIT, DISK_MISS
from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
from capibara.compress.system.jax_memory import JaxMemoryPool
from capibara.compress.system.monitor import MetricType, PipelineType, UnifiedPerformanceMonitor

__all__ = ["JaxPerformanceMonitor"]

_MB = 1 << 20


class JaxPerformanceMonitor:
    """The component ``jax_performance_monitor``: feeds the metrics of JAX into a monitor.

    ``JAX_COMPILATION`` gets every XLA compilation in this process, including those of other code; ``JAX_CACHE_HITS``
    the hit rate of the system's own programs after each look-up; ``JAX_MEMORY_POOL`` the bytes in use on its device
    at each :meth:`sample`.

    Args:
      monitor: receives the values.
      pool: the pool whose device's memory is read.
      compiler: the cache whose look-ups are counted.

    Attributes:
      disk_hits: programs found in JAX's persistent cache, if that is on.
      disk_misses: programs not found there.
    """

    def __init__(
        self, monitor: UnifiedPerformanceMonitor, pool: JaxMemoryPool, compiler: JaxCompilationOptimizer
    ) -> None:
        self.monitor = monitor
        self.pool = pool
        self.compiler = compiler
        self.disk_hits = self.disk_misses = 0

    def start(self) -> None:
        """Start listening, and set thresholds for JAX metrics that have none."""
        there = {t.metric for t in self.monitor.thresholds}
        if MetricType.JAX_COMPILATION not in there:
            self.monitor.set_threshold(MetricType.JAX_COMPILATION, 10_000.0)
        if MetricType.JAX_CACHE_HITS not in there:
            self.monitor.set_threshold(MetricType.JAX_CACHE_HITS, 0.5, above=False, after=20)
        if MetricType.JAX_MEMORY_POOL not in there:
            self.monitor.set_threshold(MetricType.JAX_MEMORY_POOL, 0.9 * self.pool.limit / _MB)
        _listen(self)

    def stop(self) -> None:
        """Stop listening; the values stay in the monitor."""
        with _lock:
            _monitors.discard(self)

    def sample(self) -> float:
        """Record the memory in use on the device; returns it in MB (2²⁰ bytes)."""
        used = self.pool.in_use_bytes() / _MB
        self.monitor.record(MetricType.JAX_MEMORY_POOL, used, PipelineType.JAX)
        return used

    def looked_up(self, rate: float) -> None:
        """Record the hit rate; called by the compiler."""
        self.monitor.record(MetricType.JAX_CACHE_HITS, rate, PipelineType.JAX)

    def heard(self, event: str, seconds: float | None = None) -> None:
        """Handle an event from the process's listener."""
        if event == COMPILED and seconds is not None:
            self.monitor.record(MetricType.JAX_COMPILATION, seconds * 1e3, PipelineType.JAX)
        elif event == DISK_HIT:
            self.disk_hits += 1
        elif event == DISK_MISS:
            self.disk_misses += 1

    def describe(self) -> dict[str, Any]:
        """Plain values for a status."""
        return {
            "disk_hits": self.disk_hits,
            "disk_misses": self.disk_misses,
            "cache_hit_rate": self.compiler.hit_rate,
        }


_monitors: weakref.WeakSet[JaxPerformanceMonitor] = weakref.WeakSet()
_lock = threading.Lock()
_registered = False


def _happened(event: str, **_: Any) -> None:
    with _lock:
        monitors = list(_monitors)
    for monitor in monitors:
        monitor.heard(event)


def _took(event: str, duration_secs: float, **_: Any) -> None:
    with _lock:
        monitors = list(_monitors)
    for monitor in monitors:
        monitor.heard(event, duration_secs)


def _listen(monitor: JaxPerformanceMonitor) -> None:
    global _registered
    with _lock:
        _monitors.add(monitor)
        if not _registered:
            jax.monitoring.register_event_listener(_happened)
            jax.monitoring.register_event_duration_secs_listener(_took)
            _registered = True
