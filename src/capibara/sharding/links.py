"""How long collectives take, in seconds, from the links of a chip: the one model that all estimates share.

An all-gather (or reduce-scatter) of ``b`` bytes in all over ``n`` devices sends ``b·(n−1)/n`` bytes over the links that
a device has to the others, and each hop adds about a microsecond; an all-reduce is a reduce-scatter and an all-gather,
one after the other ("How to Scale Your Model", parts 2 and 3, Google DeepMind).

:class:`Group` is that formula. Who calls it differs in what is known of the links: the prediction of a compiled program
knows the place of every device on the grid of chips (:mod:`capibara.plan.time`); estimates without a program
(:mod:`capibara.plan.search.analytic`, :mod:`capibara.plan.step`, :mod:`capibara.plan.sharding`) take each mesh axis to
run along one ring of the grid, whose links carry both ways at once (:class:`Links`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from capibara.errors import ConfigError
from capibara.hardware import Chip, ChipError

__all__ = ["HOP_SECONDS", "Group", "Links", "links_of"]

HOP_SECONDS = 1e-6
"""Delay of a message over one link, besides its bytes."""


@dataclass(frozen=True)
class Group:
    """Devices that exchange data with each other.

    Attributes:
      size: how many they are.
      bandwidth: bytes a second that one of them sends, over all the links that it uses.
      hops: links to the farthest of them.
      hop_seconds: delay of one hop.
    """

    size: int
    bandwidth: float
    hops: float = 0
    hop_seconds: float = HOP_SECONDS

    def moved(self, size: float) -> float:
        """Bytes that one device receives in an all-gather of ``size`` bytes in all."""
        return size * (self.size - 1) / max(self.size, 1)

    def gather(self, size: float, *, times: int = 1, at_least: float = 0.0) -> float:
        """Seconds of ``times`` all-gathers (or reduce-scatters) that together move ``size`` bytes.

        Args:
          at_least: seconds that the bytes take elsewhere meanwhile, such as in the devices' memory.
        """
        if self.size < 2 or size <= 0:
            return 0.0
        return max(self.moved(size) / self.bandwidth, at_least) + times * self.hops * self.hop_seconds

    def reduce(self, size: float, *, times: int = 1, at_least: float = 0.0) -> float:
        """Seconds of ``times`` all-reduces that together take ``size`` bytes on each device."""
        return 2 * self.gather(size, times=times, at_least=at_least)


@dataclass(frozen=True)
class Links:
    """A mesh whose axes run along one closed ring each, and what these carry.

    Attributes:
      sizes: devices along each axis, by name.
      bandwidth: bytes a second that a device sends along one axis (both directions of its ring).
      hop_seconds: delay of one hop.
      switched: whether all axes go through one switch, to which a device has that bandwidth in all.
    """

    sizes: Mapping[str, int]
    bandwidth: float
    hop_seconds: float = HOP_SECONDS
    switched: bool = False

    def ways(self, axes: Iterable[str]) -> int:
        """Devices over these axes."""
        return math.prod(self.sizes[a] for a in axes)

    def over(self, axes: Iterable[str]) -> Group:
        """The devices along these axes: the links of all of them are used at once.

        Two neighbours share one link; a longer ring is sent both ways round.
        """
        wide = [self.sizes[a] for a in axes if self.sizes[a] > 1]
        rings = 1.0 if self.switched else sum(min(size - 1, 2) / 2 for size in wide)
        hops = sum(max(1, size // 2) for size in wide)
        return Group(math.prod(wide), (rings or 1.0) * self.bandwidth, hops, self.hop_seconds)

    def moved(self, size: float, axes: Iterable[str]) -> float:
        """As :meth:`Group.moved`, over these axes."""
        return self.over(axes).moved(size)

    def gather(self, size: float, axes: Iterable[str], times: int = 1) -> float:
        """As :meth:`Group.gather`, over these axes."""
        return self.over(axes).gather(size, times=times)

    def reduce(self, size: float, axes: Iterable[str], times: int = 1) -> float:
        """As :meth:`Group.reduce`, over these axes."""
        return self.over(axes).reduce(size, times=times)


def links_of(chip: Chip, sizes: Mapping[str, int], link_bandwidth: float | None = None) -> Links:
    """The links of a mesh of such chips.

    Args:
      link_bandwidth: bytes a second, one way, over one link, instead of the chip's.

    Raises:
      ChipError: the chip's is not known.
      ConfigError: ``link_bandwidth`` is no rate.
    """
    if link_bandwidth is not None:
        number = isinstance(link_bandwidth, int | float) and not isinstance(link_bandwidth, bool)
        if not number or not 0 < link_bandwidth < math.inf:
            raise ConfigError(
                f"link_bandwidth={link_bandwidth!r}: expected bytes a second above 0, such as 45e9"
            )
        return Links(dict(sizes), 2 * link_bandwidth)
    if chip.link_bandwidth is not None:
        return Links(dict(sizes), 2 * chip.link_bandwidth)
    if chip.interconnect_bandwidth is not None:  # both ways together, over all links
        if chip.kind == "gpu":  # to a switch: all serve whichever axis is used
            return Links(dict(sizes), chip.interconnect_bandwidth / 2, switched=True)
        if chip.links_per_chip:  # two to an axis of the grid
            return Links(dict(sizes), chip.interconnect_bandwidth / chip.links_per_chip)
    raise ChipError(
        f"{chip.title}: the bandwidth of its links is not known. Give link_bandwidth=… (bytes a second, one way)"
    )
