"""The exchange of gradients between slices, over the data centre's network (DCN).

Every slice computes the gradients of its share of the batch. Within a slice they are summed over its links (a
reduce-scatter, which is in the slice's own program), so that each chip holds an equal share of the sums; then the chips
with the same share, one in each slice, sum it over the network: a reduce-scatter and an all-gather between them, in
which each sends ``2 (S - 1) / S`` of its share for ``S`` slices. What a slice needs whole it gathers over its links
again. XLA does so for an all-reduce over devices of several slices (Cloud TPU documentation, "Multislice").

Nothing of the exchange is taken to be hidden behind work: published runs slow down by about as much, or more
(``docs/calibration.md``). The lower end of a step's range has all of it beside the backward pass but that of the layer
whose gradients come last.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from capibara.plan.time.prediction import Part, StepTime
from capibara.sharding import Group

__all__ = ["Exchange"]

# A backward pass has twice the operations of a forward pass.
_BACKWARD = 2 / 3


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What crosses the network in a step.

    Attributes:
      slices: how many there are.
      bytes: of gradients that a chip has to sum with those of the other slices, in one step.
      bandwidth: bytes a second that a chip sends, one way.
      pieces: parts that are exchanged one after another as they are computed: layers × microbatches.
      source: where the bandwidth comes from.
    """

    slices: int
    bytes: float
    bandwidth: float
    pieces: int = 1
    source: str = ""

    @property
    def seconds(self) -> float:
        """Of a step, if nothing of it is hidden."""
        return Group(self.slices, self.bandwidth).reduce(self.bytes)

    def added_to(self, time: StepTime) -> StepTime:
        """The time of a step with the exchange, from that of one slice."""
        whole = self.seconds
        if not whole:
            return time
        left = max(whole - _BACKWARD * time.low, whole / max(1, self.pieces))
        part = Part("gradients between slices", whole, "network")
        return replace(
            time,
            seconds=time.seconds + whole,
            low=time.low + left,
            high=time.high + whole,
            communication=time.communication + whole,
            parts=tuple(sorted((*time.parts, part), key=lambda each: -each.seconds)),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; bytes, bytes a second, seconds."""
        return {**asdict(self), "seconds": self.seconds}
