"""Several traces of one region as one, and the region's own time, of which what lies between them is no part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from capibara.observe.profile.result import KINDS
from capibara.observe.profile.timeline import BINS, MOST_TRACKS, WHOLE, Timeline, Track, thousandths
from capibara.observe.profile.trace import Trace

__all__ = ["RegionClock", "join_timelines", "join_traces"]


class RegionClock:
    """Seconds of a region, which stand still between its parts.

    Args:
      parts: of each, in order, when it began (``perf_counter``) and its seconds.
    """

    def __init__(self, parts: Sequence[tuple[float, float]]) -> None:
        lengths = [seconds for _, seconds in parts]
        offsets = np.concatenate([[0.0], np.cumsum(lengths)])
        self._times = np.array([time for began, seconds in parts for time in (began, began + seconds)])
        self._seconds = np.repeat(offsets, 2)[1:-1]

    def at(self, time: float) -> float:
        """The region's second at a time by ``perf_counter``: 0 before the region, all of its seconds after it."""
        return float(np.interp(time, self._times, self._seconds)) if len(self._times) else 0.0


def join_traces(traces: Sequence[Trace]) -> Trace:
    """One trace with the sums of several, which were taken one after the other in one process."""
    if len(traces) == 1:
        return traces[0]
    devices = max((one.devices for one in traces), default=0)
    joined = Trace(devices=devices)
    for one in traces:
        for number, runs in one.runs.items():
            joined.runs[number] = joined.runs.get(number, 0) + runs
        for mine, its in ((joined.counts, one.counts), (joined.unnamed, one.unnamed)):
            for key, (count, spent) in its.items():
                before = mine.get(key, (0, 0.0))
                mine[key] = before[0] + count, before[1] + spent
        joined.events += one.events
        joined.unclear |= one.unclear
        joined.in_graphs |= one.in_graphs
        # Means over the devices of each trace become one over those of all; emulated ones have one time together.
        share = 1.0 if one.emulated else one.devices / max(1, devices)
        joined.busy_ns += share * one.busy_ns
        joined.exposed_ns += share * one.exposed_ns
        joined.emulated |= one.emulated
        if one.within_ns is not None:
            joined.within_ns = (joined.within_ns or 0.0) + share * one.within_ns
        if one.wall_seconds is not None:
            joined.wall_seconds = (joined.wall_seconds or 0.0) + one.wall_seconds
    joined.timeline = join_timelines([one.timeline for one in traces if one.timeline is not None])
    return joined


def join_timelines(timelines: Sequence[Timeline], bins: int = BINS) -> Timeline | None:
    """One timeline of several, one after the other."""
    if len(timelines) < 2:
        return timelines[0] if timelines else None
    offsets = np.concatenate([[0.0], np.cumsum([one.seconds for one in timelines])])
    edges = np.linspace(0.0, offsets[-1], bins + 1)
    rows: dict[str, dict[str, np.ndarray]] = {}
    for offset, one in zip(offsets[:-1], timelines, strict=True):
        borders = offset + np.linspace(0.0, one.seconds, one.bins + 1)
        for track in one.tracks:
            mine = rows.setdefault(track.name, {})
            for kind, shares in track.shares.items():
                spent = np.concatenate([[0.0], np.cumsum(shares)]) * one.seconds / one.bins / WHOLE
                mine[kind] = mine.get(kind, np.zeros(bins)) + np.diff(np.interp(edges, borders, spent))
    widths = np.diff(edges) * 1e9
    tracks = [
        # In the order in which kinds are told apart where they overlap.
        Track(name, thousandths({kind: 1e9 * mine[kind] for kind in KINDS if kind in mine}, widths))
        for name, mine in rows.items()
    ]
    more = max(one.left_out for one in timelines) + max(0, len(tracks) - MOST_TRACKS)
    return Timeline(float(offsets[-1]), bins, tuple(tracks[:MOST_TRACKS]), more)
