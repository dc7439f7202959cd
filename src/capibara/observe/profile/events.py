"""The events of a trace as one table: read by compiled code where there is some, by ``jax.profiler`` elsewhere.

A trace of some seconds has millions of events. ``jax.profiler.ProfileData`` makes an object of each (and keeps all of
the file's): some microseconds and a few hundred bytes. The compiled reader takes a hundredth of that.
"""

from __future__ import annotations

import ctypes
import mmap
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from capibara.native.loading import open_library
from capibara.observe.errors import ProfileError
from capibara.observe.profile.protobuf import protobuf_fields

__all__ = ["EventTable", "read_events"]

# jax.profiler's own format; more is not read.
_MOST_BYTES = 8 * 2**30
_MOST_ROWS = 100_000_000
_LONGEST = 10**18  # picoseconds: eleven days

# As in native/cc/trace.cc.
_DEEPEST, _MOST_FIRSTS = 1000, 8
_ROW = np.dtype(
    [
        ("start_ps", "i8"),
        ("duration_ps", "i8"),
        ("program", "i8"),
        ("run", "i8"),
        ("flow", "i8"),
        ("line", "i4"),
        ("name", "i4"),
        ("op", "i4"),
        ("device", "i4"),
    ]
)
_MARK = np.dtype([("end_ps", "i8"), ("flow", "i8"), ("op", "i8"), ("next", "i8")])
_SCOPE = np.dtype([("id", "i8"), ("outer", "i8")])
_SCOPES = b"/host:__ScopeRangeCallStack__"


@dataclass(frozen=True)
class EventTable:
    """Events that say their operation, and all of TPUs' planes.

    Attributes:
      rows: ``start_ps`` (after an arbitrary point), ``duration_ps``, ``program`` (XLA's number of the module; -1: not
        said), ``run`` (0 on GPUs: see scopes), ``flow`` (see marks; on GPUs the scope, 0: not said), ``line``,
        ``name``, ``op`` (a text, -1: not said), ``device`` (of a CPU).
      marks: XLA on CPUs marks the ends of operations on the threads that end them. Those behind the operation's span:
        ``end_ps``, the operation's ``flow``, ``op``; ``next``, a row (-1: none): of the operations with the run and the
        device of the last one that the thread ran before, the first within the task of a pool that the thread is at.
      scopes: on GPUs, what the host was at when it started work (``id``), within what else (``outer``). An outermost
        scope is a run of a program; those within it are its operations, loops and CUDA graphs as they are started.
      texts: that ``name`` and ``op`` are numbers of.
      lines: (plane, line) names.
    """

    rows: np.ndarray
    marks: np.ndarray
    scopes: np.ndarray
    texts: list[str]
    lines: list[tuple[str, str]]


def read_events(path: str | Path) -> EventTable:
    """Read a ``*.xplane.pb`` file.

    Raises:
      ProfileError: it is none, or too large.
    """
    path = Path(path)
    if not path.is_file():
        raise ProfileError(
            f"path: {str(path)!r} is not a file; expected a *.xplane.pb, as jax.profiler.trace() writes"
        )
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ProfileError(f"{path} has {size:,} bytes, more than {_MOST_BYTES:,}: profile fewer steps")
    table = _by_profile_data(path) if _compiled() is None else _by_compiled_code(path)
    lengths = table.rows["duration_ps"]
    if len(lengths) and (lengths.min() < 0 or lengths.max() > _LONGEST):
        raise ProfileError(f"{path} is damaged: an event has a length that no event can have")
    return table


@cache
def _compiled() -> Any:
    library, _ = open_library()
    if library is None:
        return None
    function = library.capibara_trace_rows
    whole, place = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (place, whole) * 6 + (place,)
    function.restype = ctypes.c_int32
    return function


def _by_compiled_code(path: Path) -> EventTable:
    with open(path, "rb") as stream:
        try:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file
            return EventTable(np.zeros(0, _ROW), np.zeros(0, _MARK), np.zeros(0, _SCOPE), [], [])
    data = np.frombuffer(mapped, np.uint8)
    read = _compiled()
    counts = np.zeros(5, np.int64)
    fine = read(data.ctypes.data, len(data), *(None, 0) * 5, counts.ctypes.data)
    if not fine:
        raise ProfileError(f"{path} is not a trace of jax.profiler: it is damaged, or something else")
    if max(counts[0], counts[3], counts[4]) > _MOST_ROWS:
        raise ProfileError(f"{path} has {counts[0]:,} events, more than {_MOST_ROWS:,}: profile fewer steps")
    rows = np.empty(counts[0], _ROW)
    pieces = np.empty((counts[1], 2), np.int64)
    lines = np.empty((counts[2], 2), np.int32)
    marks = np.empty(counts[3], _MARK)
    scopes = np.empty(counts[4], _SCOPE)
    places = (rows, pieces, lines, marks, scopes)
    arguments = [part for one in places for part in (one.ctypes.data, len(one))]
    read(data.ctypes.data, len(data), *arguments, counts.ctypes.data)
    texts = [bytes(data[at : at + length]).decode(errors="replace") for at, length in pieces.tolist()]
    if hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)  # the rows are enough; what follows takes as much memory again
    return EventTable(
        rows, marks, scopes, texts, [(texts[plane], texts[name]) for plane, name in lines.tolist()]
    )


def _by_profile_data(path: Path) -> EventTable:
    from jax.profiler import ProfileData

    try:
        data = ProfileData.from_file(str(path))
    except Exception as error:
        raise ProfileError(f"{path} is not a trace of jax.profiler: {error}") from error
    numbers: dict[str, int] = {}
    lines: list[tuple[str, str]] = []
    rows, marks = [], []
    with warnings.catch_warnings():
        # On Python 3.13 the iterators of jax.profiler warn that they do not say their module.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            every = plane.name.startswith("/device:TPU:")
            for line in plane.lines:
                lines.append((plane.name, line.name))
                flow_before, end_before = 0, 0
                tasks = [_Task()]
                for event in line.events:
                    stats = dict(event.stats)
                    start, duration = round(event.start_ns * 1000), round(event.duration_ns * 1000)
                    flow = int(stats.get("_c", stats.get("_p", stats.get("scope_range_id", 0))))
                    op = stats.get("hlo_op")
                    if op is None and not every:
                        if event.name == "ThreadpoolListener::StartRegion" and len(tasks) < _DEEPEST:
                            tasks.append(_Task())
                        elif event.name == "ThreadpoolListener::StopRegion" and len(tasks) > 1:
                            tasks.pop()
                        op = event.name[5:] if event.name.startswith("end: ") else ""
                        # Most stand within the operation's span, and say nothing new.
                        if op and flow and not (flow == flow_before and start <= end_before):
                            numbered = numbers.setdefault(op, len(numbers))
                            marks.append((start, flow, numbered, tasks[-1].next))
                        continue
                    flow_before, end_before = flow, start + duration
                    program, run = int(stats.get("program_id", -1)), int(stats.get("run_id", 0))
                    device = int(stats.get("device_ordinal", 0))
                    tasks[-1].add((program, run, device), len(rows))
                    rows.append(
                        (
                            start,
                            duration,
                            program,
                            run,
                            flow,
                            len(lines) - 1,
                            numbers.setdefault(event.name, len(numbers)),
                            -1 if op is None else numbers.setdefault(str(op), len(numbers)),
                            device,
                        )
                    )
    scopes = np.array(_scopes(path), _SCOPE)
    return EventTable(np.array(rows, _ROW), np.array(marks, _MARK), scopes, list(numbers), lines)


class _Task:
    """A task of a pool of threads, and the first row of each run on a device within it."""

    def __init__(self) -> None:
        self._firsts: dict[tuple[int, int, int], int] = {}
        self.next = -1

    def add(self, place: tuple[int, int, int], row: int) -> None:
        self.next = self._firsts.get(place, row)
        if len(self._firsts) < _MOST_FIRSTS:
            self._firsts.setdefault(place, row)


def _scopes(path: Path) -> list[tuple[int, int]]:
    """Of the plane of scopes, whose stats jax.profiler gives without their keys."""
    found = []
    for number, plane in protobuf_fields(path.read_bytes()):
        if (
            number != 1
            or not isinstance(plane, memoryview)
            or (2, _SCOPES) not in list(protobuf_fields(plane))
        ):
            continue
        for part, stat in protobuf_fields(plane):
            if part == 6 and isinstance(stat, memoryview):
                about = {key: value for key, value in protobuf_fields(stat) if isinstance(value, int)}
                found.append((about.get(1, 0), about.get(3, about.get(4, 0))))
    return found
