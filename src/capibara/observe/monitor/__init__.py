"""Watch devices and machine while a program works: :class:`TpuRealTimeMonitor`, alerts, and where they go."""

from __future__ import annotations

from capibara.hardware.accelerators import DeviceReading
from capibara.observe.monitor.load import MeasuredLoad
from capibara.observe.monitor.monitor import TpuRealTimeMonitor
from capibara.observe.monitor.rules import DEFAULT_THRESHOLDS, Alert, AlertRule, MonitorError
from capibara.observe.monitor.sinks import CallbackSink, JsonLinesSink, LogSink, PrometheusSink, Sink
from capibara.observe.monitor.sources import METRICS, PROCESS_METRICS, MachineSource, Reading, Source

__all__ = [
    "DEFAULT_THRESHOLDS",
    "METRICS",
    "PROCESS_METRICS",
    "Alert",
    "AlertRule",
    "CallbackSink",
    "DeviceReading",
    "JsonLinesSink",
    "LogSink",
    "MachineSource",
    "MeasuredLoad",
    "MonitorError",
    "PrometheusSink",
    "Reading",
    "Sink",
    "Source",
    "TpuRealTimeMonitor",
]
