"""What the rules say of planted faults, and of the same programs without them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
from planted_faults import Planted, Work

from capibara.observe.bottlenecks import find_bottlenecks
from capibara.observe.profile import Profile, TpuPerformanceProfiler


def profiled(work: Work, *, warm: bool = True) -> Profile:
    if warm:
        jax.block_until_ready(work())
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("work"):
        jax.block_until_ready(work())
    return profiler.profile()


@dataclass(frozen=True)
class Verdict:
    """What was found in a program with a planted fault, and in the same one without it."""

    planted: Planted
    size: int
    found: set[str]
    alarms: set[str]
    predicted: float | None
    measured: float

    @property
    def clean(self) -> bool:
        return self.found == {self.planted.kind} and not self.alarms

    @property
    def right(self) -> bool:
        return self.planted.kind in self.found


def judged(planted: Planted, size: int, profiles: int = 3) -> Verdict:
    """By most of some profiles of each, taken by turns; gains by medians."""
    found: Counter[str] = Counter()
    alarms: Counter[str] = Counter()
    gains, before, after = [], [], []
    for _ in range(profiles):
        pair = planted.make(size)
        if pair.warm:
            jax.block_until_ready(pair.faulty())
        jax.block_until_ready(pair.healthy())
        faulty, healthy = profiled(pair.faulty, warm=False), profiled(pair.healthy, warm=False)
        bottlenecks = find_bottlenecks(faulty).bottlenecks
        found.update(one.kind for one in bottlenecks)
        alarms.update(one.kind for one in find_bottlenecks(healthy).bottlenecks)
        gains += [one.predicted_gain for one in bottlenecks if one.kind == planted.kind]
        before.append(faulty.wall_seconds)
        after.append(healthy.wall_seconds)
    return Verdict(
        planted,
        size,
        {kind for kind, times in found.items() if 2 * times > profiles},
        {kind for kind, times in alarms.items() if 2 * times > profiles},
        statistics.median(gains) if gains else None,
        1 - statistics.median(after) / statistics.median(before),
    )


def f1(verdicts: Sequence[Verdict]) -> float:
    """Of the faults found; what is found beside them, or without them, counts as wrong."""
    hits = sum(one.right for one in verdicts)
    wrong = sum(len(one.found - {one.planted.kind}) + len(one.alarms) for one in verdicts)
    return 2 * hits / (hits + wrong + len(verdicts))


def gain_error(verdicts: Sequence[Verdict]) -> float:
    """Median of the errors of predicted gains, as shares of the measured ones."""
    return statistics.median(
        abs(one.predicted - one.measured) / one.measured
        for one in verdicts
        if one.predicted is not None and one.measured > 0
    )
