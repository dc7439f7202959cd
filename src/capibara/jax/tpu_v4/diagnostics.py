"""Diagnostics at their documented name: a thin face of :mod:`capibara.observe.diagnostics`."""

from __future__ import annotations

from capibara.observe.diagnostics import TpuDiagnostics
from capibara.observe.health.report import HealthReport

__all__ = ["HealthReport", "TpuDiagnostics"]
