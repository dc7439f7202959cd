"""Goodput: which part of a run's wall time went into steps that count, and what the rest was spent on.

The buckets add up to the time between the beginning of the first process and the last line of the last one. Besides
those of :mod:`capibara.train.ledger` there are ``lost``, steps and their input that were taken again from an earlier
checkpoint, ``down``, the time between two processes, and ``unaccounted``, of which the ledger says nothing: a line is
missing or damaged, or a clock was set forward. Where one was set back between two processes, the later one is taken to
have begun when the earlier one ended.

Cost follows from device-seconds, since a run may go on with other devices, and from the price of its chips in the
catalogue. Time without a process counts with the devices of the process before: they are paid until they are given up.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.errors import MissingExtraError
from capibara.files import replace_file
from capibara.hardware import ChipError, Price, UnknownPriceError, get_chip, get_price
from capibara.observe.errors import ProfileError
from capibara.train.ledger import BUCKETS, LEDGER

__all__ = ["Goodput", "plot_goodput", "read_goodput"]

_MOST_LINE = 1 << 16
_BEGINNING = b'{"kind": '
_MOST_STEPS = 2**53
_LATEST = 1e11  # seconds since 1970: the year 5138
# A process may begin so long before the last line of the one before; a longer time is a clock that was set back.
_MOST_OVERLAP = 60.0
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
    "unaccounted": "#e4d8e4",
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
      devices: at the end. chip: theirs.
      device_seconds: of each bucket, by chip: seconds times the devices that the run had then.
      damaged: lines of the ledger that are none, and were left out.
      price_per_hour: of all devices together, in dollars, if it was given.
      prices: of each chip, if they are known. price_note: why they are not.
    """

    wall_seconds: float
    seconds: Mapping[str, float]
    step: int
    processes: int
    steps_lost: int
    devices: int
    chip: str
    device_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    damaged: int = 0
    price_per_hour: float | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    price_note: str = ""

    @property
    def goodput(self) -> float:
        """Part of the wall time in steps that count, 0 to 1."""
        return self.seconds["step"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def cost(self) -> dict[str, float] | None:
        """Dollars of each bucket; None if a price is not known."""
        if self.price_per_hour is not None:
            return {name: value / 3600 * self.price_per_hour for name, value in self.seconds.items()}
        if not self.prices:
            return None
        cost = dict.fromkeys(self.seconds, 0.0)
        for chip, spent in self.device_seconds.items():
            for name, value in spent.items():
                cost[name] += self.prices[chip].cost(value / _devices_per_chip(chip), 1 / 3600)
        return cost

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "goodput": self.goodput,
            "wall_seconds": self.wall_seconds,
            "seconds": dict(self.seconds),
            "device_seconds": {chip: dict(spent) for chip, spent in self.device_seconds.items()},
            "cost": self.cost,
            "price": self._price_words() or None,
            "price_note": self.price_note or None,
            "step": self.step,
            "processes": self.processes,
            "steps_lost": self.steps_lost,
            "devices": self.devices,
            "chip": self.chip,
            "damaged_lines": self.damaged,
        }

    def _price_words(self) -> str:
        if self.price_per_hour is not None:
            return f"${self.price_per_hour:,.4g} per hour, as given"
        return "; ".join(str(price) for price in self.prices.values())

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
        if cost is not None:
            lines.append(f"cost: ${sum(cost.values()):,.2f} ({self._price_words()})")
        elif self.price_note:
            lines.append(f"cost: {self.price_note}")
        if self.damaged:
            lines.append(f"{self.damaged:,} damaged lines of the ledger were left out")
        return "\n".join(lines)


def read_goodput(
    run: str | os.PathLike[str],
    *,
    price_per_hour: float | None = None,
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
) -> Goodput:
    """Add up the ledger of a run.

    Args:
      run: its folder, or the ledger itself.
      price_per_hour: of all its devices together, in dollars, for the whole run. None: the catalogue's price of its
        chips (see :func:`capibara.hardware.get_price`), for as many as the run had at each time.
      region, term, prices: which price of the catalogue, and a file of your own.

    Raises:
      ProfileError: there is no ledger, it has no line that says when a process began, or the price is not a number from
        0 on.
      PriceError: an unknown term, or an invalid price file.
    """
    if price_per_hour is not None and not (
        isinstance(price_per_hour, int | float)
        and not isinstance(price_per_hour, bool)
        and math.isfinite(price_per_hour)
        and price_per_hour >= 0
    ):
        raise ProfileError(f"price_per_hour: got {price_per_hour!r}, expected dollars, from 0 on")
    path = Path(run)
    path = path / LEDGER if path.is_dir() else path
    if not path.exists():
        raise ProfileError(
            f"run: {str(run)!r} has no {LEDGER}, expected the folder of a run that capibara train wrote"
        )
    count, damaged = _Count(), 0
    for line in _lines(path):
        if line.strip():
            damaged += not count.add(line)
    if not count.processes:
        what = f"{damaged:,} lines that are none of a ledger" if damaged else "no line yet"
        raise ProfileError(f"{path} has {what}: expected one that says when the run began to train")
    wall = count.end()
    found: dict[str, Price] = {}
    note = ""
    if price_per_hour is None:
        try:
            found = {chip: _price(chip, region, term, prices) for chip in count.spent}
        except UnknownPriceError as error:
            note = (
                f"unknown: {error}. Or give that of all devices together: price_per_hour (--price-per-hour)"
            )
    return Goodput(
        wall_seconds=wall,
        # What was added and taken away again may leave a rounding error below zero.
        seconds={name: max(0.0, value) for name, value in count.wall.items()},
        device_seconds={
            chip: {name: max(0.0, value) for name, value in spent.items()}
            for chip, spent in count.spent.items()
        },
        prices=found,
        price_note=note,
        step=count.step,
        processes=count.processes,
        steps_lost=count.lost,
        damaged=damaged,
        devices=count.devices,
        chip=count.chip,
        price_per_hour=price_per_hour,
    )


def _price(chip: str, region: str | None, term: str, path: str | os.PathLike[str] | None) -> Price:
    try:
        return get_price(chip, region=region, term=term, path=path)
    except ChipError as error:  # what the device calls itself
        raise UnknownPriceError(f"the price of {chip!r} is not known: it is not in the catalogue") from error


def _devices_per_chip(chip: str) -> int:
    """JAX devices of a chip that is sold: its cores, where each is a device of its own."""
    if not chip.endswith("-core"):
        return 1
    return get_chip(chip.removesuffix("-core")).cores_per_chip or 1


class _Count:
    def __init__(self) -> None:
        self.wall = dict.fromkeys((*BUCKETS, "lost", "down", "unaccounted"), 0.0)
        # Chip → bucket → seconds times devices.
        self.spent: dict[str, dict[str, float]] = {}
        self.first = self.last = self.overlap = self.set_back = 0.0
        self.step = self.processes = self.lost = self.devices = 0
        self.chip = ""
        # Steps that may still be lost: (the last one of a line, how many, their seconds by bucket, devices, chip).
        self.taken: list[tuple[int, int, dict[str, float], int, str]] = []

    def count(self, bucket: str, seconds: float, devices: int, chip: str) -> None:
        self.wall[bucket] += seconds
        self.spent.setdefault(chip, dict.fromkeys(self.wall, 0.0))[bucket] += seconds * devices

    def end(self) -> float:
        """Put what no line tells of into a bucket; the wall time.

        Within a process time was measured by a clock that is never set: where it is longer than what the lines' own
        times say, it counts.
        """
        known = math.fsum(self.wall.values())
        wall = self.last - self.first
        if wall < known + 1e-5:  # times since 1970 have steps of a quarter of a microsecond
            return known
        self.count("unaccounted", wall - known, self.devices, self.chip)
        return wall

    def add(self, line: bytes) -> bool:
        """Count a line; False if it is none of a ledger."""
        entry = _entry(line)
        if entry is None:
            # A power cut may leave half a line, or NULs, before the next one.
            at = line.rfind(_BEGINNING)
            entry = _entry(line[at:]) if at > 0 else None
            self._take(entry)
            return False
        return self._take(entry)

    def _take(self, entry: dict[str, Any] | None) -> bool:
        kind = None if entry is None else entry["kind"]
        if entry is None or not (self.processes or kind == "begin"):
            return False
        now, step = entry["time"], entry["step"]
        if kind == "begin":
            began = entry["began"]
            self.set_back = 0.0
            if not self.processes:
                self.first = began
            elif self.last - began > _MOST_OVERLAP:
                self.set_back = self.last - began
                self.overlap = 0.0
            else:
                self.count("down", max(0.0, began - self.last), self.devices, self.chip)
                # The next may begin before the last line of the one before, which was not waited for.
                self.overlap = max(0.0, self.last - began)
            self.processes += 1
            self.devices, self.chip = entry["devices"], entry["chip"]
            self.count("startup", 0.0, self.devices, self.chip)
            self.lose(step)
        elif kind == "back":
            self.lose(step)
        elif kind == "moved":
            self.devices = entry["devices"]
        else:
            self.spend(entry, step)
        self.step = step
        self.last = max(self.last, now + self.set_back)
        return True

    def spend(self, entry: Mapping[str, Any], step: int) -> None:
        spent: dict[str, float] = entry["seconds"]
        # Time of two processes at once passed only once.
        twice = min(self.overlap, spent.get("startup", 0.0))
        self.overlap -= twice
        if twice:
            spent["startup"] -= twice
        unfinished = entry.get("unfinished") is True
        for name, value in spent.items():
            bucket = "lost" if unfinished and name in _LOSABLE else name
            self.count(bucket, value, self.devices, self.chip)
        if unfinished:
            self.lost += max(0, entry["reached"] - step)
        else:
            losable = {name: spent.get(name, 0.0) for name in _LOSABLE}
            self.taken.append((step, max(0, step - self.step), losable, self.devices, self.chip))

    def lose(self, step: int) -> None:
        """Steps after ``step`` do not count: what was spent on them is lost."""
        while self.taken and self.taken[-1][0] > step:
            last, many, spent, devices, chip = self.taken.pop()
            # Of a line that lies on both sides, its share.
            gone = min(many, last - step)
            share = gone / many if many else 1.0
            self.lost += gone
            for name, value in spent.items():
                self.count(name, -share * value, devices, chip)
                self.count("lost", share * value, devices, chip)
            if gone < many:
                kept = {name: (1 - share) * value for name, value in spent.items()}
                self.taken.append((step, many - gone, kept, devices, chip))


def _entry(line: bytes) -> dict[str, Any] | None:
    """A line's fields, of which each has been looked at; None if it is no line of a ledger."""
    try:
        entry = json.loads(line)
        kind = entry["kind"]
        found: dict[str, Any] = {
            "kind": kind,
            "time": _number(entry["time"], _LATEST),
            "step": _whole(entry["step"], 0),
        }
        if kind == "begin":
            found["began"] = _number(entry["began"], _LATEST)
            found["chip"] = "".join(letter for letter in str(entry["chip"])[:100] if letter.isprintable())
        if kind in ("begin", "moved"):
            found["devices"] = _whole(entry["devices"], 1)
        elif kind == "spent":
            found["seconds"] = {
                str(name): _number(value, _LATEST) for name, value in entry["seconds"].items()
            }
            if found["seconds"].keys() - set(BUCKETS):
                return None
            found["unfinished"] = entry.get("unfinished") is True
            found["reached"] = _whole(entry.get("reached", entry["step"]), 0)
        elif kind != "back":
            return None
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError):
        return None
    return found


def _whole(value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST_STEPS:
        raise ValueError(value)
    return value


def _number(value: Any, most: float) -> float:
    # Of whole numbers the size is looked at before they become floats, which have no room for all of them.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(value)
    return float(value)


def _lines(path: Path) -> Iterator[bytes]:
    """Whole lines; of one that is longer than any of a ledger, its beginning."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO would be waited for otherwise
    with open(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ProfileError(f"{path} is not a regular file")
        while line := stream.readline(_MOST_LINE):
            rest = line
            while rest and not rest.endswith(b"\n"):
                rest = stream.readline(_MOST_LINE)
            if rest:  # else a process was killed while it wrote, or writes now
                yield line


def plot_goodput(found: Goodput, path: str | os.PathLike[str]) -> None:
    """Draw the buckets as one bar, as a PNG file.

    Raises:
      MissingExtraError: matplotlib is not installed. ProfileError: the file cannot be written.
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
            share = 100 * value / found.wall_seconds if found.wall_seconds else 0.0
            axes.barh(0, value, left=left, color=colour, label=f"{name} {share:.1f} %")
            left += value
    axes.set(yticks=[], xlabel="s", title=str(found).split("\n", 1)[0])
    if left:
        axes.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    try:
        replace_file(Path(path), content.getvalue())
    except OSError as error:
        raise ProfileError(
            f"path: the figure cannot be written to {str(path)!r} ({error}): choose another place"
        ) from error
