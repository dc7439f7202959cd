"""Memory in use on a device over time: samples, high-water marks, and what happens at a threshold."""

from __future__ import annotations

import math
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from capibara.hardware.telemetry import device_memory, host_memory
from capibara.memory.arguments import GIB, checked_fraction, checked_positive
from capibara.memory.budget import MemoryBudget, device_budget
from capibara.memory.cleanup import free_until, pressure_error
from capibara.memory.errors import DeviceMemoryError, MemoryPressureWarning, MemorySettingError

__all__ = ["MemorySample", "TpuMemoryMonitor"]

_REARM = 0.05  # of its threshold: how far below it use has to fall before it counts as exceeded again
_GROWN = 0.01  # of the limit: how much more has to be in use before a cleanup that failed is tried again


@dataclass(frozen=True)
class MemorySample:
    """Memory at one moment.

    Attributes:
      seconds: of ``time.monotonic()``.
      in_use, limit: bytes on the device.
      host: resident bytes of this process; None where the system does not say.
    """

    seconds: float
    in_use: int
    limit: int
    host: int | None

    @property
    def usage(self) -> float:
        """Share of the limit."""
        return self.in_use / self.limit


@dataclass(eq=False)
class _Mark:
    """The most that was in use since a moment."""

    allocator_peak: int | None
    high: int = 0


@dataclass(eq=False)
class _Threshold:
    fraction: float
    callback: Callable[[MemorySample], Any]
    exceeded: bool = False


class TpuMemoryMonitor:
    """Samples the memory in use on a device, in the background between :meth:`start` and :meth:`stop`.

    Works on every platform; :class:`~capibara.memory.budget.MemoryBudget` says what the figures are where a device does
    not report its own. Use it as a context manager, or call :meth:`check` where it suits you.

    Args:
      memory_limit_gb: GiB that may be used on the device; by default what it has.
      cleanup_threshold: share of the limit above which the functions of :meth:`add_cleanup` are called.
      device: a ``jax.Device``; the first local one by default.
      interval_seconds: between samples in the background.
      keep: the number of latest samples that are kept.

    Raises:
      MemorySettingError: an argument is invalid.
    """

    def __init__(
        self,
        memory_limit_gb: float | None = None,
        cleanup_threshold: float = 0.85,
        *,
        device: Any = None,
        interval_seconds: float = 0.05,
        keep: int = 1000,
    ) -> None:
        self.cleanup_threshold = checked_fraction("cleanup_threshold", cleanup_threshold)
        self.interval_seconds = checked_positive("interval_seconds", interval_seconds, unit="seconds")
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise MemorySettingError(f"keep: got {keep!r}, expected an integer from 1.")
        self.budget: MemoryBudget = device_budget(device, memory_limit_gb)
        self.samples: deque[MemorySample] = deque(maxlen=keep)
        self._lock = threading.RLock()
        self._marks: list[_Mark] = []
        self._thresholds: list[_Threshold] = []
        self._cleanups: list[Callable[[int], Any]] = []
        self._failure: BaseException | None = None
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None
        self._pressure: DeviceMemoryError | None = None
        self._tried, self._again = -1, False
        self.reset()

    def reset(self) -> None:
        """Begin anew: no samples, no high-water mark, no counts."""
        with self._lock:
            self.samples.clear()
            self._area, self._span, self._count = 0.0, 0.0, 0
            self._own = _Mark(self._reported_peak())
            self.cleanups = self.freed_bytes = 0

    # What to do at a threshold

    def on_threshold(self, callback: Callable[[MemorySample], Any], fraction: float | None = None) -> None:
        """Call ``callback(sample)`` when use exceeds a share of the limit, once until it has fallen 5 % below it.

        Args:
          callback: runs in the thread that samples; an exception of it is raised by the next :meth:`check` or
            :meth:`stop`.
          fraction: of the limit; ``cleanup_threshold`` by default.
        """
        share = self.cleanup_threshold if fraction is None else checked_fraction("fraction", fraction)
        with self._lock:
            self._thresholds.append(_Threshold(share, callback))

    def add_cleanup(self, release: Callable[[int], Any]) -> None:
        """Call ``release(nbytes)`` above ``cleanup_threshold``; it should free so many bytes (``cache.evict`` does)."""
        with self._lock:
            self._cleanups.append(release)

    # Sampling

    def sample(self) -> MemorySample:
        """Read the memory now, and record it."""
        with self._lock:  # a mark that is set from here on is not of what this reads
            marks = (self._own, *self._marks)
        reading = MemorySample(
            time.monotonic(), int(self.budget.in_use()), int(self.budget.limit), host_memory().in_use
        )
        with self._lock:
            if self.samples:
                seconds = reading.seconds - self.samples[-1].seconds
                self._area += seconds * (reading.in_use + self.samples[-1].in_use) / 2
                self._span += seconds
            self.samples.append(reading)
            self._count += 1
            for mark in marks:
                mark.high = max(mark.high, reading.in_use)
        return reading

    def check(self) -> MemorySample:
        """Sample, and do what the thresholds ask for.

        Raises:
          DeviceMemoryError: use exceeds ``cleanup_threshold``, and cleaning up did not bring it below. Only with
            functions of :meth:`add_cleanup`; without any, the monitor only watches.
          Exception: what a callback raised, now or in the background since the last call.
        """
        reading = self._act(foreground=True)
        self._raise(self.take_failure())
        return reading

    def take_failure(self) -> BaseException | None:
        """What a callback or a cleanup raised since the last call, instead of raising it."""
        with self._lock:
            failure, self._failure = self._failure, None
        return failure

    def take_pressure(self) -> DeviceMemoryError | None:
        """The last time that cleaning up in the background did not help, twice in a row; None if there was none."""
        with self._lock:
            pressure, self._pressure = self._pressure, None
        return pressure

    @staticmethod
    def _raise(failure: BaseException | None) -> None:
        if failure is not None:
            raise failure

    def _act(self, *, foreground: bool = False) -> MemorySample:
        reading = self.sample()
        with self._lock:
            thresholds, cleanups = list(self._thresholds), list(self._cleanups)
        for threshold in thresholds:
            with self._lock:  # this may run in the background and in check() at a time
                now = not threshold.exceeded and reading.usage > threshold.fraction
                if now:
                    threshold.exceeded = True
                elif reading.usage < threshold.fraction * (1 - _REARM):
                    threshold.exceeded = False
            if now:
                try:
                    threshold.callback(reading)
                except Exception as error:
                    self._fail(error)
        if not cleanups or reading.usage <= self.cleanup_threshold:
            self._tried, self._again = -1, False
            return reading
        # A cleanup that could not help is not repeated at every sample, but when more has come.
        if not foreground and self._tried >= 0 and reading.in_use < self._tried + _GROWN * reading.limit:
            return reading
        try:
            freed = free_until(self.budget, int(self.cleanup_threshold * reading.limit), cleanups)
            with self._lock:
                self.cleanups += 1
                self.freed_bytes += max(0, freed)
            reading = self.sample()
            if reading.usage > self.cleanup_threshold:
                self._still_exceeded(reading, foreground)
        except Exception as error:  # of a callback, or a cache that is full on the host
            self._fail(error)
        return reading

    def _still_exceeded(self, reading: MemorySample, foreground: bool) -> None:
        # Another thread may hold what was evicted for a moment (it is just storing it): the background tries again.
        if not foreground and not self._again:
            self._again = True
            return
        self._tried = reading.in_use
        error = pressure_error(self.budget, f"{self.cleanup_threshold:.0%} of the limit are exceeded")
        if foreground:
            self._fail(error)
        else:
            with self._lock:
                self._pressure = error

    def _fail(self, error: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = error

    # In the background

    @property
    def running(self) -> bool:
        """Whether samples are taken in the background."""
        return self._thread is not None

    def start(self) -> TpuMemoryMonitor:
        """Sample in the background until :meth:`stop`."""
        with self._lock:
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=_run, args=(weakref.ref(self), self._stop), name="capibara-memory", daemon=True
                )
                self._thread.start()
        return self

    def stop(self, *, raise_failure: bool = True) -> None:
        """Stop sampling, after one more sample.

        Args:
          raise_failure: whether to raise as :meth:`check` does, and to warn (:class:`MemoryPressureWarning`) if
            cleaning up did not help for a while.
        """
        with self._lock:
            thread, stop = self._thread, self._stop
            self._thread = self._stop = None
        if thread is not None and stop is not None:
            stop.set()
            if thread is not threading.current_thread():
                thread.join()
        if not raise_failure:
            self.sample()
            return
        self.check()
        if (pressure := self.take_pressure()) is not None:
            warnings.warn(MemoryPressureWarning(str(pressure)), stacklevel=2)

    def __enter__(self) -> TpuMemoryMonitor:
        return self.start()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.stop(raise_failure=kind is None)  # an error of the body is not replaced

    # Figures

    def _reported_peak(self) -> int | None:
        if self.budget.device.platform == "cpu":
            return None
        return device_memory([self.budget.device])[0].peak

    @property
    def high_water(self) -> int:
        """The most bytes in use since the last :meth:`reset`.

        The allocator's own peak if it rose since then, which no sample can miss; otherwise the largest sample.
        """
        return self._high_since(self._own)

    def _high_since(self, mark: _Mark) -> int:
        now = self._reported_peak()
        if now is not None and (mark.allocator_peak is None or now > mark.allocator_peak):
            return max(now, mark.high)
        return mark.high

    def mark(self) -> Callable[[], int]:
        """Begin to record a high-water mark of its own, whatever :meth:`reset` does.

        Returns:
          A function that ends the record and returns the most bytes in use since.
        """
        mark = _Mark(self._reported_peak())
        with self._lock:
            self._marks.append(mark)

        def end() -> int:
            with self._lock:
                if mark in self._marks:
                    self._marks.remove(mark)
            return self._high_since(mark)

        return end

    def get_metrics(self) -> dict[str, Any]:
        """Measured figures; takes a sample first.

        ``memory_usage``: share of the limit now. ``memory_usage_gb``, ``peak_memory_gb``, ``memory_limit_gb``: GiB.
        ``memory_efficiency``: mean use over time as a percentage of the peak; 100 means that the peak is needed all the
        time, a small figure that it is a short one (which rematerialisation or microbatches lower); NaN if nothing was
        in use. ``host_memory_gb``: resident memory of the process, or None. ``samples``, ``cleanups``, ``freed_gb``:
        counts since :meth:`reset`, and the memory that cleanups gave back. ``source``, ``limit_source``: where the
        figures come from.
        """
        reading = self.sample()
        with self._lock:
            mean = self._area / self._span if self._span > 0 else float(reading.in_use)
            peak = self.high_water
            return {
                "memory_usage": reading.usage,
                "memory_usage_gb": reading.in_use / GIB,
                "peak_memory_gb": peak / GIB,
                "memory_limit_gb": reading.limit / GIB,
                "memory_efficiency": 100 * mean / peak if peak else math.nan,
                "host_memory_gb": None if reading.host is None else reading.host / GIB,
                "samples": self._count,
                "cleanups": self.cleanups,
                "freed_gb": self.freed_bytes / GIB,
                "source": self.budget.in_use().source,
                "limit_source": self.budget.limit.source,
            }


def _run(reference: weakref.ref[TpuMemoryMonitor], stop: threading.Event) -> None:
    """Sample until told to stop, or until nobody has the monitor any more."""
    while True:
        monitor = reference()
        if monitor is None:
            return
        interval = monitor.interval_seconds
        try:
            monitor._act()
        except Exception as error:
            monitor._fail(error)
        del monitor
        if stop.wait(interval):
            return
