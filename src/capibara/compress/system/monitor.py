"""Monitoring of the compression system: measured values by metric, thresholds, and alerts.

A monitor stores recorded values and, if JAX runs, those of JAX itself: compilations are reported by
``jax.monitoring``, cache hits are counted at program look-ups, memory is read from the devices. A metric without
recorded values is ``None``, never 0.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from capibara.compress.errors import CompressError
from capibara.errors import did_you_mean
from capibara.files import replace_file

__all__ = ["Alert", "MetricType", "PipelineType", "Statistics", "Threshold", "UnifiedPerformanceMonitor"]

_Kind = TypeVar("_Kind", bound=StrEnum)


class MetricType(StrEnum):
    """Metrics, each with its unit."""

    COMPRESSION_TIME = "compression_time"
    """Milliseconds of one compression."""
    DECOMPRESSION_TIME = "decompression_time"
    """Milliseconds of one decompression."""
    COMPRESSION_RATIO = "compression_ratio"
    """Original bytes over compressed ones."""
    RELATIVE_ERROR = "relative_error"
    """‖decoded - original‖ / ‖original‖."""
    THROUGHPUT = "throughput"
    """Original bytes in a second, in MB/s (10⁶)."""
    HOST_MEMORY = "host_memory"
    """Resident memory of this process in MB (2²⁰)."""
    JAX_COMPILATION = "jax_compilation"
    """Milliseconds of one compilation by XLA."""
    JAX_CACHE_HITS = "jax_cache_hits"
    """The share of look-ups of compiled programs that found one, since the system started: 0 to 1."""
    JAX_MEMORY_POOL = "jax_memory_pool"
    """Memory of JAX's devices that is in use, in MB (2²⁰)."""


class PipelineType(StrEnum):
    """The engine or device that ran the work."""

    JAX = "jax"
    TORCH = "torch"
    NATIVE = "native"
    NUMPY = "numpy"
    SYSTEM = "system"
    """Not the work of one engine."""


@dataclass(frozen=True)
class Threshold:
    """A limit of a metric.

    Attributes:
      metric: the metric.
      limit: the last good value.
      above: whether values above the limit are bad; otherwise those below it.
      after: number of initial values of a pipeline that raise no alert: a hit rate starts with misses.
    """

    metric: MetricType
    limit: float
    above: bool = True
    after: int = 0

    def is_crossed(self, value: float) -> bool:
        return value > self.limit if self.above else value < self.limit


@dataclass(frozen=True)
class Alert:
    """A value beyond its limit: the time (seconds since 1970), the value, and a suggestion."""

    time: float
    metric: MetricType
    pipeline: PipelineType
    value: float
    limit: float
    remedy: str


@dataclass(frozen=True)
class Statistics:
    """Statistics of a metric: ``count``, ``total``, ``mean`` and extremes of all values, others of the stored ones.

    ``last`` is the most recent value on any pipeline.
    """

    count: int
    last: float
    total: float
    mean: float
    minimum: float
    maximum: float
    median: float
    p95: float


REMEDIES = {
    MetricType.JAX_COMPILATION: "compile for fewer different shapes, or compress several tensors of one shape",
    MetricType.JAX_CACHE_HITS: "a larger jax_compilation_cache_size",
    MetricType.JAX_MEMORY_POOL: "a smaller jax_memory_fraction, or jax_backend='cpu' for models that do not fit",
    MetricType.RELATIVE_ERROR: "a smaller target_compression_ratio",
    MetricType.COMPRESSION_RATIO: "a target_compression_ratio, or another strategy",
    MetricType.HOST_MEMORY: "compress tensor by tensor into a file",
}


class _Series:
    def __init__(self, keep: int) -> None:
        self.values: deque[float] = deque(maxlen=keep)
        self.last, self.turn = math.nan, 0  # the turn says which of several series was added to last
        self.count, self.total, self.minimum, self.maximum = 0, 0.0, math.inf, -math.inf

    def add(self, value: float, turn: int) -> None:
        self.values.append(value)
        self.last, self.turn = value, turn
        self.count += 1
        self.total += value
        self.minimum, self.maximum = min(self.minimum, value), max(self.maximum, value)

    def statistics(self) -> Statistics:
        kept = np.array(self.values)
        return Statistics(self.count, self.last, self.total, self.total / self.count, self.minimum, self.maximum,
                          float(np.median(kept)), float(np.percentile(kept, 95)))  # fmt: skip


class UnifiedPerformanceMonitor:
    """Stores measured values; thread-safe.

    Everything works without JAX; the metrics of JAX then have no values.

    Args:
      keep: number of values per metric and pipeline to store for medians.
      most_alerts: number of alerts to store; the oldest are dropped.
      on_alert: called with each alert, in the thread that recorded the value. An exception in it becomes a
        ``RuntimeWarning``; the measured work continues.

    Raises:
      CompressError: ``keep`` or ``most_alerts`` is not an integer above 0.
    """

    def __init__(
        self, *, keep: int = 1024, most_alerts: int = 256, on_alert: Callable[[Alert], object] | None = None
    ) -> None:
        for name, value in (("keep", keep), ("most_alerts", most_alerts)):
            if type(value) is not int or value < 1:
                raise CompressError(f"{name}: got {value!r}, expected an integer above 0")
        self._keep = keep
        self._on_alert = on_alert
        self._series: dict[tuple[MetricType, PipelineType], _Series] = {}
        self._thresholds: dict[tuple[MetricType, bool], Threshold] = {}
        self._alerts: deque[Alert] = deque(maxlen=most_alerts)
        self._sources: dict[str, Callable[[], Any]] = {}
        self._turn = 0  # counts the values of all series
        self._lock = threading.Lock()

    def record(
        self,
        metric: MetricType | str,
        value: float,
        pipeline: PipelineType | str = PipelineType.SYSTEM,
    ) -> None:
        """Record a measured value, and raise an alert if it crosses a threshold.

        Raises:
          CompressError: an unknown metric or pipeline, or the value is not finite.
        """
        kind, where = _one_of(MetricType, "metric", metric), _one_of(PipelineType, "pipeline", pipeline)
        try:
            value = float(value)
        except (TypeError, ValueError, OverflowError):  # an integer that no float holds
            raise CompressError(f"value: got {value!r:.200}, expected a number ({kind})") from None
        if not math.isfinite(value):
            raise CompressError(f"value: got {value!r}, expected a finite number ({kind})")
        with self._lock:
            series = self._series.setdefault((kind, where), _Series(self._keep))
            self._turn += 1
            series.add(value, self._turn)
            limits = [t for t in self._thresholds.values() if t.metric == kind and series.count > t.after]
            crossed = [t for t in limits if t.is_crossed(value)]
            remedy = REMEDIES.get(kind, "look at what ran")
            alerts = [Alert(time.time(), kind, where, value, t.limit, remedy) for t in crossed]
            self._alerts.extend(alerts)
        if self._on_alert is not None:
            for alert in alerts:
                try:
                    self._on_alert(alert)
                except (
                    Exception
                ) as error:  # whatever a user's function raises: the work that was measured is done
                    text = f"{type(error).__name__}: {error}".rstrip(": ")
                    warnings.warn(
                        f"on_alert: {_name_of(self._on_alert)} raised {text:.300} at an alert of {alert.metric}. The "
                        "alert is kept in alerts, and work goes on. Remedy: handle it in on_alert.",
                        RuntimeWarning,
                        stacklevel=2,
                    )

    @contextlib.contextmanager
    def track(
        self, metric: MetricType | str, pipeline: PipelineType | str = PipelineType.SYSTEM
    ) -> Iterator[None]:
        """Record the duration of the block in milliseconds, unless it raises."""
        _one_of(MetricType, "metric", metric)
        _one_of(PipelineType, "pipeline", pipeline)
        begin = time.perf_counter()
        yield
        self.record(metric, (time.perf_counter() - begin) * 1e3, pipeline)

    def set_threshold(
        self, metric: MetricType | str, limit: float, *, above: bool = True, after: int = 0
    ) -> None:
        """Alert when a value is above ``limit`` (below it if not ``above``); one limit in each direction.

        Args:
          metric: the metric.
          limit: the last good value.
          above: whether values above the limit are bad; otherwise those below it.
          after: number of initial values of a pipeline that raise no alert.

        Raises:
          CompressError: an unknown metric, or the limit is not finite: nothing crosses an infinite limit, and JSON
            cannot represent it.
        """
        kind = _one_of(MetricType, "metric", metric)
        if not isinstance(limit, float | int) or isinstance(limit, bool) or not _is_finite(limit):
            raise CompressError(
                f"limit: got {limit!r:.200}, expected a finite number ({kind}). Remedy: remove_threshold, for no limit."
            )
        if type(after) is not int or after < 0:
            raise CompressError(f"after: got {after!r}, expected an integer ≥ 0")
        with self._lock:
            self._thresholds[kind, above] = Threshold(kind, float(limit), above, after)

    def remove_threshold(self, metric: MetricType | str) -> None:
        """Remove the thresholds of a metric."""
        metric = _one_of(MetricType, "metric", metric)
        with self._lock:
            self._thresholds = {k: t for k, t in self._thresholds.items() if k[0] != metric}

    @property
    def thresholds(self) -> tuple[Threshold, ...]:
        with self._lock:
            return tuple(self._thresholds.values())

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """Alerts, oldest first."""
        with self._lock:
            return tuple(self._alerts)

    def clear_alerts(self) -> None:
        with self._lock:
            self._alerts.clear()

    def statistics(
        self, metric: MetricType | str, pipeline: PipelineType | str | None = None
    ) -> Statistics | None:
        """Statistics of a metric, on one pipeline or all; ``None`` if nothing was recorded."""
        metric = _one_of(MetricType, "metric", metric)
        wanted = None if pipeline is None else _one_of(PipelineType, "pipeline", pipeline)
        with self._lock:
            found = [s for (m, p), s in self._series.items() if m == metric and wanted in (None, p)]
            if not found:
                return None
            if len(found) == 1:
                return found[0].statistics()
            merged = _Series(self._keep * len(found))
            for series in found:
                merged.values.extend(series.values)
                if series.turn > merged.turn:
                    merged.last, merged.turn = series.last, series.turn
                merged.count += series.count
                merged.total += series.total
                merged.minimum = min(merged.minimum, series.minimum)
                merged.maximum = max(merged.maximum, series.maximum)
            return merged.statistics()

    def latest(self, metric: MetricType | str) -> float | None:
        """The most recent value of a metric on any pipeline; ``None`` if nothing was recorded."""
        metric = _one_of(MetricType, "metric", metric)
        with self._lock:
            found = [series for (kind, _), series in self._series.items() if kind == metric]
            return max(found, key=lambda series: series.turn).last if found else None

    def attach(self, name: str, source: Callable[[], Any]) -> None:
        """Include the plain values that ``source`` returns in :meth:`report`, under ``name``."""
        with self._lock:
            self._sources[name] = source

    def detach(self, name: str) -> None:
        with self._lock:
            self._sources.pop(name, None)

    def report(self) -> dict[str, Any]:
        """Everything, as plain values for JSON: metrics by pipeline, thresholds, alerts, attached sources."""
        with self._lock:
            keys, sources = list(self._series), dict(self._sources)
        metrics: dict[str, dict[str, Any]] = {}
        for metric, pipeline in keys:
            found = self.statistics(metric, pipeline)
            assert found is not None
            metrics.setdefault(metric.value, {})[pipeline.value] = asdict(found)
        return {
            "metrics": metrics,
            "thresholds": [asdict(t) for t in self.thresholds],
            "alerts": [asdict(a) for a in self.alerts],
            **{name: source() for name, source in sources.items()},
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`report` as JSON, in one step.

        Raises:
          OSError: the folder is missing, the disk is full …
        """
        replace_file(path, json.dumps(self.report(), indent=1))


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def _name_of(function: object) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _one_of(kind: type[_Kind], name: str, value: object) -> _Kind:
    try:
        return kind(str(value).lower())
    except ValueError:
        options = [member.value for member in kind]
        raise CompressError(
            f"{name}: got {value!r:.200}, expected one of {', '.join(options)}."
            f"{did_you_mean(str(value).lower(), options)}"
        ) from None
