"""Meshes of abstract devices."""

from __future__ import annotations

import math
from typing import Any

from capibara.hardware import build_mesh
from capibara.plan.errors import PlanError
from capibara.plan.slices import Slice

__all__ = ["describe_mesh"]


def describe_mesh(
    target: Slice, axes: tuple[tuple[str, int], ...]
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """A ``jax.sharding.Mesh`` over the devices of a slice, and the place of each on the grid of chips.

    The devices are arranged as in training on a real slice: by :func:`capibara.hardware.build_mesh`.

    Returns:
      The mesh, and the coordinates of its devices in the order of the mesh; in the core view the last coordinate is the
      number of the core.

    Raises:
      PlanError: the mesh has another number of devices than the slice, or the compiler does not know the topology.
    """
    from jax.experimental import topologies

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
    mesh = build_mesh(sizes, [axis for axis, _ in axes], devices)
    several = len({tuple(d.coords) for d in devices}) < len(devices)
    places = tuple(
        (*map(int, d.coords), int(d.core_on_chip)) if several else tuple(map(int, d.coords))
        for d in mesh.devices.flat
    )
    return mesh, places
