"""The mesh of a run on fewer or more devices than before.

Only the axes that shard the batch and nothing else, ``data`` and ``fsdp``, change their size; the others keep theirs as
long as there are enough devices, so that each device holds as much of a matrix as before. With fewer devices than
those axes have together, these shrink to divisors of their sizes, the outer ones first.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache

from capibara.errors import ConfigError
from capibara.sharding.layout import Layout

__all__ = ["mesh_sizes", "resized"]

_ELASTIC = ("data", "fsdp")


@lru_cache(maxsize=256)  # a run that may be scaled asks before every step
def mesh_sizes(layout: Layout, rows: int, most: int) -> tuple[int, ...]:
    """The numbers of devices that a mesh like the layout's can have, in ascending order.

    Args:
      rows: of one microbatch, which the axes ``data``, ``fsdp`` and ``expert`` share equally.
      most: the number of devices that there are.
    """
    return tuple(sorted(_meshes(layout, rows, most)))


def resized(layout: Layout, rows: int, devices: int) -> Layout:
    """The layout with a mesh of exactly so many devices.

    Raises:
      ConfigError: there is none; the message says which numbers are possible.
    """
    found = _meshes(layout, rows, devices)
    if devices not in found:
        known = ", ".join(map(str, found)) or "none"
        raise ConfigError(
            f"devices: got {devices}, expected a number that {rows} rows of a microbatch can be divided among on a "
            f"mesh like {_words(layout)}: up to here {known}"
        )
    return replace(layout, mesh=found[devices])


def _meshes(layout: Layout, rows: int, most: int) -> dict[int, tuple[tuple[str, int], ...]]:
    """Number of devices → mesh."""
    fixed = [(axis, size) for axis, size in layout.mesh if axis not in _ELASTIC]
    base = math.prod(size for _, size in fixed)
    expert = layout.axis_sizes.get("expert", 1)
    found = {}
    for times in range(1, most // base + 1):
        if rows % (times * expert) == 0:
            found[base * times] = _mesh(layout, dict(fixed), times)
    if base <= most:
        return found
    for sizes in itertools.product(*(_divisors(size) for _, size in fixed)):
        chosen = dict(zip((axis for axis, _ in fixed), sizes, strict=True))
        if math.prod(sizes) <= most and rows % chosen.get("expert", 1) == 0:
            # Of equally many devices the combination that comes first has the larger inner axes.
            found.setdefault(math.prod(sizes), _mesh(layout, chosen, 1))
    return found


def _mesh(layout: Layout, fixed: dict[str, int], times: int) -> tuple[tuple[str, int], ...]:
    """The mesh whose ``data`` and ``fsdp`` have ``times`` devices together."""
    old = layout.axis_sizes
    data, fsdp = old.get("data"), old.get("fsdp")
    if fsdp is None:
        new = {"data": times}
    elif data is None or (data == 1 and fsdp > 1):
        new = {"data": 1, "fsdp": times}
    else:
        new = {"fsdp": math.gcd(fsdp, times)}
        new["data"] = times // new["fsdp"]
    if data is None and fsdp is None and times > 1:
        return (("data", times), *((axis, fixed[axis]) for axis, _ in layout.mesh))
    return tuple((axis, fixed[axis] if axis in fixed else new[axis]) for axis, _ in layout.mesh)


def _divisors(size: int) -> list[int]:
    """Smallest first."""
    return [n for n in range(1, size + 1) if size % n == 0]


def _words(layout: Layout) -> str:
    return " × ".join(f"{axis} {size}" for axis, size in layout.mesh)
