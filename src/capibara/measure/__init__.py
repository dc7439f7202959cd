"""What a program really does: times, arithmetic, memory, and the machine it ran on.

:func:`interleaved` compares functions in alternation; :func:`matmul_rate` measures the arithmetic rate that
utilisation is quoted against; :func:`count_flops` counts a function's arithmetic from its jaxpr.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
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
    "count_flops",
    "format_machine",
    "interleaved",
    "machine_description",
    "matmul_rate",
    "measured_chip",
    "memory_snapshot",
]

_HOMES = {
    "flops": ("FlopCount", "count_flops"),
    "machine": ("format_machine", "machine_description"),
    "matmul": ("matmul_rate", "measured_chip"),
    "memory": ("MemorySnapshot", "memory_snapshot"),
    "timing": ("MeasureError", "Row", "Table", "interleaved"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
