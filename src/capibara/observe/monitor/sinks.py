"""Where readings and alerts go: a log, a function, a file, Prometheus."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from capibara.errors import MissingExtraError
from capibara.observe.monitor.rules import Alert, MonitorError
from capibara.observe.monitor.sources import METRICS, Reading

__all__ = ["CallbackSink", "JsonLinesSink", "LogSink", "PrometheusSink", "Sink"]


class Sink(Protocol):
    """Takes what a monitor finds."""

    def reading(self, reading: Reading) -> None:
        """Called with each reading."""
        ...

    def alert(self, alert: Alert) -> None:
        """Called when an alert begins, and when it ends (``ended`` is set)."""
        ...


class LogSink:
    """Alerts as warnings of a logger of Python's."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logging.getLogger("capibara.monitor") if logger is None else logger

    def reading(self, reading: Reading) -> None:
        """Ignored."""

    def alert(self, alert: Alert) -> None:
        """Write one line."""
        self._logger.log(logging.WARNING if alert.ended is None else logging.INFO, "%s", alert)


class CallbackSink:
    """Functions of one's own."""

    def __init__(
        self,
        on_alert: Callable[[Alert], object] | None = None,
        on_reading: Callable[[Reading], object] | None = None,
    ) -> None:
        self._on_alert, self._on_reading = on_alert, on_reading

    def reading(self, reading: Reading) -> None:
        """Call ``on_reading``."""
        if self._on_reading is not None:
            self._on_reading(reading)

    def alert(self, alert: Alert) -> None:
        """Call ``on_alert``."""
        if self._on_alert is not None:
            self._on_alert(alert)


class JsonLinesSink:
    """A file with one JSON object a line; a full one is kept as ``NAME.1``.

    Args:
      path: the file.
      most_bytes: size from which a new one is begun.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_bytes: int = 64 << 20) -> None:
        if most_bytes < 4096:
            raise MonitorError(f"most_bytes: got {most_bytes!r}, expected at least 4096")
        self._path, self._most = Path(path), most_bytes

    def reading(self, reading: Reading) -> None:
        """Append a reading."""
        self._write({"kind": "reading", "time": reading.time, **reading.values})

    def alert(self, alert: Alert) -> None:
        """Append an alert."""
        self._write(
            {
                "kind": "alert",
                "time": alert.began if alert.ended is None else alert.ended,
                "metric": alert.rule.metric,
                "bound": alert.rule.bound,
                "value": alert.value,
                "since": alert.since,
                "began": alert.began,
                "ended": alert.ended,
            }
        )

    def _write(self, entry: dict[str, Any]) -> None:
        line = (json.dumps(entry) + "\n").encode()
        # One write of a file opened to append: lines of several processes do not mix.
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line)
            full = os.fstat(descriptor).st_size >= self._most
        finally:
            os.close(descriptor)
        if full:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))


class PrometheusSink:
    """Gauges ``capibara_<metric>`` and ``capibara_alert`` for Prometheus; ``prometheus_alerts.yml`` has rules for them.

    Args:
      port: where to answer ``GET /metrics``; None: only the registry is filled.
      registry: a ``prometheus_client.CollectorRegistry``; by default a new one.

    Raises:
      MissingExtraError: prometheus-client is not installed. OSError: the port is taken.
    """

    def __init__(self, port: int | None = None, *, registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise MissingExtraError("prometheus-client", "serve", "metrics for Prometheus") from None
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._gauges = {
            name: prometheus_client.Gauge(f"capibara_{name}", text, registry=self.registry)
            for name, text in METRICS.items()
        }
        self._alerts = prometheus_client.Gauge(
            "capibara_alert", "1 while an alert lasts", ["metric"], registry=self.registry
        )
        if port is not None:
            prometheus_client.start_http_server(port, registry=self.registry)

    def reading(self, reading: Reading) -> None:
        """Set the gauges; one that is not known is NaN, as Prometheus has it."""
        for name, gauge in self._gauges.items():
            value = reading.values.get(name)
            gauge.set(float("nan") if value is None else value)

    def alert(self, alert: Alert) -> None:
        """Set the gauge of the metric."""
        self._alerts.labels(metric=alert.rule.metric).set(1 if alert.ended is None else 0)
