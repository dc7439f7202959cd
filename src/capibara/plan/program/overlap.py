"""What a compiled program computes while its collectives are under way.

An asynchronous collective is two operations, a start and a done; what the schedule has between them runs meanwhile.
A synchronous one has nothing: the device waits. (How long each takes is :func:`capibara.plan.time.predict_step`'s.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from capibara.plan.program.facts import Collective, ProgramFacts

__all__ = ["Overlap", "OverlapByKind", "overlap_by_kind", "overlaps"]


@dataclass(frozen=True)
class Overlap:
    """A collective, and the work that the schedule has between its start and its end, in one run.

    Attributes:
      collective: of the program's :class:`~capibara.plan.program.ProgramFacts`.
      operations: fusions and kernels, those in loops as often as they run.
      flops: of matrix products, convolutions and kernels among them.
    """

    collective: Collective
    operations: int
    flops: int

    @property
    def hidden(self) -> bool:
        """Whether matrix products, convolutions or kernels with a cost of their own run meanwhile."""
        return self.flops > 0


@dataclass(frozen=True)
class OverlapByKind:
    """All collectives of one kind, in one execution of the program.

    Attributes:
      collectives: instructions in the program; asynchronous: those with a start and a done.
      bytes: of whole arrays, each as often as it is exchanged; hidden_bytes: of those that products run beside.
    """

    collectives: int
    asynchronous: int
    bytes: int
    hidden_bytes: int

    @property
    def hidden(self) -> float:
        """The share of the bytes that products run beside."""
        return self.hidden_bytes / self.bytes if self.bytes else 0.0


@dataclass
class _Work:
    operations: int = 0
    flops: int = 0

    def add(self, other: _Work, times: int = 1) -> None:
        self.operations += other.operations * times
        self.flops += other.flops * times


@dataclass
class _Reading:
    facts: ProgramFacts
    found: dict[int, _Work] = field(default_factory=dict)

    def line(self, events: Iterable[Any]) -> _Work:
        """The work of a line of the schedule in one run; the work beside each collective goes to ``found``."""
        total = _Work()
        under_way: dict[int, _Work] = {}
        for event in events:
            kind, index = event[0], event[1]
            if kind == "start":
                under_way[index] = self.found[index] = _Work()
                continue
            if kind == "done":
                under_way.pop(index, None)
                continue
            if kind == "loop":
                work = _Work()
                work.add(self.line(event[2]), index)
            elif kind == "piece":
                work = _Work(1, self.facts.pieces[index].flops)
            elif kind == "kernel":
                work = _Work(1, self.facts.kernels[index].flops or 0)
            else:
                continue
            for each in (total, *under_way.values()):
                each.add(work)
        return total


def overlaps(facts: ProgramFacts) -> tuple[Overlap, ...]:
    """The work beside every collective of a program, in the order of ``facts.collectives``.

    Args:
      facts: of :func:`capibara.plan.program.read_program`; of a program without a schedule nothing is known.
    """
    reading = _Reading(facts)
    reading.line(facts.schedule)
    nothing = _Work()
    works = (reading.found.get(index, nothing) for index in range(len(facts.collectives)))
    return tuple(
        Overlap(collective, work.operations, work.flops)
        for collective, work in zip(facts.collectives, works, strict=True)
    )


def overlap_by_kind(found: Iterable[Overlap]) -> dict[str, OverlapByKind]:
    """The sums of each kind, by name in alphabetical order."""
    kinds: dict[str, list[Overlap]] = {}
    for each in found:
        kinds.setdefault(each.collective.kind, []).append(each)

    def moved(several: Iterable[Overlap]) -> int:
        return sum(each.collective.bytes * each.collective.trips for each in several)

    return {
        kind: OverlapByKind(
            len(several),
            sum(each.collective.asynchronous for each in several),
            moved(several),
            moved(each for each in several if each.hidden),
        )
        for kind, several in sorted(kinds.items())
    }
