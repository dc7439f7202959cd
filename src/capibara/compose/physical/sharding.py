"""Shard arrays over a mesh by the logical names of their dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import InputError
from capibara.config.axes import AxisRules

if TYPE_CHECKING:
    import jax

__all__ = ["check_devices", "constrain", "current_mesh", "param_shardings"]


def check_devices(mesh: Any | None, **trees: Any) -> None:
    """Refuse arrays on other devices than those of the mesh.

    Args:
        mesh: a ``Mesh``, or None for no check. trees: nested dicts of arrays, by what they are called.

    Raises:
        InputError: for the first such array.
    """
    import jax
    from jax.core import Tracer

    if mesh is None or isinstance(mesh, jax.sharding.AbstractMesh):
        return
    there = set(mesh.devices.flat)
    for name, tree in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not isinstance(x, jax.Array) or isinstance(x, Tracer) or not x.committed:
                continue
            if x.sharding.device_set != there:
                on = ", ".join(sorted(str(d) for d in x.sharding.device_set)[:4])
                raise InputError(
                    f"{name}{jax.tree_util.keystr(path)} is on {on}, and the backend's mesh has {len(there)} devices: "
                    "shard it over the mesh with jax.device_put(…, compiled.propose_shardings()[…])"
                )


def current_mesh() -> Any | None:
    """The mesh of the surrounding ``jax.set_mesh`` / ``jax.sharding.use_abstract_mesh``, or None."""
    import jax

    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh is None or mesh.empty else mesh


def constrain(
    x: jax.Array, names: Sequence[str | None], mesh: Any | None = None, rules: AxisRules | None = None
) -> jax.Array:
    """Constrain the sharding of ``x`` by its logical axes.

    Equivalent JAX: ``jax.lax.with_sharding_constraint(x, NamedSharding(mesh, rules.spec(names, mesh)))``.
    Without a mesh, and inside ``jax.shard_map``, it is the identity, so the same code runs on one device. Inside that
    of a pipeline the axes that it does not take are constrained.

    Args:
        x: any array. names: a logical axis or mesh axis name (or None) for each dimension of ``x``.
        mesh: a ``Mesh``; by default the surrounding one (``jax.set_mesh``).
        rules: the mesh axes of each name; by default :class:`AxisRules`' own table for activations.

    Raises:
        InputError: the number of names is not the number of dimensions.
        ConfigError: an unknown name.
    """
    import jax

    ndim = len(x.shape)
    if len(names) != ndim:
        raise InputError(
            f"names={tuple(names)!r} names {len(names)} dimensions, but x has {ndim}: shape {tuple(x.shape)}. "
            "Give one logical axis name (or None) a dimension."
        )
    around = current_mesh()
    mesh = around if mesh is None else mesh
    if mesh is None:
        return x
    if around is not None and around.manual_axes:
        from capibara.compose.backends.meshes import free_axes

        free = free_axes(mesh)
        if free is None:
            return x
        spec = (rules or AxisRules()).spec(names, free, x.shape, kind="activations")
        return jax.lax.with_sharding_constraint(x, spec)
    spec = (rules or AxisRules()).spec(names, mesh, x.shape, kind="activations")
    return jax.lax.with_sharding_constraint(x, jax.sharding.NamedSharding(mesh, spec))


def param_shardings(params: Any, axes: Any, mesh: Any, rules: AxisRules | None = None) -> Any:
    """A ``NamedSharding`` for each array of a tree, by the logical names of its dimensions.

    Equivalent JAX: ``NamedSharding(mesh, rules.spec(names, mesh, x.shape))`` of each, by ``jax.tree.map``.

    Args:
        params: arrays, or anything with ``shape``.
        axes: nested like ``params``, with a tuple of names (or None: replicated) for each array; None replicates all.
        mesh: real or abstract.
        rules: by default :class:`AxisRules`' own table for parameters.

    Raises:
        ConfigError: an unknown name, or the wrong number of names.
    """
    import jax

    rules = rules or AxisRules()

    def one(leaf: Any, names: Sequence[str | None] | None) -> Any:
        spec = rules.spec(names or (None,) * len(leaf.shape), mesh, leaf.shape)
        return jax.sharding.NamedSharding(mesh, spec)

    if axes is None:
        return jax.tree.map(lambda leaf: one(leaf, None), params)
    return jax.tree.map(one, params, axes)
