"""Several slices of the same kind as a target: ``"2xv5p:4x4x4"``.

The step is compiled for one slice with its share of the batch; the exchange of gradients over the network between
slices is added to its time (:mod:`capibara.plan.time.network`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan.candidate import Candidate
from capibara.plan.errors import PlanError
from capibara.plan.gpus import GpuHost, is_gpu_name
from capibara.plan.search.analytic import count_parameters
from capibara.plan.sizes import size_text
from capibara.plan.slices import Slice, parse_slice
from capibara.plan.targets import Target
from capibara.plan.time.network import Exchange
from capibara.plan.work import TrainWork, Work
from capibara.sharding import Layout

__all__ = ["MOST_SLICES", "Several"]

MOST_SLICES = 1024
_TEXT = re.compile(r"(\d{1,9})\s*[x×]\s*([a-z][a-z0-9]*[:-].*)", re.IGNORECASE)
_ITEM_BYTES = {"float64": 8}
_GBPS = 1e9 / 8


@dataclass(frozen=True)
class Several:
    """Slices of one kind.

    Attributes:
      target: one of them.
      count: how many.
      bandwidth: bytes a second, one way, that a chip has of the network between them.
      source: where that figure comes from.
    """

    target: Slice
    count: int
    bandwidth: float
    source: str

    @classmethod
    def read(cls, topology: str | Target, view: str | None = None, dcn_gbps: Any = None) -> Several | None:
        """Read ``"2xv5p:4x4x4"`` or ``"4xv5e-256"``; None if it names one slice.

        Args:
          topology, view: as for :func:`capibara.plan.parse_slice`, with a number of slices before it.
          dcn_gbps: gigabits a second, one way, that a chip has of the network; by default as published for the chip.

        Raises:
          PlanError: a number of slices below 1 or above 1,024; ``dcn_gbps`` is not a rate, or given for one slice, or
            needed because none is published. TopologyError, PlanError: as ``parse_slice``.
        """
        if dcn_gbps is not None and (
            isinstance(dcn_gbps, bool) or not isinstance(dcn_gbps, Real) or not 0 < float(dcn_gbps) <= 1e6  # pyright: ignore[reportArgumentType] (a Real has __float__)
        ):
            raise PlanError(
                f"dcn_gbps={dcn_gbps!r} must be a number of gigabits a second above 0, such as 50"
            )
        match = _TEXT.fullmatch(topology.strip()) if isinstance(topology, str) else None
        if match is None:
            if dcn_gbps is not None and (isinstance(topology, GpuHost) or is_gpu_name(topology)):
                raise PlanError(
                    f"dcn_gbps={dcn_gbps!r} is the network between several slices of TPUs, and GPUs are planned for "
                    "one host. Leave it out"
                )
            if dcn_gbps is not None:
                raise PlanError(
                    f"dcn_gbps={dcn_gbps!r} is the network between several slices: write 2x{topology} for two"
                )
            return None
        count = int(match[1])
        if not 1 <= count <= MOST_SLICES:
            raise PlanError(f"topology={topology!r}: got {count} slices, expected 1 to {MOST_SLICES}")
        if is_gpu_name(match[2]):
            raise PlanError(f"topology={topology!r}: GPUs are planned for one host. Write {match[2].strip()}")
        target = parse_slice(match[2], view)
        if dcn_gbps is not None:
            return cls(target, count, float(dcn_gbps) * _GBPS, "given")
        chip = target.chip
        if chip.dcn_bandwidth is None:
            raise PlanError(
                f"topology={topology!r}: the bandwidth of {chip.title}'s network between slices is not known. Give "
                "it: dcn_gbps (--dcn-gbps), in gigabits a second for each chip"
            )
        source = chip.source("dcn_bandwidth")
        return cls(target, count, chip.dcn_bandwidth, "" if source is None else source.title)

    @property
    def text(self) -> str:
        """``"2xv5p:4x4x4"``."""
        return f"{self.count}x{self.target.text}"

    def share(self, task: Work) -> TrainWork:
        """One slice's share of a training step.

        Raises:
          PlanError: it is a step function, whose shapes are fixed; or the batch does not divide.
        """
        if not isinstance(task, TrainWork):
            raise PlanError(
                f"topology={self.text!r}: a step function is compiled as it is. Export it with one slice's share of "
                f"the batch (step_work) and plan it on {self.target.text}"
            )
        config = task.config
        if config.train.batch_size % self.count:
            raise PlanError(
                f"train.batch_size={config.train.batch_size} must be a multiple of the {self.count} slices of "
                f"{self.text}"
            )
        rows = config.train.batch_size // self.count
        steps = config.train.gradient_accumulation_steps
        train = config.train.replace(
            batch_size=rows, gradient_accumulation_steps=steps if rows % steps == 0 else 1
        )
        return TrainWork(config.replace(train=train))

    def exchange(self, config: ModularModelConfig, layout: Layout) -> Exchange:
        """What a step exchanges: the gradient of every trained parameter, in float32, once for each microbatch."""
        each = _ITEM_BYTES.get(config.precision.param_dtype, 4)
        # XLA sums in the loop over microbatches, not after it.
        size = count_parameters(config).trained * each * layout.microbatches
        pieces = config.model.num_layers * layout.microbatches
        return Exchange(
            slices=self.count,
            bytes=size / self.target.num_chips,
            bandwidth=self.bandwidth,
            pieces=pieces,
            source=self.source,
        )

    def joined(self, candidates: Iterable[Candidate], config: ModularModelConfig) -> list[Candidate]:
        """Candidates of one slice's share as those of all slices: the fastest that was compiled, then the others.

        Args:
          config: the share.
        """
        found = []
        for one in candidates:
            exchange = self.exchange(config, one.layout)
            found.append(
                replace(
                    one,
                    slices=self.count,
                    exchange=exchange,
                    time=exchange.added_to(one.time),
                    tokens=None if one.tokens is None else one.tokens * self.count,
                    flops=None if one.flops is None else one.flops * self.count,
                )
            )
        found.sort(key=lambda each: each.step_seconds)
        # As in the plan of one slice, the best is not one that was only scheduled.
        best = next((n for n, each in enumerate(found) if not each.scheduled), 0)
        return [found[best], *found[:best], *found[best + 1 :]]

    def notes(self, best: Candidate) -> list[str]:
        """What was assumed of the network."""
        exchange = best.exchange
        if exchange is None or self.count == 1:
            return []
        return [
            f"{self.count} slices: the step is that of one with its share of the batch. Added are "
            f"{exchange.seconds:.3g} s for the gradients, {size_text(round(exchange.bytes))} a chip in float32, over "
            f"the data centre's network at {self.bandwidth / _GBPS:.3g} Gbit/s a chip [{self.source}], none of it "
            "hidden behind work (--dcn-gbps: another rate)"
        ]
