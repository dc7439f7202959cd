"""How arrays are laid over a mesh of devices: found by search, priced, and carried out.

:func:`optimize_sharding_strategy` gives a ``PartitionSpec`` for every array of a model and says what each costs.
:func:`create_mesh_sharding` makes a mesh of real devices and lays real arrays over it; :func:`create_training_mesh`
makes the mesh of a training run. Everything here uses :class:`capibara.config.axes.AxisRules` and
:class:`capibara.config.mesh.TPUMeshConfig`: there is no second way of describing a mesh.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
