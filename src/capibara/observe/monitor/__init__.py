"""Watch devices and machine while a program works: :class:`TpuRealTimeMonitor`, alerts, and where they go."""

from __future__ import annotations

from capibara.observe.monitor.monitor import TpuRealTimeMonitor
from capibara.observe.monitor.rules import Alert, AlertRule, MonitorError
from capibara.observe.monitor.sinks import CallbackSink, JsonLinesSink, LogSink, PrometheusSink, Sink
from capibara.observe.monitor.sources import METRICS, MachineSource, Reading, Source

__all__ = [
    "METRICS",
    "Alert",
    "AlertRule",
    "CallbackSink",
    "JsonLinesSink",
    "LogSink",
    "MachineSource",
    "MonitorError",
    "PrometheusSink",
    "Reading",
    "Sink",
    "Source",
    "TpuRealTimeMonitor",
]
