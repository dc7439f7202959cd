"""Measuring which parameters and which implementation are fast on this device.

For each case (a spec in one dtype), every implementation that supports it is compiled with each of its parameter
values and with its heuristic. Variants that disagree with the oracle are discarded, and identical programs are
measured only once. The others are timed alternately (:mod:`capibara.measure.timing`), including the gradient if there
is one. Since the best of that first round was partly lucky, it is compared with the heuristic again, in new rounds
and for the forward pass alone as well, and is kept only if a confidence interval of the median ratio is below 1 by a
margin. Then the implementations are compared, each with its best parameters.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from capibara.measure.timing import Table, interleaved
from capibara.ops.errors import OpTypeError, OpValueError
from capibara.ops.registry import Op
from capibara.ops.tuning import bucket_key, forced, lowering_platform
from capibara.ops.tuning_cache import Entry
from capibara.ops.tuning_programs import TOLERANCE, Case, Parameters, Programs, Variant

__all__ = ["Case", "Outcome", "cases", "is_faster", "median_bounds", "tune_case"]

MARGIN = 0.03  # a gain below this is not worth a choice
SCREENING_ROUNDS = 5
DECISIVE_ROUNDS = 15
FEWEST_ROUNDS = 7  # with fewer the confidence interval is wider than the data
# Seconds. What is quicker is repeated, so that the clock's and the caller's own time do not count.
SHORTEST = 2e-3
COMPILING = 0.6  # part of the time that may go into compiling, as long as there is something to measure
HOPELESS = 1.5  # times the heuristic's first timing: not measured further


@dataclass
class Outcome:
    """The result for a case.

    Attributes:
      key: The entry's key; None if problems of this case are not tuned.
      entry: The entry to save; with neither a choice nor parameters if the heuristics are confirmed.
      default: The implementation that the heuristics choose.
      candidates: The number of variants that were correct and could be measured, including the heuristics.
      wrong_results: The variants that disagree with the oracle, and how they differ.
      failed: The variants that could not be compiled or run, and why.
      seconds: Medians of the heuristic and of the choice, by pass, in seconds; empty if the heuristics are confirmed.
      complete: False when time ran out before everything was measured.
      measured: The implementations whose parameters were measured.
      fastest_unknown: The implementations were not measured against each other.
    """

    case: Case
    key: str | None = None
    entry: Entry = field(default_factory=Entry)
    default: str = ""
    candidates: int = 0
    wrong_results: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    complete: bool = True
    measured: set[str] = field(default_factory=set)
    fastest_unknown: bool = True

    @property
    def gain(self) -> float:
        """Time of the heuristics / time of the choice."""
        return self.entry.gains.get("", 1.0)

    def merged(self, before: Entry, implementation: str | None) -> Entry:
        """The entry to save if one exists already: what was not measured this time is kept."""
        if implementation is None and self.complete:
            return self.entry
        parameters = {n: v for n, v in before.parameters.items() if n not in self.measured}
        parameters |= self.entry.parameters
        fastest = before.fastest if self.fastest_unknown else self.entry.fastest
        kept = [*parameters, ""] if self.fastest_unknown else parameters
        gains = {**{n: before.gains[n] for n in kept if n in before.gains}, **self.entry.gains}
        return dataclasses.replace(self.entry, fastest=fastest, parameters=parameters, gains=gains)


def cases(
    op: Op, tag: str = "large", dtype: str = "float32", changes: Mapping[str, int | None] | None = None
) -> list[Case]:
    """The cases of an operation: its specs with that tag, with some of their fields changed.

    Specs that ``changes`` make equal are one case.

    Raises:
      OpValueError: the operation cannot be tuned, a spec has no such field, or dtype is not one of floats.
      OpTypeError: a change has another type than the field.
    """
    if op.tuning is None:
        raise OpValueError(f"{op.name} has nothing that could be tuned")
    if dtype not in TOLERANCE:
        raise OpValueError(f"dtype must be one of {', '.join(TOLERANCE)}, got {dtype!r}")
    found: list[Case] = []
    for spec in op.tuning.specs():
        if tag not in spec.tags:
            continue
        names = {each.name for each in dataclasses.fields(spec)} - {"name", "tags"}
        for name, value in (changes or {}).items():
            if name not in names:
                raise OpValueError(
                    f"the specs of {op.name} have no field {name!r}; they have {', '.join(sorted(names))}"
                )
            for number in (value, getattr(spec, name)):
                if isinstance(number, bool) or not isinstance(number, int | None):
                    raise OpTypeError(
                        f"{op.name}: the field {name} of its specs can be changed from one integer to another, "
                        f"got {number!r}"
                    )
        changed = dataclasses.replace(spec, **(changes or {}))
        if not any(_same_size(changed, each.spec) for each in found):
            found.append(Case(op, changed, dtype))
    return found


def _same_size(one: Any, other: Any) -> bool:
    return dataclasses.replace(one, name="", tags=()) == dataclasses.replace(other, name="", tags=())


def median_bounds(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """A confidence interval for the median of the distribution of ``values``, whatever the distribution.

    Between order statistics (the sign test's interval); with fewer than six values no interval reaches 0.95, and it is
    the whole range.
    """
    ordered, n = sorted(values), len(values)
    outside, below = 0.0, 0
    for k in range(n // 2):
        outside += math.comb(n, k) / 2**n
        if 2 * outside > 1 - confidence:
            break
        below = k
    return ordered[below], ordered[n - 1 - below]


def is_faster(together: Sequence[float], each: Mapping[str, Sequence[float]]) -> bool:
    """Whether ratios of times show a speedup: all passes together are faster, and none is significantly slower."""
    if len(together) < FEWEST_ROUNDS or median_bounds(together)[1] > 1 - MARGIN:
        return False
    return all(median_bounds(ratios)[0] <= 1 + MARGIN for ratios in each.values())


class _OutOfTime(Exception):
    """The time that was given is over."""


class _Meter:
    """Timings of variants, within the time that is left."""

    def __init__(self, arrays: Sequence[Any], deadline: float, clock: Callable[[], float]) -> None:
        self.arrays, self.deadline, self.clock = arrays, deadline, clock

    def left(self) -> float:
        return self.deadline - self.clock()

    def until(self, deadline: float) -> _Meter:
        return _Meter(self.arrays, deadline, self.clock)

    def once(self, variant: Variant, passes: Sequence[str]) -> float:
        """One call of each pass after a first one, in seconds."""
        total = 0.0
        for which in passes:
            program = variant.program(which)
            jax.block_until_ready(program(*self.arrays))
            start = self.clock()
            jax.block_until_ready(program(*self.arrays))
            total += self.clock() - start
        return total

    def rounds(self, variants: Sequence[Variant], passes: Sequence[str], wanted: int, fewest: int) -> Table:
        """Time the variants in alternation; rows are called ``"<number> <pass>"``."""
        guess = max(self.once(variant, passes) for variant in variants)
        repeats = max(1, math.ceil(SHORTEST / max(guess, 1e-9)))
        each = max(guess * repeats, SHORTEST) * len(variants)
        count = min(wanted, int(self.left() / each) - 1)
        if count < fewest:
            raise _OutOfTime
        functions = {
            f"{i} {which}": self._repeated(variant.program(which), repeats)
            for i, variant in enumerate(variants)
            for which in passes
        }
        return interleaved(functions, rounds=count, warmup=1, clock=self.clock)

    def _repeated(self, program: Any, repeats: int) -> Callable[[], Any]:
        def run() -> Any:
            out = None
            for _ in range(repeats):
                out = jax.block_until_ready(program(*self.arrays))
            return out

        return run


def _ratios(table: Table, number: int, passes: Sequence[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Per round, time of variant ``number`` / time of variant 0: the passes' geometric mean, and of each pass."""
    each: dict[str, list[float]] = {}
    for which in passes:
        times = (table[f"{i} {which}"].seconds for i in (number, 0))
        each[which] = [a / b for a, b in zip(*times, strict=True)]
    together = [math.prod(row) ** (1 / len(row)) for row in zip(*each.values(), strict=True)]
    return together, each


def _median(table: Table, number: int, passes: Sequence[str]) -> float:
    return statistics.median(_ratios(table, number, passes)[0])


def tune_case(
    case: Case,
    *,
    max_seconds: float = 60.0,
    implementation: str | None = None,
    seed: int = 0,
    note: Callable[[str], None] = lambda _: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Outcome:
    """Measure the variants of a case against the heuristics.

    Args:
      case: One of :func:`cases`.
      max_seconds: Approximate time limit: a compilation in progress is not interrupted.
      implementation: Measure only this one's parameters, and keep the choice between implementations.
      seed: Of the arrays.
      note: Callback that receives short progress messages.
      clock: A function that returns seconds.

    Raises:
      OpValueError: there is no such implementation.
    """
    op = case.op
    if implementation is not None:
        op.check_name(implementation)
    begin = clock()
    programs = Programs(case, seed)
    assert op.tuning is not None
    with forced(op.name, None):
        args, kwargs = programs.filled(programs.arrays)
        problem, _ = op.prepare(*args, **kwargs)
    outcome = Outcome(case)
    bucket = op.tuning.bucket(problem)
    if bucket is None:
        return outcome
    outcome.key = bucket_key(op.name, problem, bucket)
    platform = lowering_platform()
    default = outcome.default = op.select(problem, platform).implementation.name
    names = [name for name in op.usable(problem, platform) if implementation in (None, name)]
    # The default first: whatever happens to the time, the others are compared with it.
    names.sort(key=lambda name: name != default)
    if sum(1 for name in names for _ in (name, *_grid(op.tunables(name)))) < 2:
        return outcome  # one variant: there is nothing to measure
    work = _Work(programs, platform, outcome, _Meter(programs.given, begin + max_seconds, clock), note)
    best: dict[str, Variant] = {}
    gains: dict[str, float] = {}
    fastest, rounds = default, 0
    try:
        note("oracle")
        oracle = programs.oracle()
        for i, name in enumerate(names):
            share = begin + max_seconds * (i + 1) / (len(names) + 0.5)
            variants = work.variants(name, oracle, share)
            if variants:
                best[name] = variants[0]
                best[name], gain, used = work.decide(variants, share)
                outcome.measured.add(name)
                if best[name].parameters:
                    gains[name], rounds = gain, max(rounds, used)
        if default in best and len(best) > 1:
            note("the implementations against each other")
            winner, _, used = work.decide(work.contenders(best, default), begin + max_seconds)
            fastest, rounds = winner.implementation, max(rounds, used)
            outcome.fastest_unknown = False
    except _OutOfTime:
        outcome.complete = False
    outcome.entry = Entry(
        fastest=None if fastest == default else fastest,
        parameters={name: dict(best[name].parameters) for name in gains},
        gains=gains,
        rounds=rounds,
        jax=jax.__version__,
    )
    if fastest != default or fastest in gains:
        work.whole_gain(best[fastest])
    return outcome


def _grid(tunables: Mapping[str, tuple[int | str, ...]]) -> Iterator[Parameters]:
    """Every combination of values; from the middle of each list outwards, as time may run out."""
    if tunables:
        for values in itertools.product(*map(_middle_first, tunables.values())):
            yield tuple(sorted(zip(tunables, values, strict=True)))


def _middle_first(values: Sequence[int | str]) -> list[int | str]:
    return sorted(values, key=lambda value: abs(values.index(value) - (len(values) - 1) / 2))


@dataclass
class _Work:
    """The steps of :func:`tune_case`."""

    programs: Programs
    platform: str
    outcome: Outcome
    meter: _Meter
    note: Callable[[str], None]

    def variants(self, name: str, oracle: Sequence[np.ndarray], until: float) -> list[Variant]:
        """The right and different variants of an implementation, its heuristic first; none if that is wrong."""
        found: list[Variant] = []
        texts: set[str] = set()
        heuristic = math.inf
        start = self.meter.clock()
        which = self.programs.passes[-1]
        for parameters in itertools.chain([()], _grid(self.programs.case.op.tunables(name))):
            if found and self.meter.clock() > start + COMPILING * (until - start):
                self.outcome.complete = False
                break
            variant = Variant(self.programs, name, parameters, self.platform)
            self.note(str(variant))
            try:
                text = variant.lower(which).as_text()
                if text in texts:
                    continue
                texts.add(text)
                wrong = self.programs.difference(variant.program(which), oracle)
                if wrong is not None:
                    self.outcome.wrong_results[str(variant)] = wrong
            except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
                # A block that does not fit the chip, say: a variant that cannot be taken, and no reason to stop.
                first_line = str(error).partition("\n")[0][:200]
                wrong = self.outcome.failed[str(variant)] = f"{type(error).__name__}: {first_line}"
            if wrong is not None:
                if not found:
                    return []
                continue
            self.outcome.candidates += 1
            seconds = self.meter.once(variant, [which])
            heuristic = min(heuristic, seconds) if found else seconds
            if seconds <= HOPELESS * heuristic or not found:
                found.append(variant)
        return found

    def contenders(self, best: Mapping[str, Variant], default: str) -> list[Variant]:
        """The best variant of each implementation, the default one's first, without the hopeless ones."""
        first, passes = best[default], self.programs.passes[-1:]
        limit = HOPELESS * self.meter.once(first, passes)
        others = [variant for name, variant in best.items() if name != default]
        return [first, *(v for v in others if self.meter.once(v, passes) <= limit)]

    def decide(self, variants: Sequence[Variant], until: float) -> tuple[Variant, float, int]:
        """The first variant, or one that is measurably faster; with its gain and the rounds it was timed."""
        if len(variants) < 2:
            return variants[0], 1.0, 0
        passes = self.programs.passes
        self.note(f"{len(variants)} variants against each other")
        table = self.meter.until(until).rounds(variants, passes[-1:], SCREENING_ROUNDS, 3)
        medians = [1.0, *(_median(table, i, passes[-1:]) for i in range(1, len(variants)))]
        best = min(range(len(variants)), key=medians.__getitem__)
        if best == 0 or medians[best] > 1 - MARGIN:
            return variants[0], 1.0, 0
        self.note(f"{variants[best]} once more")
        table = self.meter.rounds([variants[0], variants[best]], passes, DECISIVE_ROUNDS, FEWEST_ROUNDS)
        together, each = _ratios(table, 1, passes)
        if not is_faster(together, each):
            return variants[0], 1.0, 0
        return variants[best], 1 / statistics.median(together), len(together)

    def whole_gain(self, chosen: Variant) -> None:
        """Time the whole choice against the heuristics alone, and note it: what is kept needs a figure."""
        passes = self.programs.passes
        heuristic = Variant(self.programs, self.outcome.default, (), self.platform)
        each = self.meter.once(heuristic, passes) + self.meter.once(chosen, passes)
        late = self.meter.clock() + max(self.meter.left(), 2 * (each + 2 * SHORTEST) * FEWEST_ROUNDS)
        table = self.meter.until(late).rounds([heuristic, chosen], passes, DECISIVE_ROUNDS, 1)
        gains = {**self.outcome.entry.gains, "": 1 / _median(table, 1, passes)}
        self.outcome.entry = dataclasses.replace(self.outcome.entry, gains=gains)
        self.outcome.seconds = {
            who: {which: table[f"{i} {which}"].median for which in passes}
            for i, who in enumerate(("heuristic", "choice"))
        }
