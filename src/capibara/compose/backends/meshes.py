"""Arrays spread over several devices by ``device_mesh=`` and ``tensor_split=``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from capibara.compose.errors import InputError

__all__ = ["is_free", "split_over"]


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


def is_free(mesh: Any) -> bool:
    """Whether ``mesh`` can be taken here: nothing is around, or the same axes, all of them automatic."""
    import jax

    around = jax.sharding.get_abstract_mesh()
    if around.empty:
        return True
    automatic = all(kind == jax.sharding.AxisType.Auto for kind in around.axis_types)
    return automatic and around.axis_names == mesh.axis_names and around.axis_sizes == mesh.axis_sizes
