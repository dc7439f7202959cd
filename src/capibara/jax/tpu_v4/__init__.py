"""TPU v4 helpers at their documented names; the logic is in ``capibara.config`` and ``capibara.compose``."""

from __future__ import annotations

from capibara.config.mesh import (
    TPUMeshConfig,
    TPUv4MeshConfigurations,
    create_tpu_mesh_config,
    tpu_v4_optimization_context,
)
from capibara.jax._backend import with_sharding_constraint

__all__ = [
    "TPUMeshConfig",
    "TPUv4MeshConfigurations",
    "create_tpu_mesh_config",
    "tpu_v4_optimization_context",
    "with_sharding_constraint",
]
