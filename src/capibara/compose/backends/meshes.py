"""Arrays spread over several devices by ``device_mesh=`` and ``tensor_split=``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from capibara.compose.errors import InputError

__all__ = ["Free", "free_axes", "split_over"]


def split_over(
    backend: Any, shape: tuple[int, ...], device_mesh: Any, tensor_split: Sequence[int | None] | None
) -> Any:
    """The ``NamedSharding`` of an array of ``shape``.

    Args:
        device_mesh: a ``Mesh``, a shape over the first devices there are, or None for the backend's own mesh.
        tensor_split: for each mesh axis the dimension that is split over it, or None; by default dimension i over
            axis i.

    Raises:
        InputError: a dimension is not there, is split twice, or cannot be cut into equal parts.
        CompileError: there are not enough devices.
    """
    import jax

    from capibara.compose.backends.jax_backend import make_mesh

    own = backend.mesh
    if device_mesh is None:
        mesh = own
    elif own is not None and not hasattr(device_mesh, "axis_names") and own.axis_sizes == tuple(device_mesh):
        mesh = own  # the same mesh, with the names that the backend's parameters use
    else:
        mesh = make_mesh(device_mesh, ("data", "model", *(f"axis_{i}" for i in range(2, 16))), None)
    names = mesh.axis_names
    if tensor_split is None:
        places: list[int | None] = [i if i < len(shape) else None for i in range(len(names))]
    else:
        places = list(tensor_split)
        if len(places) > len(names):
            raise InputError(
                f"tensor_split={tuple(tensor_split)!r} names {len(places)} dimensions, device_mesh has "
                f"{len(names)} axes"
            )
    spec: list[str | None] = [None] * len(shape)
    for axis, place in zip(names, places, strict=False):
        if place is None:
            continue
        if isinstance(place, bool) or not isinstance(place, int) or not -len(shape) <= place < len(shape):
            raise InputError(f"tensor_split: {place!r} is not a dimension of an array of shape {shape}")
        place %= len(shape)
        if spec[place] is not None:
            raise InputError(f"tensor_split={tuple(places)!r} splits dimension {place} twice")
        size = mesh.shape[axis]
        if shape[place] % size:
            raise InputError(
                f"dimension {place} of shape {shape} cannot be split into {size} equal parts: choose other sizes, "
                "or tensor_split="
            )
        spec[place] = axis
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


@dataclass(frozen=True)
class Free:
    """The axes of a mesh that ``jax.shard_map`` can take here; :meth:`~capibara.config.axes.AxisRules.spec` reads it.

    Attributes:
        shape: size by name.
        mesh: the mesh, where nothing is around; otherwise None, and ``shard_map`` takes the mesh that is around.
        inside: whether other axes of it are taken.
    """

    shape: Mapping[str, int]
    mesh: Any
    inside: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """What ``jax.shard_map`` is given of it."""
        # Inside another one JAX has no types for residuals that vary over its axes (0.10 to 0.12).
        return {"mesh": self.mesh, "axis_names": set(self.shape), "check_vma": not self.inside}


def free_axes(mesh: Any) -> Free | None:
    """The axes of ``mesh`` that can be taken here: all of them where nothing is around.

    Inside the ``shard_map`` of a pipeline (:mod:`capibara.core.pipeline`), which takes the axis of its stages and those
    with one device, it is the other ones. None where the mesh that is around is another one, or has explicit axes, or
    where all its axes are taken.
    """
    import jax

    around = jax.sharding.get_abstract_mesh()
    if around.empty:
        return Free(dict(mesh.shape), mesh)
    if around.axis_names != mesh.axis_names or around.axis_sizes != mesh.axis_sizes:
        return None
    kinds = dict(zip(around.axis_names, around.axis_types, strict=True))
    free = {name: size for name, size in mesh.shape.items() if kinds[name] == jax.sharding.AxisType.Auto}
    taken = {name: size for name, size in mesh.shape.items() if name not in free}
    if not free or any(
        kinds[name] != jax.sharding.AxisType.Manual or (size > 1 and name != "pipeline")
        for name, size in taken.items()
    ):
        return None
    return Free(free, None, bool(taken))
