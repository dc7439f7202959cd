"""Health checks: computations, memory tests and communication whose results are known, on every device.

:func:`check_health` runs them all; :class:`HealthReport` says what failed, on which device, link or axis.
"""

from __future__ import annotations

from capibara.observe.health.checking import check_health
from capibara.observe.health.errors import HealthError, UnknownCheckError
from capibara.observe.health.report import HealthReport
from capibara.observe.health.results import (
    AxisHealth,
    DeviceHealth,
    Fault,
    MemoryHealth,
    ProductHealth,
    Temperature,
)
from capibara.observe.health.work import DeviceWork

__all__ = [
    "AxisHealth",
    "DeviceHealth",
    "DeviceWork",
    "Fault",
    "HealthError",
    "HealthReport",
    "MemoryHealth",
    "ProductHealth",
    "Temperature",
    "UnknownCheckError",
    "check_health",
]
