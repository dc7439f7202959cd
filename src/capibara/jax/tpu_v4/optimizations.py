"""Sharding and compilation at their documented names: faces of :mod:`capibara.plan.sharding` and
:mod:`capibara.compilation`."""

from __future__ import annotations

from capibara.compilation import (
    TpuCompilationConfig,
    TpuWarmupManager,
    create_jitted_forward,
    create_tpu_optimized_jit,
)
from capibara.plan.sharding import create_mesh_sharding, optimize_sharding_strategy

__all__ = [
    "TpuCompilationConfig",
    "TpuWarmupManager",
    "create_jitted_forward",
    "create_mesh_sharding",
    "create_tpu_optimized_jit",
    "optimize_sharding_strategy",
]
