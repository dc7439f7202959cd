"""The monitor at its documented name: a thin face of :mod:`capibara.observe.monitor`."""

from __future__ import annotations

from capibara.observe.monitor import Alert, AlertRule, TpuRealTimeMonitor

__all__ = ["Alert", "AlertRule", "TpuRealTimeMonitor"]
