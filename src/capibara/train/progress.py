"""What a person watching a run sees: a progress bar on a terminal, plain lines everywhere else.

The loop tells a :class:`Reporter` what happened and never formats anything itself, so a notebook or a service
can bring its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

__all__ = [
    "PlainReporter",
    "Reporter",
    "RichReporter",
    "SilentReporter",
    "duration",
    "figures",
    "make_reporter",
]


def duration(seconds: float) -> str:
    """``40 s``, ``3 min``, ``2.5 h``, ``4.2 days``."""
    for limit, unit, size in ((90, "s", 1), (90 * 60, "min", 60), (36 * 3600, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.1f} days"


def figures(line: Mapping[str, Any]) -> list[str]:
    """The figures of one line of ``metrics.jsonl``, those that it has: loss, rate, MFU, gradient norm, memory …"""
    found = [f"loss {line['loss']:.4f}", f"{line['tokens_per_second']:,.0f} tokens/s"]
    if line.get("utilisation") is not None:
        found.append(f"MFU {line['utilisation']:.0%}")
    if line.get("grad_norm") is not None:
        found.append(f"gradient {line['grad_norm']:.3g}")
    if line.get("learning_rate") is not None:
        found.append(f"rate {line['learning_rate']:.2e}")
    if line.get("memory") is not None:
        found.append(f"{line['memory'] / 2**30:.2f} GiB")
    if line.get("passes") is not None:
        found.append(f"pass {line['passes']:.2f}")
    return found


class Reporter(Protocol):
    """Told about a run while it runs. ``start`` and ``close`` are called once each, ``close`` also after
    errors."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def warn(self, text: str) -> None:
        """Something that should be looked at, though the run goes on."""

    def start(self, step: int, total: int) -> None:
        """Training begins after ``step`` of ``total`` steps."""

    def step(self, step: int, loss: float) -> None:
        """A step was finished; ``loss`` in nats."""

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """A line was written to ``metrics.jsonl``; :func:`figures` puts it into words."""

    def close(self) -> None:
        """The run is over."""


class SilentReporter:
    """Says nothing."""

    def note(self, text: str) -> None:
        """Ignored."""

    def warn(self, text: str) -> None:
        """Ignored."""

    def start(self, step: int, total: int) -> None:
        """Ignored."""

    def step(self, step: int, loss: float) -> None:
        """Ignored."""

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        """Ignored."""

    def close(self) -> None:
        """Ignored."""


class PlainReporter(SilentReporter):
    """Writes a line at every metrics line; for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._total = self._first = 0
        self._begun = 0.0

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def warn(self, text: str) -> None:
        print(f"warning: {text}", file=self._stream, flush=True)

    def start(self, step: int, total: int) -> None:
        self._total, self._first, self._begun = total, step, time.perf_counter()

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        left = ""
        if self._first < step < self._total:
            seconds = (time.perf_counter() - self._begun) / (step - self._first) * (self._total - step)
            left = f"  {duration(seconds)} left"
        self.note(f"step {step}/{self._total}  {'  '.join(figures(line))}{left}")


class RichReporter:
    """Draws a progress bar with loss, rate and model FLOP utilisation."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=console,
            # The bar is drawn by a thread that competes with training for the cores.
            refresh_per_second=2,
        )
        self._task: TaskID | None = None

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def warn(self, text: str) -> None:
        self._console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)

    def start(self, step: int, total: int) -> None:
        self._progress.start()
        self._task = self._progress.add_task("training", total=total, completed=step, loss="…", rate="")

    def step(self, step: int, loss: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=step, loss=f"{loss:.3f}")

    def log(self, step: int, line: Mapping[str, Any]) -> None:
        if self._task is not None:
            # As many as there is room for beside the bar, the most telling first.
            room, kept = self._console.width - 75, []
            for figure in figures(line)[1:]:
                room -= len(figure) + 2
                if room >= 0 or not kept:
                    kept.append(figure)
            self._progress.update(self._task, rate=", ".join(kept))

    def close(self) -> None:
        self._progress.stop()


def make_reporter(stream: TextIO) -> Reporter:
    """Return a :class:`RichReporter` if ``stream`` is a terminal, else a :class:`PlainReporter`."""
    console = Console(file=stream)
    return (
        RichReporter(console)
        if console.is_terminal and not console.is_dumb_terminal
        else PlainReporter(stream)
    )
