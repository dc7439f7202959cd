"""A device's memory while a program runs: its budget, a monitor, a bounded cache, and what can move to the host.

The documented classes with a lossless codec as the default are in :mod:`capibara.compress.device_memory`; what a step
needs, and which of its arrays to donate, recompute or offload, is found by :mod:`capibara.plan.hbm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.jax_versions import require_supported_jax
from capibara.lazy import on_demand

require_supported_jax()

if TYPE_CHECKING:
    from capibara.memory.budget import MemoryBudget, device_budget
    from capibara.memory.cache import DeviceCache
    from capibara.memory.cache_statistics import CacheStats
    from capibara.memory.errors import (
        CacheFullError,
        DeviceMemoryError,
        ItemTooLargeError,
        MemoryPressureWarning,
        MemorySettingError,
        OffloadError,
    )
    from capibara.memory.feeding import prefetch_to_device
    from capibara.memory.holders import Holder, memory_holders
    from capibara.memory.host_copies import ArrayCodec
    from capibara.memory.manager import MemoryManager
    from capibara.memory.monitor import MemorySample, TpuMemoryMonitor
    from capibara.memory.offload import OffloadSupport, host_memory_kind, offload_support, to_device, to_host
    from capibara.memory.offloaded_steps import offload_state
    from capibara.memory.rematerialisation import rematerialise
    from capibara.memory.scope import MemoryReport, MemoryScope

__all__ = [
    "ArrayCodec",
    "CacheFullError",
    "CacheStats",
    "DeviceCache",
    "DeviceMemoryError",
    "Holder",
    "ItemTooLargeError",
    "MemoryBudget",
    "MemoryManager",
    "MemoryPressureWarning",
    "MemoryReport",
    "MemorySample",
    "MemoryScope",
    "MemorySettingError",
    "OffloadError",
    "OffloadSupport",
    "TpuMemoryMonitor",
    "device_budget",
    "host_memory_kind",
    "memory_holders",
    "offload_state",
    "offload_support",
    "prefetch_to_device",
    "rematerialise",
    "to_device",
    "to_host",
]

_HOMES = {
    "budget": ("MemoryBudget", "device_budget"),
    "cache": ("DeviceCache",),
    "cache_statistics": ("CacheStats",),
    "errors": (
        "CacheFullError",
        "DeviceMemoryError",
        "ItemTooLargeError",
        "MemoryPressureWarning",
        "MemorySettingError",
        "OffloadError",
    ),
    "feeding": ("prefetch_to_device",),
    "holders": ("Holder", "memory_holders"),
    "host_copies": ("ArrayCodec",),
    "manager": ("MemoryManager",),
    "monitor": ("MemorySample", "TpuMemoryMonitor"),
    "offload": ("OffloadSupport", "host_memory_kind", "offload_support", "to_device", "to_host"),
    "offloaded_steps": ("offload_state",),
    "rematerialisation": ("rematerialise",),
    "scope": ("MemoryReport", "MemoryScope"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
