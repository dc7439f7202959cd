"""Compare the times of functions by alternating their calls.

A machine's speed drifts: clocks change, other programs start and stop. Timing all calls of A and then all of B
attributes that drift to one of them. Here each round times every function once, starting with a different one each
round, and ratios are computed within a round, so that a slow phase affects both sides. Medians are reported; a mean
would be dominated by the worst interruption.

Threads left running by one function are not charged to the next. Libraries with their own threads let them spin after
a call, in case another one follows: PyTorch's (libgomp's) do so for 5 to 8 ms on one of the cores, which made an
attention of 4.4 ms on two cores take 6 to 9 ms when it ran next. So the timer waits for such threads.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.errors import CapibaraError, did_you_mean
from capibara.measure.machine import format_machine, machine_description

__all__ = ["MeasureError", "Row", "Table", "interleaved"]


class MeasureError(CapibaraError, ValueError):
    """The requested measurement is not possible."""


@dataclass(frozen=True)
class Row:
    """Times of one function, in seconds, in the order of the rounds."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        """The shortest, in seconds."""
        return min(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range / median: the uncertainty of a single time. 0 for fewer than 2 times."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Table:
    """The result of :func:`interleaved`; prints as a table."""

    rows: tuple[Row, ...]
    machine: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Row:
        for row in self.rows:
            if row.name == name:
                return row
        names = [row.name for row in self.rows]
        raise MeasureError(f"there is no row {name!r}.{did_you_mean(name, names)} Rows: {', '.join(names)}")

    def ratio(self, name: str, to: str) -> float:
        """Median over the rounds of time(``name``) / time(``to``); below 1 means that ``name`` is faster."""
        pairs = zip(self[name].seconds, self[to].seconds, strict=True)
        return statistics.median(a / b if b else float("inf") for a, b in pairs)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the machine; for each row times, median, spread, ratio to the first."""
        first = self.rows[0].name
        rows = {
            row.name: {
                "median_seconds": row.median,
                "best_seconds": row.best,
                "spread": row.spread,
                f"ratio_to_{first}": self.ratio(row.name, first),
                "seconds": list(row.seconds),
            }
            for row in self.rows
        }
        return {"machine": self.machine, "rounds": len(self.rows[0].seconds), "rows": rows}

    def __str__(self) -> str:
        first = self.rows[0].name
        width = max(len("name"), *(len(row.name) for row in self.rows))
        lines = [f"{'name':<{width}}  {'median':>10}  {'best':>10}  {'spread':>6}  / {first}"]
        lines += [
            f"{row.name:<{width}}  {_duration(row.median):>10}  {_duration(row.best):>10}  "
            f"{row.spread:>6.1%}  {self.ratio(row.name, first):.3f}"
            for row in self.rows
        ]
        lines.append(f"{len(self.rows[0].seconds)} interleaved rounds")
        if self.machine:
            lines.append(format_machine(self.machine))
        return "\n".join(lines)


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3f} {unit}"
    return f"{seconds * 1e9:.1f} ns"


def _wait(result: Any) -> None:
    # Only if JAX is loaded can the result hold arrays that are still being computed.
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.block_until_ready(result)


# Seconds to look for running threads, which systems count by ticks of up to 4 ms, and to wait for them at most.
_WINDOW, _PATIENCE = 1e-2, 0.1


def _settle() -> None:
    """Wait until the process' other threads rest, without resting: a processor that slept is slow at first."""

    def of_others() -> float:
        return time.process_time() - time.thread_time()

    end = time.perf_counter() + _PATIENCE
    while (start := time.perf_counter()) < end:
        before = of_others()
        while time.perf_counter() < start + _WINDOW:
            pass
        if of_others() - before < _WINDOW / 10:
            return


def interleaved(
    functions: Mapping[str, Callable[[], Any]],
    rounds: int = 10,
    warmup: int = 2,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Time functions alternately: A B C, B C A, C A B, …

    Before each call, waits for threads left running by the previous one, for at most 0.1 s.

    Args:
      functions: name → function without arguments. JAX results are waited for; for asynchronous results of other
        libraries, the function itself must wait.
      rounds: number of timed calls of each.
      warmup: number of untimed calls of each before (compilation, caches).
      clock: a function that returns seconds.

    Returns:
      A :class:`Table` with every time, medians, ratios and the machine.

    Raises:
      MeasureError: (a ``ValueError``) no functions, one that cannot be called, or wrong ``rounds`` or
        ``warmup``.
    """
    if not functions:
        raise MeasureError("functions: got none, expected at least one named function")
    for name, function in functions.items():
        if not callable(function):
            raise MeasureError(
                f"functions[{name!r}]: got {function!r}, expected something that can be called"
            )
    for name, value, low in (("rounds", rounds, 1), ("warmup", warmup, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise MeasureError(f"{name}: got {value!r}, expected an integer of at least {low}")
    for function in functions.values():
        for _ in range(warmup):
            _wait(function())
    names = list(functions)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        start_at = turn % len(names)
        for name in names[start_at:] + names[:start_at]:
            _settle()
            start = clock()
            _wait(functions[name]())
            times[name].append(clock() - start)
    machine = machine_description(devices="jax" in sys.modules)
    return Table(tuple(Row(name, tuple(times[name])) for name in names), machine)
