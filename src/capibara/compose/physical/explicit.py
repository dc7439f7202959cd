"""Arrays with explicit mesh axes, as created by ``jax.make_mesh``.

On such axes every primitive determines the sharding of its result, and some need it as an argument. Compiled models
leave shardings to the compiler and need automatic axes: calls convert their arguments (without moving data), and
convert their results back to the axes of the caller's mesh.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from capibara.compose.errors import InputError

__all__ = ["ExplicitAxesError", "automatic_mesh", "is_explicit", "refuse_explicit", "run_automatic"]


class ExplicitAxesError(InputError):
    """Arrays with explicit axes are in a trace, where they cannot be converted."""


def automatic_mesh(mesh: Any) -> Any:
    """The same devices under the same names, each axis automatic; the mesh itself if it is so already."""
    import jax

    if mesh is None or jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return mesh
    automatic = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)  # the default differs between versions
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=automatic)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)


def _explicit(mesh: Any) -> bool:
    import jax

    return not mesh.empty and jax.sharding.AxisType.Explicit in mesh.axis_types


def is_explicit(*trees: Any) -> bool:
    """Whether an array in nested dicts, or the surrounding ``jax.set_mesh``, has explicit axes."""
    import jax

    if _explicit(jax.sharding.get_abstract_mesh()):
        return True
    try:
        leaves = jax.tree.leaves(trees)
    except (
        TypeError,
        ValueError,
    ):  # keys that cannot be sorted: not what a model takes, as its check will say
        return False
    return any(isinstance(x, jax.Array) and _explicit(jax.typeof(x).sharding.mesh) for x in leaves)


def refuse_explicit(*trees: Any) -> None:
    """Raises an ExplicitAxesError if :func:`is_explicit`."""
    if is_explicit(*trees):
        raise ExplicitAxesError(
            "arrays with explicit mesh axes (jax.make_mesh) are traced here, and the model needs automatic ones: "
            "specify the sharding of the outputs, as in jax.sharding.auto_axes(compiled.apply, "
            "out_sharding={'output': PartitionSpec('data')}), or make the mesh by jax.sharding.Mesh(devices, names)"
        )


def run_automatic(function: Callable[..., Any], *trees: Any) -> Any:
    """``function(*trees)`` on automatic axes; the arrays of its result have explicit ones again.

    Raises:
        ExplicitAxesError: in a trace.
    """
    import jax
    from jax.core import Tracer

    meshes: list[Any] = []

    def convert(x: Any) -> Any:
        if not isinstance(x, jax.Array):
            return x
        if isinstance(x, Tracer):
            refuse_explicit(x)
            return x
        sharding = x.sharding
        if not isinstance(sharding, jax.sharding.NamedSharding) or not _explicit(sharding.mesh):
            return x
        meshes.append(sharding.mesh)
        return jax.device_put(x, jax.sharding.NamedSharding(automatic_mesh(sharding.mesh), sharding.spec))

    given = jax.tree.map(convert, trees)
    around: AbstractContextManager[Any] = nullcontext()
    if _explicit(jax.sharding.get_abstract_mesh()):
        try:
            ambient = jax.sharding.get_mesh()
        except ValueError:  # in a trace
            refuse_explicit()
            raise
        meshes.append(ambient)
        around = jax.set_mesh(automatic_mesh(ambient))
    with around:
        result = function(*given)
    own = {automatic_mesh(mesh): mesh for mesh in meshes}

    def back(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, jax.sharding.NamedSharding):
            return x
        mesh = own.get(x.sharding.mesh)
        return x if mesh is None else jax.device_put(x, jax.sharding.NamedSharding(mesh, x.sharding.spec))

    return jax.tree.map(back, result)
