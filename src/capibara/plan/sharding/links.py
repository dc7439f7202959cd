"""How long collectives take on a mesh, in seconds, from the links of a chip.

Each mesh axis is taken to run along one closed ring of the grid of chips, whose links carry both ways at once, so
that a device sends over two of them. An all-gather (or reduce-scatter) of ``b`` bytes over ``n`` devices then takes
``b·(n−1)/n`` bytes through ``2·link`` bytes a second; over ``k`` axes at once, through ``2·k·link``; an all-reduce
takes twice as long, being one after the other. Each hop adds about a microsecond (model and hop: "How to Scale Your
Model", part 2 and "sharded matrices", Google DeepMind). What a slice's real shape does to this is for the compiled
plan (:mod:`capibara.plan`), not for this estimate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from capibara.hardware import Chip, ChipError
from capibara.plan.errors import PlanError

__all__ = ["HOP_SECONDS", "Links", "links_of"]

HOP_SECONDS = 1e-6


@dataclass(frozen=True)
class Links:
    """A mesh's axes and what each carries.

    Attributes:
      sizes: devices along each axis, by name.
      bandwidth: bytes a second that a device sends along one axis (both directions of its ring).
      hop_seconds: delay of one hop.
    """

    sizes: Mapping[str, int]
    bandwidth: float
    hop_seconds: float = HOP_SECONDS

    def ways(self, axes: Iterable[str]) -> int:
        """Devices over these axes."""
        return math.prod(self.sizes[a] for a in axes)

    def moved(self, size: float, axes: Iterable[str]) -> float:
        """Bytes that one device receives in an all-gather of ``size`` bytes in all."""
        n = self.ways(axes)
        return size * (n - 1) / n

    def gather(self, size: float, axes: Iterable[str], times: int = 1) -> float:
        """Seconds of ``times`` all-gathers (or reduce-scatters) that together move ``size`` bytes."""
        wide = [a for a in axes if self.sizes[a] > 1]
        if not wide or size <= 0:
            return 0.0
        hops = sum(max(1, self.sizes[a] // 2) for a in wide)
        return self.moved(size, wide) / (len(wide) * self.bandwidth) + times * hops * self.hop_seconds

    def reduce(self, size: float, axes: Iterable[str], times: int = 1) -> float:
        """Seconds of ``times`` all-reduces that together take ``size`` bytes on each device."""
        return 2 * self.gather(size, axes, times)


def links_of(chip: Chip, sizes: Mapping[str, int], link_bandwidth: float | None = None) -> Links:
    """The links of a mesh of such chips.

    Args:
      link_bandwidth: bytes a second, one way, over one link, instead of the chip's.

    Raises:
      ChipError: the chip's is not known.
    """
    if link_bandwidth is not None:
        number = isinstance(link_bandwidth, int | float) and not isinstance(link_bandwidth, bool)
        if not number or not 0 < link_bandwidth < math.inf:
            raise PlanError(
                f"link_bandwidth={link_bandwidth!r}: expected bytes a second above 0, such as 45e9"
            )
        return Links(dict(sizes), 2 * link_bandwidth)
    if chip.link_bandwidth is not None:
        return Links(dict(sizes), 2 * chip.link_bandwidth)
    if chip.interconnect_bandwidth is not None:  # both ways together, over all links
        if chip.kind == "gpu":  # to a switch: all serve whichever axis is used
            return Links(dict(sizes), chip.interconnect_bandwidth / 2)
        if chip.links_per_chip:  # two to an axis of the grid
            return Links(dict(sizes), chip.interconnect_bandwidth / chip.links_per_chip)
    raise ChipError(
        f"{chip.title}: the bandwidth of its links is not known. Give link_bandwidth=… (bytes a second, one way)"
    )
