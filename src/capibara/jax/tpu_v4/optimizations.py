"""Sharding, compilation, memory and profiles at their documented names: faces of :mod:`capibara.plan.sharding`,
:mod:`capibara.compilation`, :mod:`capibara.memory` and :mod:`capibara.observe.profile`."""

from __future__ import annotations

from capibara.compilation import (
    TpuCompilationConfig,
    TpuWarmupManager,
    create_jitted_forward,
    create_tpu_optimized_jit,
)
from capibara.compress.device_memory import TpuMemoryManager, create_optimized_cache
from capibara.memory import TpuMemoryMonitor
from capibara.observe.profile import TpuPerformanceProfiler, TpuProfiler
from capibara.plan.hbm import HBMOptimizer
from capibara.plan.sharding import create_mesh_sharding, optimize_sharding_strategy

__all__ = [
    "HBMOptimizer",
    "TpuCompilationConfig",
    "TpuMemoryManager",
    "TpuMemoryMonitor",
    "TpuPerformanceProfiler",
    "TpuProfiler",
    "TpuWarmupManager",
    "create_jitted_forward",
    "create_mesh_sharding",
    "create_optimized_cache",
    "create_tpu_optimized_jit",
    "optimize_sharding_strategy",
]
