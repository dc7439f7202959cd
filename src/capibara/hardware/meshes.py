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
    """
    import numpy as np
    from jax.experimental import mesh_utils

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
