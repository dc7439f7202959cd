"""Where readings and alerts go: a log, a function, a file, Prometheus."""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from capibara.errors import MissingExtraError
from capibara.observe.monitor.rules import Alert, MonitorError
from capibara.observe.monitor.sources import METRICS, Reading

__all__ = ["CallbackSink", "JsonLinesSink", "LogSink", "PrometheusSink", "Sink", "json_line"]

_DEVICE = {
    "memory_usage": "memory in use, share of the device's",
    "utilization": "share of the time in which the device worked",
    "temperature": "°C of the device",
}


def json_line(entry: Mapping[str, Any]) -> str:
    """An object as one line of JSON; NaN and infinity, which JSON lacks, are ``null``."""
    return json.dumps(_finite(entry), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return value


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

    Raises:
      MonitorError: ``most_bytes`` is too small. OSError: the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, most_bytes: int = 64 << 20) -> None:
        if most_bytes < 4096:
            raise MonitorError(f"most_bytes: got {most_bytes!r}, expected at least 4096")
        self._path, self._most = Path(path), most_bytes
        os.close(self._open())

    def reading(self, reading: Reading) -> None:
        """Append a reading."""
        entry = {"kind": "reading", **reading.to_dict()}
        del entry["reasons"]
        self._write(entry)

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
                "where": alert.where,
            }
        )

    def _write(self, entry: dict[str, Any]) -> None:
        line = f"{json_line(entry)}\n".encode()
        # One write of a file opened to append: lines of several processes do not mix.
        descriptor = self._open()
        try:
            os.write(descriptor, line)
            full = os.fstat(descriptor).st_size >= self._most
        finally:
            os.close(descriptor)
        if full:
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


class PrometheusSink:
    """Gauges for Prometheus; ``prometheus_alerts.yml`` beside this file has rules for them.

    ``capibara_<metric>``, ``capibara_device_<metric>`` by ``device``, and ``capibara_alert`` by ``metric``.

    Args:
      port: where to answer ``GET /metrics``; 0: a free one. None: only the registry is filled.
      registry: a ``prometheus_client.CollectorRegistry``; by default a new one.

    Attributes:
      port: on which it answers, or None.

    Raises:
      MissingExtraError: prometheus-client is not installed.
      MonitorError: ``port`` is not a port. OSError: the port is taken.
    """

    def __init__(self, port: int | None = None, *, registry: Any = None) -> None:
        if port is not None and (
            isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535
        ):
            raise MonitorError(f"port: got {port!r}, expected an integer from 0 to 65535")
        try:
            import prometheus_client
        except ImportError:
            raise MissingExtraError("prometheus-client", "serve", "metrics for Prometheus") from None
        self.registry = prometheus_client.CollectorRegistry() if registry is None else registry
        self._gauges = {
            name: prometheus_client.Gauge(f"capibara_{name}", text, registry=self.registry)
            for name, text in METRICS.items()
        }
        self._devices = {
            name: prometheus_client.Gauge(f"capibara_device_{name}", text, ["device"], registry=self.registry)
            for name, text in _DEVICE.items()
        }
        self._alerts = prometheus_client.Gauge(
            "capibara_alert", "1 while an alert lasts", ["metric"], registry=self.registry
        )
        self._lasting: Counter[str] = Counter()
        self._server: Any = None
        self.port: int | None = None
        if port is not None:
            self._server, self._thread = prometheus_client.start_http_server(port, registry=self.registry)
            self.port = self._server.server_port

    def reading(self, reading: Reading) -> None:
        """Set the gauges; one that is not known is NaN, as Prometheus has it."""
        for name, gauge in self._gauges.items():
            gauge.set(_or_nan(reading.values.get(name)))
        for device in reading.devices:
            for name, gauge in self._devices.items():
                gauge.labels(device=device.name).set(_or_nan(getattr(device, name)))

    def alert(self, alert: Alert) -> None:
        """Set the gauge of the metric, which may have several rules."""
        metric = alert.rule.metric
        self._lasting[metric] += 1 if alert.ended is None else -1
        self._alerts.labels(metric=metric).set(1 if self._lasting[metric] > 0 else 0)

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None:
            server, self._server, self.port = self._server, None, None
            server.shutdown()
            server.server_close()
            self._thread.join()


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
