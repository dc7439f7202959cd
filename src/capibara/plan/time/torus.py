"""The places of a mesh's devices on the grid of chips, and the speed of data exchange between groups of them.

Every chip has one link each way along each axis of the grid, so a collective along an axis that closes to a ring can
send over two links per chip; along an open line it is bound by the chip at the end, which has one. A collective over
several axes uses the links of all of them at once, like the compiler's own algorithms ("3DAllGather…"). Formulas:
"How to Scale Your Model", part 3, on the time of collectives from bytes and links.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from capibara.plan.errors import PlanError
from capibara.plan.slices import Slice

__all__ = ["Ring", "Route", "Torus", "places_on_grid"]

_MOST_PAIRS = 4096


def places_on_grid(slice: Slice, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[int, ...], ...]:
    """Coordinates of the devices of a mesh, in the mesh's order, as by default in ``jax.make_mesh``.

    Each mesh axis, the last one first, is mapped to as many whole axes of the grid as possible; if the sizes do not
    allow that, devices are placed in their own order, the first axis of the grid fastest, the two cores of a chip
    next to each other.
    """
    shape = list(slice.shape)
    cores = slice.devices_per_chip
    if cores == 1:
        left = dict(enumerate(shape))
        owned: list[tuple[int, ...]] = [()] * len(mesh)
        for number, (_, size) in reversed(list(enumerate(mesh))):
            choices = (
                axes
                for count in range(len(shape), 0, -1)
                for axes in itertools.combinations(left, count)
                if math.prod(left[axis] for axis in axes) == size
            )
            found = next(choices, None)
            if found is None and size > 1:
                break
            owned[number] = found or ()
            for axis in owned[number]:
                del left[axis]
        else:
            order = [axis for axes in owned for axis in axes]
            order += [axis for axis in range(len(shape)) if axis not in order]
            index = np.indices([shape[axis] for axis in order]).reshape(len(order), -1)
            return tuple(map(tuple, index[np.argsort(order)].T.tolist()))
    index = np.indices([*shape[::-1], cores]).reshape(len(shape) + 1, -1)
    coordinates = np.concatenate([index[-2::-1], index[-1:]]) if cores > 1 else index[-2::-1]
    return tuple(map(tuple, coordinates.T.tolist()))


@dataclass(frozen=True)
class Ring:
    """A group along one axis of the grid.

    Attributes:
      axis: the axis of the grid; the one after the last is that of the cores within a chip.
      size: chips of the group along it.
      closed: whether it closes to a ring.
      spacing: distance between members in chips; the chips between them share the links.
    """

    axis: int
    size: int
    closed: bool
    spacing: int = 1

    @property
    def hops(self) -> int:
        """Number of links to the farthest chip."""
        reach = self.size // 2 if self.closed else self.size - 1
        return reach * self.spacing


@dataclass(frozen=True)
class Route:
    """The use of links by the pairs of a permute.

    Attributes:
      load: number of messages on the busiest link.
      hops: links of the longest route.
      links: directions that are used, (axis, +1 or −1).
    """

    load: int
    hops: int
    links: frozenset[tuple[int, int]]


class Torus:
    """A slice with the devices of a mesh on it.

    Args:
      slice: the slice.
      mesh: names and sizes of the mesh's axes, slowest first.
      places: coordinates of each device in the mesh's order; by default those of :func:`places_on_grid`.

    Raises:
      PlanError: the mesh or the places do not match the slice.
    """

    def __init__(
        self,
        slice: Slice,
        mesh: tuple[tuple[str, int], ...],
        places: tuple[tuple[int, ...], ...] | None = None,
    ) -> None:
        count = math.prod(size for _, size in mesh)
        if count != slice.num_devices:
            raise PlanError(f"mesh={dict(mesh)} has {count} devices, but {slice} has {slice.num_devices}")
        self.slice = slice
        self.mesh = mesh
        coordinates = np.asarray(places if places is not None else places_on_grid(slice, mesh))
        dims = len(slice.shape)
        # Coordinates of flat pods have a third number that is always 0; a core's number comes last.
        keep = [
            column
            for column in range(coordinates.shape[1] if coordinates.ndim == 2 else 0)
            if column < dims or coordinates[:, column].any()
        ]
        coordinates = coordinates[:, keep] if coordinates.ndim == 2 else coordinates
        limits = [*slice.shape, slice.devices_per_chip][: len(keep)]
        if (
            coordinates.shape != (count, len(keep))
            or not dims <= len(keep) <= dims + 1
            or (coordinates < 0).any()
            or (coordinates >= np.asarray(limits)).any()
            or len(np.unique(coordinates, axis=0)) != count
        ):
            raise PlanError(
                f"places must be the coordinates of {count} different devices on {slice.grid}, in the mesh's order"
            )
        self.places = coordinates
        self._dims = dims
        self._rings = lru_cache(maxsize=4096)(self._find_rings)
        self._routes = lru_cache(maxsize=4096)(self._find_route)

    def rings(self, groups: tuple[tuple[int, ...], ...]) -> tuple[Ring, ...]:
        """Axes of the grid along which the worst group extends."""
        return self._rings(groups)

    def route(self, pairs: tuple[tuple[int, ...], ...]) -> Route:
        """How the messages of a permute share the links, each on the shortest route, axis by axis."""
        return self._routes(pairs)

    def _members(self, group: tuple[int, ...]) -> np.ndarray:
        members = np.asarray(group, dtype=np.int64)
        if members.size and members.max() >= len(self.places):
            raise PlanError(
                f"the program's collectives reach device {members.max()}, but mesh={dict(self.mesh)} has "
                f"{len(self.places)}: was it compiled for this mesh?"
            )
        return self.places[members]

    def _find_rings(self, groups: tuple[tuple[int, ...], ...]) -> tuple[Ring, ...]:
        worst: tuple[Ring, ...] = ()
        seen = set()
        for group in groups[:256]:
            members = self._members(group)
            found = []
            for axis in range(members.shape[1]):
                values = np.unique(members[:, axis])
                if len(values) < 2:
                    continue
                if axis >= self._dims:
                    found.append(Ring(axis, len(values), False))
                    continue
                whole = len(values) == self.slice.shape[axis]
                spacing = int(np.diff(values).min())
                found.append(
                    Ring(axis, len(values), whole and self.slice.wrap[axis] and len(values) > 2, spacing)
                )
            key = tuple(found)
            if key not in seen:
                seen.add(key)
                if not worst or self._rate(key) < self._rate(worst):
                    worst = key
        return worst

    @staticmethod
    def _rate(rings: tuple[Ring, ...]) -> float:
        return sum((2 if ring.closed else 1) / ring.spacing for ring in rings)

    def _find_route(self, pairs: tuple[tuple[int, ...], ...]) -> Route:
        loads: dict[tuple[int, int, tuple[int, ...]], int] = {}
        hops = 0
        links: set[tuple[int, int]] = set()
        for pair in pairs[:_MOST_PAIRS]:
            here, there = (list(map(int, place)) for place in self._members(pair))
            way = 0
            for axis in range(len(here)):
                if here[axis] == there[axis]:
                    continue
                if axis >= self._dims:
                    links.add((axis, 1))
                    continue
                size = self.slice.shape[axis]
                step = 1 if there[axis] > here[axis] else -1
                distance = abs(there[axis] - here[axis])
                if self.slice.wrap[axis] and size - distance < distance:
                    step, distance = -step, size - distance
                way += distance
                links.add((axis, step))
                for _ in range(distance):
                    key = (axis, step, tuple(here[: self._dims]))
                    loads[key] = loads.get(key, 0) + 1
                    here[axis] = (here[axis] + step) % size
            hops = max(hops, way)
        return Route(max(loads.values(), default=0), hops, frozenset(links))
