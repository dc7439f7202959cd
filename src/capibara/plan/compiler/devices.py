"""Meshes of abstract devices."""

from __future__ import annotations

import math
from typing import Any

from capibara.hardware import build_mesh
from capibara.plan.errors import PlanError
from capibara.plan.targets import Target

__all__ = ["describe_mesh"]


def describe_mesh(
    target: Target, axes: tuple[tuple[str, int], ...]
) -> tuple[Any, tuple[tuple[int, ...], ...]]:
    """A ``jax.sharding.Mesh`` over the devices of a slice or host, and the place of each on the grid of chips.

    The devices are arranged as in training on real ones: by :func:`capibara.hardware.build_mesh`.

    Returns:
      The mesh, and the coordinates of its devices in the order of the mesh; in the core view the last coordinate is the
      number of the core. GPUs of a host have one coordinate, their number.

    Raises:
      PlanError: the mesh has another number of devices than the target, or the compiler does not know the topology.
    """
    from jax.experimental import topologies

    sizes = tuple(size for _, size in axes)
    if math.prod(sizes) != target.num_devices:
        raise PlanError(
            f"mesh={dict(axes)} has {math.prod(sizes)} devices, but {target} has {target.num_devices}"
        )
    try:
        topology = topologies.get_topology_desc(
            platform=target.platform, topology_name=target.topology_name, **target.topology_options
        )
    except Exception as error:
        raise PlanError(f"{target.compiler} does not know {target.topology_name!r}: {error}") from error
    devices = list(topology.devices)
    mesh = build_mesh(sizes, [axis for axis, _ in axes], devices)
    if target.platform == "cuda":
        return mesh, tuple((int(d.id),) for d in mesh.devices.flat)
    several = len({tuple(d.coords) for d in devices}) < len(devices)
    places = tuple(
        (*map(int, d.coords), int(d.core_on_chip)) if several else tuple(map(int, d.coords))
        for d in mesh.devices.flat
    )
    return mesh, places
