"""The TPU v4 presets at their documented path; every other name is that of JAX's module of the same name."""

from capibara.jax._overlay import import_from_jax as _import_from_jax
from capibara.jax._overlay import overlay as _overlay

_overlay(
    __name__,
    _import_from_jax("jax._src.core"),
    {
        "TPUMeshConfig": "capibara.config.mesh:TPUMeshConfig",
        "TPUv4MeshConfigurations": "capibara.config.mesh:TPUv4MeshConfigurations",
        "create_tpu_mesh_config": "capibara.config.mesh:create_tpu_mesh_config",
        "tpu_v4_optimization_context": "capibara.config.mesh:tpu_v4_optimization_context",
        "with_sharding_constraint": "capibara.jax._backend:with_sharding_constraint",
    },
)
