"""Meshes of devices: the one place that decides which device stands where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from jax.sharding import Mesh

__all__ = ["arrange_devices", "build_mesh"]


def arrange_devices(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arrange real or described devices in an array of these sizes.

    Each mesh axis is mapped to whole axes of the grid of chips if possible
    (``jax.experimental.mesh_utils.create_device_mesh``); devices without a position on a grid are in their own order.
    The devices of several slices are arranged slice by slice, one after another along the first axis, so that only
    this axis crosses the network between them (as ``create_hybrid_device_mesh`` does with its first axis).
    """
    import numpy as np
    from jax.experimental import mesh_utils

    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    if len(slices) > 1 and sizes[0] % len(slices) == 0 and len({len(each) for each in slices.values()}) == 1:
        inside = (sizes[0] // len(slices), *sizes[1:])
        return np.concatenate([arrange_devices(inside, slices[number]) for number in sorted(slices)])
    try:
        return mesh_utils.create_device_mesh(tuple(sizes), list(devices), allow_split_physical_axes=True)
    except (NotImplementedError, ValueError, AssertionError):
        # Two devices a chip, or sizes that no split of the grid gives: the order of the devices themselves.
        return np.array(devices).reshape(tuple(sizes))


def build_mesh(sizes: Sequence[int], names: Sequence[str], devices: Sequence[Any]) -> Mesh:
    """A mesh of real or described devices, as many as ``sizes`` has, arranged by :func:`arrange_devices`.

    A plan and a run whose meshes are built here have the same device at the same place, so that the program compiled
    for one is that of the other. All axes are automatic: XLA's partitioner shards along them.

    Equivalent JAX: ``jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)``, which
    refuses sizes that the grid of chips does not give.
    """
    from jax.sharding import Mesh

    return Mesh(arrange_devices(sizes, devices), tuple(names))
