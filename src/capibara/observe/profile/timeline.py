"""What devices and the host did over the time of a region, in a bounded number of equal parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "BINS",
    "MOST_TRACKS",
    "WHOLE",
    "Timeline",
    "Track",
    "covered_until",
    "edges_of",
    "host_track",
    "thousandths",
]

BINS = 600
# Devices that are kept.
MOST_TRACKS = 8
# Shares are kept in thousandths.
WHOLE = 1000
_MOST_BINS = 2000
_MOST_ROWS = 16


@dataclass(frozen=True)
class Track:
    """A device, or the host.

    Attributes:
      name: ``"cpu:0"``, ``"tpu:3"``, ``"host"``.
      shares: of each part of the time, thousandths in which it did one kind of work and none of those before, by kind:
        ``"compute"``, ``"kernel"``, ``"copy"``, ``"collective"`` of a device; ``"compiling"`` and ``"tracing"``
        (functions, before they are compiled) of the host. What is missing to 1,000 it was idle.
    """

    name: str
    shares: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Timeline:
    """What ran when.

    Attributes:
      seconds: of the region, which is divided into equal parts.
      bins: how many.
      tracks: the host's and those of the first devices.
      left_out: further devices.
    """

    seconds: float
    bins: int
    tracks: tuple[Track, ...]
    left_out: int = 0

    def to_data(self) -> dict[str, Any]:
        """For JSON: shares as one text of numbers for each kind."""
        tracks = [
            {"name": one.name, "shares": {kind: " ".join(map(str, row)) for kind, row in one.shares.items()}}
            for one in self.tracks
        ]
        return {"seconds": self.seconds, "bins": self.bins, "tracks": tracks, "left_out": self.left_out}

    @classmethod
    def from_data(cls, data: Any) -> Timeline | None:
        """Read the output of :meth:`to_data`; None stands for itself.

        Raises:
          TypeError, ValueError, LookupError: it is something else.
        """
        if data is None:
            return None
        if not isinstance(data, Mapping) or set(data) != {"seconds", "bins", "tracks", "left_out"}:
            raise ValueError(f"timeline: got {data!r:.100}, expected seconds, bins, tracks and left_out")
        seconds, bins, left_out = data["seconds"], data["bins"], data["left_out"]
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 2**63:
            raise ValueError(f"timeline: seconds: got {seconds!r:.100}, expected a number above 0")
        for name, value, least, most in (("bins", bins, 1, _MOST_BINS), ("left_out", left_out, 0, 2**31)):
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ValueError(f"timeline: {name}: got {value!r:.100}, expected {least} to {most}")
        tracks = data["tracks"]
        if not isinstance(tracks, list) or len(tracks) > MOST_TRACKS + 1:
            raise ValueError(f"timeline: tracks: got {tracks!r:.100}, expected at most {MOST_TRACKS + 1}")
        return cls(float(seconds), bins, tuple(_track(one, bins) for one in tracks), left_out)


def _track(data: Any, bins: int) -> Track:
    if not isinstance(data, Mapping) or set(data) != {"name", "shares"}:
        raise ValueError(f"timeline: got a track {data!r:.100}, expected name and shares")
    name, shares = data["name"], data["shares"]
    if not isinstance(shares, Mapping) or len(shares) > _MOST_ROWS:
        raise ValueError(f"timeline: shares: got {shares!r:.100}, expected texts by kind")
    read: dict[str, tuple[int, ...]] = {}
    for text in (name, *shares):
        if not isinstance(text, str) or not text.isprintable() or len(text) > 100:
            raise ValueError(f"timeline: got the name {text!r:.100}, expected printable text")
    sums = np.zeros(bins, np.int64)
    for kind, row in shares.items():
        if not isinstance(row, str) or len(row) > 5 * bins:
            raise ValueError(f"timeline: {kind}: got {row!r:.100}, expected {bins} numbers from 0 to {WHOLE}")
        numbers = row.split(" ")
        if len(numbers) != bins or not all(one.isascii() and one.isdigit() for one in numbers):
            raise ValueError(f"timeline: {kind}: got {row!r:.100}, expected {bins} numbers from 0 to {WHOLE}")
        read[kind] = tuple(map(int, numbers))
        sums += np.array(read[kind], np.int64)
    if sums.max(initial=0) > WHOLE:
        raise ValueError(f"timeline: {name}: got kinds that are more than all of the time together")
    return Track(name, read)


def edges_of(begin: int, length: int, bins: int) -> np.ndarray:
    """Where the equal parts of a time begin, and its end."""
    return begin + np.linspace(0, length, bins + 1).astype(np.int64)


def thousandths(rows: Mapping[str, np.ndarray], widths: np.ndarray) -> dict[str, tuple[int, ...]]:
    """Rounded so that no part has more than all of its time; kinds that do not occur are left out."""
    found: dict[str, tuple[int, ...]] = {}
    done, total = np.zeros(len(widths), np.int64), np.zeros(len(widths))
    for kind, row in rows.items():
        total = total + row
        upto = np.clip(np.rint(WHOLE * total / np.maximum(widths, 1)).astype(np.int64), done, WHOLE)
        if (upto > done).any():
            found[kind] = tuple((upto - done).tolist())
        done = upto
    return found


def covered_until(starts: np.ndarray, lengths: np.ndarray, times: np.ndarray) -> np.ndarray:
    """The length of the union of intervals before each of several times. The starts are sorted."""
    if not len(starts):
        return np.zeros(len(times), np.int64)
    ends = np.maximum.accumulate(starts + lengths)
    # Of each interval, what lies behind all that began before it.
    gained = np.maximum(starts[1:], ends[:-1])
    np.subtract(ends[1:], gained, out=gained)
    sums = np.concatenate([lengths[:1], gained])
    np.cumsum(sums, out=sums)
    before = np.searchsorted(starts, times)
    # Of those that began before a time, what lies behind it: until the latest of their ends there is no gap.
    last = np.maximum(before - 1, 0)
    return np.where(before > 0, sums[last] - np.maximum(0, ends[last] - times), 0)


def host_track(spans: Sequence[tuple[str, int, int]], nanoseconds: int, bins: int = BINS) -> Track:
    """The host's track.

    Args:
      spans: ``"compiling"`` or ``"tracing"``, start after the region's, and length, in nanoseconds. Where they lie
        within one another it is compiling.
      nanoseconds: of the region. bins: parts.
    """
    edges = edges_of(0, max(1, nanoseconds), bins)
    rows: dict[str, np.ndarray] = {}
    before = np.zeros(bins)
    for kind, kinds in (("compiling", ("compiling",)), ("tracing", ("compiling", "tracing"))):
        mine = np.array([span[1:] for span in spans if span[0] in kinds], np.int64).reshape(-1, 2)
        mine = mine[np.argsort(mine[:, 0], kind="stable")]
        covered = np.diff(covered_until(mine[:, 0], mine[:, 1], edges)).astype(float)
        rows[kind], before = covered - before, covered
    return Track("host", thousandths(rows, np.diff(edges)))
