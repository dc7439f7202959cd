"""What a step needs of a device's memory: by arithmetic before it is compiled, and why it does not fit."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from capibara.plan.memory.estimate import MemoryEstimate, estimate_memory, estimate_memory_of

if TYPE_CHECKING:
    from capibara.plan.memory.explain import OomReport, Remedy, explain_oom

__all__ = ["MemoryEstimate", "OomReport", "Remedy", "estimate_memory", "estimate_memory_of", "explain_oom"]


def __getattr__(name: str) -> Any:
    # Explaining needs the compiler and the time model, which themselves need nothing of this.
    if name not in ("OomReport", "Remedy", "explain_oom"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("capibara.plan.memory.explain"), name)
