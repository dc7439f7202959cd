"""The memory of a step on a device: estimated before compiling, and explained if it does not fit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara.plan.memory.estimate import MemoryEstimate, estimate_memory, estimate_memory_of

if TYPE_CHECKING:
    from capibara.plan.memory.explain import OomReport, Remedy, explain_oom
    from capibara.plan.memory.measured import measure_memory

__all__ = [
    "MemoryEstimate",
    "OomReport",
    "Remedy",
    "estimate_memory",
    "estimate_memory_of",
    "explain_oom",
    "measure_memory",
]

# What needs the compiler and the time model, found when it is first asked for.
_MODULE_OF = {
    "OomReport": "explain",
    "Remedy": "explain",
    "explain_oom": "explain",
    "measure_memory": "measured",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
