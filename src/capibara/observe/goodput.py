"""Goodput: which part of a run's wall time went into steps that count, and what the rest was spent on.

The buckets add up to the time between the beginning of the first process and the last line of the last one. Besides
those of :mod:`capibara.train.ledger` there are ``lost``, steps and their input that were taken again from an earlier
checkpoint, and ``down``, the time between two processes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capibara.errors import MissingExtraError
from capibara.files import replace_file
from capibara.observe.errors import ProfileError
from capibara.train.ledger import BUCKETS, LEDGER

__all__ = ["Goodput", "plot_goodput", "read_goodput"]

_MOST_LINE = 1 << 16
_LOSABLE = ("step", "input")
_COLOURS = {
    "step": "#4a9c6d",
    "input": "#b58b2a",
    "validation": "#7a9cc6",
    "checkpoint": "#3b6ea5",
    "compile": "#8a6fae",
    "startup": "#b9b9b9",
    "recovery": "#d98c4a",
    "lost": "#b0413e",
    "down": "#303030",
}


@dataclass(frozen=True)
class Goodput:
    """Where the wall time of a run went.

    Attributes:
      wall_seconds: from the beginning of the first process to the last line of the last.
      seconds: of each bucket.
      step: the newest.
      processes: how often the run was started.
      steps_lost: that were taken again.
      devices: of the last process. chip: its.
      price_per_hour: of all devices together, in dollars; None if unknown.
    """

    wall_seconds: float
    seconds: Mapping[str, float]
    step: int
    processes: int
    steps_lost: int
    devices: int
    chip: str
    price_per_hour: float | None = None

    @property
    def goodput(self) -> float:
        """Part of the wall time in steps that count, 0 to 1."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def cost(self) -> dict[str, float] | None:
        """Dollars of each bucket."""
        if self.price_per_hour is None:
            return None
        return {name: value / 3600 * self.price_per_hour for name, value in self.seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "goodput": self.goodput,
            "wall_seconds": self.wall_seconds,
            "seconds": dict(self.seconds),
            "cost": self.cost,
            "step": self.step,
            "processes": self.processes,
            "steps_lost": self.steps_lost,
            "devices": self.devices,
            "chip": self.chip,
        }

    def __str__(self) -> str:
        started = "once" if self.processes == 1 else f"{self.processes} times"
        lines = [
            f"{self.step:,} steps in {self.wall_seconds:,.1f} s on {self.devices} × {self.chip}, started {started}: "
            f"{100 * self.goodput:.1f} % goodput"
        ]
        cost = self.cost
        for name, value in sorted(self.seconds.items(), key=lambda one: -one[1]):
            if value:
                dollars = "" if cost is None else f"  ${cost[name]:,.2f}"
                note = f"  ({self.steps_lost:,} steps)" if name == "lost" else ""
                share = 100 * value / self.wall_seconds if self.wall_seconds else 0.0
                lines.append(f"  {name:<11}{share:5.1f} % {value:10,.1f} s{dollars}{note}")
        return "\n".join(lines)


def read_goodput(run: str | os.PathLike[str], *, price_per_hour: float | None = None) -> Goodput:
    """Add up the ledger of a run.

    Args:
      run: its folder, or the ledger itself.
      price_per_hour: of all its devices together, in dollars.

    Raises:
      ProfileError: there is no ledger, it is damaged, or the price is not a number from 0 on.
    """
    if price_per_hour is not None and not (math.isfinite(price_per_hour) and price_per_hour >= 0):
        raise ProfileError(f"price_per_hour: got {price_per_hour!r}, expected dollars, from 0 on")
    path = Path(run)
    path = path / LEDGER if path.is_dir() else path
    if not path.is_file():
        raise ProfileError(
            f"run: {str(run)!r} has no {LEDGER}, expected the folder of a run that capibara train wrote"
        )
    count = _Count()
    for number, entry in enumerate(_lines(path), start=1):
        try:
            count.add(entry)
        except (LookupError, TypeError, ValueError) as error:
            raise ProfileError(f"{path}, line {number}: {entry!r} is not a line of a ledger") from error
    if not count.processes:
        raise ProfileError(f"{path} has no line yet: the run has not begun to train")
    count.seconds["lost"] += count.lost_seconds
    return Goodput(
        wall_seconds=count.last - count.first,
        seconds=count.seconds,
        step=count.step,
        processes=count.processes,
        steps_lost=count.lost,
        devices=count.devices,
        chip=count.chip,
        price_per_hour=price_per_hour,
    )


class _Count:
    def __init__(self) -> None:
        self.seconds = dict.fromkeys((*BUCKETS, "lost", "down"), 0.0)
        self.first = self.last = 0.0
        self.step = self.processes = self.lost = self.devices = 0
        self.lost_seconds = 0.0
        self.chip = ""
        # Steps that may still be lost: (the last one of a line, how many, their seconds in each bucket).
        self.taken: list[tuple[int, int, dict[str, float]]] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        kind, now, step = entry["kind"], _number(entry["time"]), int(entry["step"])
        if kind == "begin":
            began = _number(entry["began"])
            if self.processes:
                # The next may begin before the last line of the one before, which was not waited for.
                self.seconds["down"] += max(0.0, began - self.last)
            else:
                self.first = began
            self.processes += 1
            self.devices, self.chip = int(entry["devices"]), str(entry["chip"])
            self.lose(step)
        elif kind == "back":
            self.lose(step)
        elif kind == "spent":
            spent = {str(name): _number(value) for name, value in entry["seconds"].items()}
            for name, value in spent.items():
                self.seconds[name] += value
            self.taken.append((step, step - self.step, {name: spent.get(name, 0.0) for name in _LOSABLE}))
        else:
            raise ValueError(kind)
        self.step = step
        self.last = max(self.last, now)

    def lose(self, step: int) -> None:
        """Steps after ``step`` do not count: what was spent on them is lost."""
        while self.taken and self.taken[-1][0] > step:
            last, many, spent = self.taken.pop()
            # Of a line that lies on both sides, its share.
            gone = min(many, last - step)
            share = gone / many if many else 0.0
            self.lost += gone
            for name, value in spent.items():
                self.seconds[name] -= share * value
                self.lost_seconds += share * value
            if gone < many:
                kept = {name: (1 - share) * value for name, value in spent.items()}
                self.taken.append((step, many - gone, kept))


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise ValueError(value)
    return float(value)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as stream:
        while line := stream.readline(_MOST_LINE):
            if not line.endswith("\n"):
                return  # a process was killed while it wrote
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                entry = line
            yield entry if isinstance(entry, dict) else {"line": line[:80]}


def plot_goodput(found: Goodput, path: str | os.PathLike[str]) -> None:
    """Draw the buckets as one bar, as a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed. OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "train", "the figure of a run") from None
    import io

    figure = Figure(figsize=(10, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    left = 0.0
    for name, colour in _COLOURS.items():
        value = found.seconds.get(name, 0.0)
        if value:
            share = 100 * value / found.wall_seconds
            axes.barh(0, value, left=left, color=colour, label=f"{name} {share:.1f} %")
            left += value
    axes.set(yticks=[], xlabel="s", title=str(found).split("\n", 1)[0])
    axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    replace_file(Path(path), content.getvalue())
