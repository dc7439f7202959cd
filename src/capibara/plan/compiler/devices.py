"""Meshes of abstract devices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from capibara.plan.errors import PlanError
from capibara.plan.slices import Slice

if TYPE_CHECKING:
    import numpy as np

__all__ = ["arrange_devices", "describe_mesh"]


def arrange_devices(sizes: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Arrange abstract or real devices in an array of these sizes, in the same way.

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


def describe_mesh(
    target: Slice, axes: tuple[tuple[str, int], ...]
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """A ``jax.sharding.Mesh`` over the devices of a slice, and the place of each on the grid of chips.

    The devices are arranged as in training on a real slice: by :func:`arrange_devices`.

    Returns:
      The mesh, and the coordinates of its devices in the order of the mesh; in the core view the last coordinate is the
      number of the core.

    Raises:
      PlanError: the mesh has another number of devices than the slice, or the compiler does not know the topology.
    """
    from jax.experimental import topologies
    from jax.sharding import Mesh

    sizes = tuple(size for _, size in axes)
    if math.prod(sizes) != target.num_devices:
        raise PlanError(
            f"mesh={dict(axes)} has {math.prod(sizes)} devices, but {target} has {target.num_devices}"
        )
    try:
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=target.topology_name, **target.topology_options
        )
    except Exception as error:
        raise PlanError(f"the TPU compiler does not know {target.topology_name!r}: {error}") from error
    devices = list(topology.devices)
    grid = arrange_devices(sizes, devices)
    several = len({tuple(d.coords) for d in devices}) < len(devices)
    places = tuple(
        (*map(int, d.coords), int(d.core_on_chip)) if several else tuple(map(int, d.coords))
        for d in grid.flat
    )
    return Mesh(grid, tuple(axis for axis, _ in axes)), places
