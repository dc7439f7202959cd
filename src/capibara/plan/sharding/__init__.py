"""Shard arrays over a mesh of devices: search, cost estimates, and placement.

:func:`optimize_sharding_strategy` finds a ``PartitionSpec`` for every array of a model and its cost.
:func:`create_mesh_sharding` creates a mesh of real devices and shards real arrays over it;
:func:`create_training_mesh` creates the mesh of a training run. Everything here uses
:class:`capibara.config.axes.AxisRules` and :class:`capibara.config.mesh.TPUMeshConfig`: there is no other description
of a mesh.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.plan.sharding.meshes import MeshSharding, create_mesh_sharding, create_training_mesh
    from capibara.plan.sharding.optimize import optimize_sharding_strategy
    from capibara.plan.sharding.strategy import Alternative, ArraySharding, MemoryUse, ShardingStrategy

__all__ = [
    "Alternative",
    "ArraySharding",
    "MemoryUse",
    "MeshSharding",
    "ShardingStrategy",
    "create_mesh_sharding",
    "create_training_mesh",
    "optimize_sharding_strategy",
]

_HOMES = {
    "meshes": ("MeshSharding", "create_mesh_sharding", "create_training_mesh"),
    "optimize": ("optimize_sharding_strategy",),
    "strategy": ("Alternative", "ArraySharding", "MemoryUse", "ShardingStrategy"),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
