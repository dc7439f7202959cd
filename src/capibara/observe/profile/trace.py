"""Operations in a trace of ``jax.profiler``: how often each ran, for how long, and when its device was at work.

Three kinds of planes hold them. XLA on CPUs puts them on the host's plane, in the line of the thread that ran them;
each event says its program, device and run. On GPUs each device has a plane with a line for each stream (see
:mod:`capibara.observe.profile.gpu`), and on TPUs one with the lines "XLA Ops" and "XLA Modules"; there an operation
belongs to the module within which it lies.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from capibara.observe.errors import ProfileError
from capibara.observe.profile.events import EventTable, read_events
from capibara.observe.profile.gpu import gpu_events
from capibara.observe.profile.result import KINDS
from capibara.observe.profile.timeline import (
    BINS,
    MOST_TRACKS,
    Timeline,
    Track,
    covered_until,
    edges_of,
    thousandths,
)

__all__ = ["REGION", "Trace", "covered", "find_trace", "mark_region", "read_trace"]

# An event of this name marks when the region began, on the trace's clock.
REGION = "capibara_region_begins"
_OF_PLANE = 100_000  # devices of one plane
_FOREVER = np.iinfo(np.int64).max

_MODULE = re.compile(r"^(.*)\((\d+)\)$")
_TPU_NAME = re.compile(r"^%?([^\s=]+) = ")


@dataclass
class Trace:
    """What is counted of a trace.

    Attributes:
      counts: (program number, operation) → how often it ran, and its nanoseconds in all.
      runs: program number → runs, one for each device.
      devices: that ran something.
      busy_ns: time in which a device ran something, mean over devices; of emulated devices, which share the cores, time
        in which any did.
      exposed_ns: time in which a device ran collectives and nothing else, mean over devices; of emulated devices, time
        in which some did so and none ran anything else.
      events: operations.
      unnamed: (program number, kernel) → likewise, of kernels in CUDA graphs that are no operation of the program's.
      unclear: programs of which the trace does not say when a run began: how often they ran is not known.
      in_graphs: programs of which operations ran in CUDA graphs.
      within_ns: time in which a GPU ran nothing between operations of one run of a program, mean over devices; None of
        other devices.
      wall_seconds: of the region, if its time was given.
      timeline: what the devices did when; None if it was not asked for.
      emulated: whether the devices are several of a CPU.
    """

    counts: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    runs: dict[int, int] = field(default_factory=dict)
    devices: int = 0
    busy_ns: float = 0.0
    exposed_ns: float = 0.0
    events: int = 0
    unnamed: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    unclear: frozenset[int] = frozenset()
    in_graphs: frozenset[int] = frozenset()
    within_ns: float | None = None
    wall_seconds: float | None = None
    timeline: Timeline | None = None
    emulated: bool = False


def mark_region() -> None:
    """Note in the trace that is being taken that the region begins now."""
    import jax

    # As XLA's own events on CPUs, so that the reader of those finds it.
    with jax.profiler.TraceAnnotation(REGION, hlo_op=REGION, program_id=0, run_id=0, device_ordinal=0):
        pass


def find_trace(folder: str | Path) -> Path:
    """The newest ``*.xplane.pb`` under a folder.

    Raises:
      ProfileError: there is none.
    """
    found = sorted(Path(folder).glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ProfileError(
            f"folder: {str(folder)!r} holds no trace (*.xplane.pb), as jax.profiler.trace() writes it"
        )
    return found[-1]


def read_trace(
    path: str | Path,
    operations: Mapping[int, Mapping[str, str]],
    wall_seconds: float | None = None,
    trips: Mapping[int, Mapping[str, int | None]] | None = None,
    least_seconds: float | None = None,
) -> Trace:
    """Count the operations of a trace.

    Args:
      path: a ``*.xplane.pb`` file.
      operations: program number → names of its operations, in the order in which they run, and the kind of each (one
        of :data:`KINDS`). Others (loops, whose time is that of what they contain; parts of the runtime) are left out.
      wall_seconds: of the region, for its timeline. It begins at the event of :func:`mark_region`, or else so that the
        last operation ends with it.
        On CPUs, whose trace and host have one clock, the region ends with the last operation if that is earlier.
      trips: program number → how often each operation runs in one run of the program, where that is known; only
        CUDA graphs are looked up in it.
      least_seconds: of the region, that the host saw pass.

    Raises:
      ProfileError: the file is none, or too large.
    """
    table = read_events(path)
    longer = _end(table.rows, table.marks)
    rows, began = _unmarked(table)
    rows = _placed(table, rows)
    gpu = gpu_events(table, rows, operations, trips or {})
    # Runs are counted of programs that are not known, too.
    programs, program_of = _numbered(rows["program"])
    devices, device_of = _numbered(rows["device"])
    _, run_of = _numbered(rows["run"])
    trace = Trace()
    many = max(1, int(run_of.max(initial=0)) + 1)
    place_of = program_of.astype(np.int64) * len(devices) + device_of
    runs = np.unique(place_of * many + run_of) // many // max(1, len(devices))
    del run_of, place_of
    trace.runs = dict(
        zip(programs.tolist(), np.bincount(runs, minlength=len(programs)).tolist(), strict=True)
    )
    # (program, operation) as one number, of those that occur; what each is: from 1 on, the kinds in their order, 0 left
    # out.
    width = len(table.texts) + 1
    pairs, pair_of = _numbered(program_of.astype(np.int64) * width + rows["op"])
    del program_of
    names = [(programs[pair // width].item(), table.texts[pair % width]) for pair in pairs.tolist()]
    unnamed = set() if gpu is None else {(program, table.texts[op]) for program, op in gpu.unnamed}
    kinds = np.zeros(len(pairs), np.int8)
    for place, (program, name) in enumerate(names):
        kind = "kernel" if (program, name) in unnamed else operations.get(program, {}).get(name)
        kinds[place] = 0 if kind is None else 1 + KINDS.index(kind)
    kind_of = kinds[pair_of]
    times = np.bincount(pair_of, weights=rows["duration_ps"], minlength=len(pairs)) / 1000
    for pair, spent in _united(rows, pair_of, np.flatnonzero(np.isin(rows["op"], longer))).items():
        times[pair] = spent / 1000
    counts = np.bincount(pair_of, minlength=len(pairs))
    trace.events = int(counts[kinds > 0].sum())
    if gpu is not None:
        counts = np.bincount(pair_of[gpu.first], minlength=len(pairs))
        trace.unclear, trace.in_graphs = gpu.unclear, gpu.in_graphs
    for place in np.flatnonzero(kinds).tolist():
        into = trace.unnamed if names[place] in unnamed else trace.counts
        into[names[place]] = int(counts[place]), float(times[place])
    del pair_of
    if wall_seconds is not None and least_seconds is not None and began is not None and _all_on_hosts(table):
        ends = int((rows["start_ps"] + rows["duration_ps"]).max(initial=began))
        wall_seconds = min(wall_seconds, max(least_seconds, (ends - began) / 1e12))
    trace.wall_seconds = wall_seconds
    edges = None if wall_seconds is None else _edges(rows, kind_of > 0, began, wall_seconds)
    tracks: list[Track] = []
    for number, device in enumerate(devices.tolist()):
        mine = (device_of == number) & (kind_of > 0)
        if not mine.any():
            continue
        trace.devices += 1
        kept = edges if len(tracks) < MOST_TRACKS else None
        shares, busy, exposed = _device(
            rows["start_ps"][mine], rows["duration_ps"][mine], kind_of[mine], kept
        )
        trace.busy_ns += busy / 1000
        if gpu is not None and gpu.here[mine].all():
            trace.within_ns = (trace.within_ns or 0.0) + (_in_runs(rows[mine]) - busy) / 1000
        trace.exposed_ns += exposed / 1000
        if kept is not None:
            tracks.append(Track(_device_name(device, table), shares))
    trace.busy_ns /= max(1, trace.devices)
    trace.exposed_ns /= max(1, trace.devices)
    if trace.devices > 1 and _all_on_hosts(table):
        # Emulated devices: while one waits for another, that one has the cores.
        mine = kind_of > 0
        _, busy, exposed = _device(rows["start_ps"][mine], rows["duration_ps"][mine], kind_of[mine], None)
        trace.busy_ns, trace.exposed_ns, trace.emulated = busy / 1000, exposed / 1000, True
    if trace.within_ns is not None:
        trace.within_ns = max(0.0, trace.within_ns) / trace.devices
    if wall_seconds is not None:
        trace.timeline = Timeline(wall_seconds, BINS, tuple(tracks), trace.devices - len(tracks))
    return trace


def _unmarked(table: EventTable) -> tuple[np.ndarray, int | None]:
    """The events without that of :func:`mark_region`, and its time."""
    rows = table.rows
    if REGION not in table.texts:
        return rows, None
    marks = np.flatnonzero(rows["op"] == table.texts.index(REGION))
    if not len(marks):
        return rows, None
    began = int(rows["start_ps"][marks].max())
    for mark in marks[::-1].tolist():  # in place: there may be millions
        rows[mark] = rows[-1]
        rows = rows[:-1]
    return rows, began


def _all_on_hosts(table: EventTable) -> bool:
    return not any(plane.startswith("/device:") for plane, _ in table.lines)


def _edges(rows: np.ndarray, counted: np.ndarray, began: int | None, wall_seconds: float) -> np.ndarray:
    """The parts of the region's time, on the trace's clock."""
    wall = max(BINS, round(wall_seconds * 1e12))
    if counted.any():
        ends = rows["start_ps"] + rows["duration_ps"]
        last = int(ends.max(initial=0, where=counted))
        first = int(rows["start_ps"].min(initial=_FOREVER, where=counted))
        # Clocks of devices that are told apart from the host's.
        off = wall // 50 + 1_000_000_000
        if began is None or first < began - off or last > began + wall + off:
            began = last - wall
    return edges_of(began or 0, wall, BINS)


def _device(
    starts: np.ndarray, lengths: np.ndarray, kind_of: np.ndarray, edges: np.ndarray | None
) -> tuple[dict[str, tuple[int, ...]], int, int]:
    """Of one device: shares of each part of the time by kind; the time at work; and that with collectives alone."""
    order = np.argsort(starts, kind="stable")
    starts, lengths, kind_of = starts[order], lengths[order], kind_of[order]
    del order
    times = np.append(np.zeros(0, np.int64) if edges is None else edges, _FOREVER)
    until = np.zeros(len(times), np.int64)
    rows: dict[str, np.ndarray] = {}
    exposed = 0
    for number, kind in enumerate(KINDS, 1):
        before = until
        if (kind_of == number).any():
            upto = kind_of <= number
            until = covered_until(starts[upto], lengths[upto], times)
        if kind == "collective":
            exposed = int(until[-1] - before[-1])
        rows[kind] = np.diff((until - before)[:-1]).astype(float)
    shares = {} if edges is None else thousandths(rows, np.diff(edges))
    return shares, int(until[-1]), exposed


def _in_runs(rows: np.ndarray) -> int:
    """Of one device's rows: the time from the first to the last operation of a run, over all runs."""
    rows = rows[np.argsort(rows["run"], kind="stable")]
    begins = np.flatnonzero(np.diff(rows["run"], prepend=rows["run"][0] - 1))
    starts = np.minimum.reduceat(rows["start_ps"], begins)
    ends = np.maximum.reduceat(rows["start_ps"] + rows["duration_ps"], begins)
    return covered(starts, ends - starts)


def _device_name(device: int, table: EventTable) -> str:
    """``"tpu:3"``, ``"cpu:0"``, from the name of the plane and the number that an event says."""
    plane = list(dict.fromkeys(plane for plane, _ in table.lines))[device // _OF_PLANE]
    found = re.fullmatch(r"/device:([A-Za-z]+):(\d{1,6})", plane)
    return f"{found[1].lower()}:{found[2]}" if found else f"cpu:{device % _OF_PLANE}"


def _numbered(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different values, and of each value its number among them."""
    different = np.unique(values)
    return different, np.searchsorted(different, values).astype(np.int32)


def covered(starts: np.ndarray, lengths: np.ndarray) -> int:
    """The length of the union of intervals, of integers."""
    if not len(starts):
        return 0
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(starts + lengths[order])
    # Of each interval, what lies behind all that began before it.
    before = np.concatenate([starts[:1], ends[:-1]])
    return int(np.maximum(0, ends - np.maximum(before, starts)).sum())


def _placed(table: EventTable, rows: np.ndarray) -> np.ndarray:
    """Events of operations, each with its program, and devices numbered apart from one another."""
    if not len(rows):
        return rows
    planes = {plane: number for number, plane in enumerate(dict.fromkeys(plane for plane, _ in table.lines))}
    plane_of = np.array([planes[plane] for plane, _ in table.lines], np.int32)[rows["line"]]
    rows["device"] += plane_of * _OF_PLANE
    tpu = np.array([plane.startswith("/device:TPU:") for plane, _ in table.lines])[rows["line"]]
    said = ~tpu & (rows["op"] >= 0) & (rows["program"] >= 0)
    if said.all():
        return rows  # not copied: there may be millions
    kept = [rows[said]]
    if tpu.any():
        short = _short_names(table)
        title = np.array([name for _, name in table.lines])[rows["line"]]
        kept += [
            _within_modules(rows, plane_of == plane, title, short, table.texts)
            for plane in np.unique(plane_of[tpu])
        ]
    return np.concatenate(kept)


def _end(rows: np.ndarray, marks: np.ndarray, step: int = 1 << 20) -> np.ndarray:
    """Make operations as long as they took; the names of those that were made longer.

    XLA on CPUs gives large operations to a pool of threads, and the span ends when they are given away: a mark on
    another thread has the end. Before it that thread may run what waited for the operation, with all that follows: then
    the end is where the first of that begins. A mark may also be late where threads wait for processors.
    """
    if not len(marks):
        return np.zeros(0, np.int32)
    marks = marks[np.argsort(marks["flow"], kind="stable")]
    longer = np.zeros(len(rows), bool)
    for begin in range(
        0, len(rows), step
    ):  # what is computed for all of millions at once takes as much again
        part = rows[begin : begin + step]
        at = np.minimum(np.searchsorted(marks["flow"], part["flow"]), len(marks) - 1)
        lengths = marks["end_ps"][at] - part["start_ps"]
        nexts = marks["next"][at]
        after = rows[["start_ps", "program", "run", "device"]][nexts]
        followed = (nexts >= 0) & (after["start_ps"] > part["start_ps"])
        for name in ("program", "run", "device"):
            followed &= after[name] == part[name]
        lengths = np.where(followed, np.minimum(lengths, after["start_ps"] - part["start_ps"]), lengths)
        found = (marks["flow"][at] == part["flow"]) & (marks["op"][at] == part["op"])
        found &= lengths > part["duration_ps"]
        part["duration_ps"][found] = lengths[found]
        longer[begin : begin + step] = found
    return np.unique(rows["op"][longer])


def _united(rows: np.ndarray, pair_of: np.ndarray, mine: np.ndarray) -> dict[int, int]:
    """Picoseconds of the union of the spans of some rows on each device, summed over devices, by pair.

    Threads of a pool have spans of their own for a part of an operation, and one whose mark is late lies over the next.
    """
    mine = mine[np.lexsort((rows["device"][mine], pair_of[mine]))]
    pairs, devices = pair_of[mine], rows["device"][mine]
    borders = np.flatnonzero((np.diff(pairs) != 0) | (np.diff(devices) != 0)) + 1
    found: dict[int, int] = {}
    for group in np.split(mine, borders):
        if len(group):
            pair = int(pair_of[group[0]])
            spent = covered(rows["start_ps"][group], rows["duration_ps"][group])
            found[pair] = found.get(pair, 0) + spent
    return found


def _short_names(table: EventTable) -> np.ndarray:
    """TPUs name an operation by its whole line of the program: the number of the text that is its name alone."""
    numbers = {text: number for number, text in enumerate(table.texts)}
    short = []
    for text in list(table.texts):
        found = _TPU_NAME.match(text)
        name = found[1] if found else text
        if name not in numbers:
            numbers[name] = len(table.texts)
            table.texts.append(name)
        short.append(numbers[name])
    return np.array(short, np.int32)


def _within_modules(
    rows: np.ndarray, here: np.ndarray, title: np.ndarray, short: np.ndarray, texts: list[str]
) -> np.ndarray:
    """Operations of one TPU, each with the program and the run of the module within which it lies."""
    modules = np.sort(rows[here & (title == "XLA Modules")], order="start_ps")
    work = rows[here & np.isin(title, ("XLA Ops", "Async XLA Ops"))]
    if not len(modules) or not len(work):
        return work[:0]
    found = [_MODULE.match(texts[name]) for name in modules["name"].tolist()]
    numbers = np.array([int(one[2]) if one else -1 for one in found], np.int64)
    at = np.searchsorted(modules["start_ps"], work["start_ps"], side="right") - 1
    inside = (at >= 0) & (work["start_ps"] <= (modules["start_ps"] + modules["duration_ps"])[at])
    work, at = work[inside], at[inside]
    work["program"], work["run"], work["op"] = numbers[at], at, short[work["name"]]
    return work[work["program"] >= 0]
