"""Measure what a program does: times, FLOP counts, memory, and the machine that it ran on.

:func:`interleaved` compares functions by alternating their calls; :func:`matmul_rate` measures the rate that
utilisation is relative to; :func:`count_flops` counts a function's FLOPs from its jaxpr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.measure.bandwidth import copy_bandwidth
    from capibara.measure.flops import FlopCount, count_flops
    from capibara.measure.machine import format_machine, machine_description
    from capibara.measure.matmul import matmul_rate, measured_chip
    from capibara.measure.memory import MemorySnapshot, memory_snapshot
    from capibara.measure.timing import MeasureError, Row, Table, interleaved

__all__ = [
    "FlopCount",
    "MeasureError",
    "MemorySnapshot",
    "Row",
    "Table",
    "copy_bandwidth",
    "count_flops",
    "format_machine",
    "interleaved",
    "machine_description",
    "matmul_rate",
    "measured_chip",
    "memory_snapshot",
]

_HOMES = {
    "bandwidth": ("copy_bandwidth",),
    "flops": ("FlopCount", "count_flops"),
    "machine": ("format_machine", "machine_description"),
    "matmul": ("matmul_rate", "measured_chip"),
    "memory": ("MemorySnapshot", "memory_snapshot"),
    "timing": ("MeasureError", "Row", "Table", "interleaved"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
