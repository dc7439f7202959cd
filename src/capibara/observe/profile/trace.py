"""Operations in a trace of ``jax.profiler``: how often each ran, for how long, and when its device was at work.

Three kinds of planes hold them. XLA on CPUs puts them on the host's plane, in the line of the thread that ran them;
each event says its program, device and run. On GPUs each device has a plane with a line for each stream, and on TPUs
one with the lines "XLA Ops" and "XLA Modules"; there an operation belongs to the module within which it lies.
"""

from __future__ import annotations

import bisect
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from capibara.observe.errors import ProfileError

__all__ = ["Trace", "find_trace", "read_trace"]

# jax.profiler's own format; a file of more than this is not read into memory.
_MOST_BYTES = 4 * 2**30
_MODULE = re.compile(r"^(.*)\((\d+)\)$")
_TPU_NAME = re.compile(r"^%?([^\s=]+) = ")


@dataclass
class Trace:
    """What is counted of a trace.

    Attributes:
      counts: (program number, operation) → how often it ran, and its nanoseconds in all.
      spans: device → intervals in ns in which it ran an operation other than a collective.
      exchanges: device → intervals in ns of collectives.
      runs: program number → runs, one for each device.
      names: program number → name.
      events: operations.
    """

    counts: dict[tuple[int, str], list[float]] = field(default_factory=dict)
    spans: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    exchanges: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))
    runs: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    events: int = 0

    @property
    def devices(self) -> int:
        """Devices that ran something."""
        return len({*self.spans, *self.exchanges})

    def busy_ns(self) -> float:
        """Time in which a device ran something, mean over devices."""
        devices = {*self.spans, *self.exchanges}
        total = sum(_length(_union([*self.spans[one], *self.exchanges[one]])) for one in devices)
        return total / max(1, len(devices))

    def exposed_ns(self) -> float:
        """Time in which a device ran collectives and nothing else, mean over devices."""
        total = 0.0
        for device in {*self.spans, *self.exchanges}:
            work = _union(self.spans[device])
            both = _union([*self.spans[device], *self.exchanges[device]])
            total += _length(both) - _length(work)
        return total / max(1, len({*self.spans, *self.exchanges}))


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
    path: str | Path, operations: Mapping[int, Collection[str]], collectives: Collection[str]
) -> Trace:
    """Count the operations of a trace.

    Args:
      path: a ``*.xplane.pb`` file.
      operations: program number → names of its operations; others (loops, whose time is that of what they contain;
        parts of the runtime) are left out.
      collectives: of these, those that exchange data between devices.

    Raises:
      ProfileError: the file is none, or larger than 4 GiB.
    """
    from jax.profiler import ProfileData

    path = Path(path)
    if not path.is_file():
        raise ProfileError(
            f"path: {str(path)!r} is not a file; expected a *.xplane.pb, as jax.profiler.trace() writes"
        )
    size = path.stat().st_size
    if size > _MOST_BYTES:
        raise ProfileError(
            f"{path} has {size:,} bytes, more than {_MOST_BYTES:,}: profile fewer steps, or with host_tracer_level=1"
        )
    try:
        data = ProfileData.from_file(str(path))
    except Exception as error:
        raise ProfileError(f"{path} is not a trace of jax.profiler: {error}") from error
    trace = Trace()
    reader = _Reader(trace, operations, frozenset(collectives))
    with warnings.catch_warnings():
        # On Python 3.13 the iterators of jax.profiler warn that they do not say their module.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            lines = {line.name: line for line in plane.lines}
            if plane.name.startswith("/device:TPU:") and "XLA Ops" in lines:
                reader.tpu(plane.name, lines)
            elif plane.name.startswith("/device:") or plane.name == "/host:CPU":
                for line in plane.lines:
                    reader.line(plane.name, line.events)
    reader.end()
    return trace


class _Reader:
    def __init__(
        self, trace: Trace, operations: Mapping[int, Collection[str]], collectives: frozenset[str]
    ) -> None:
        self.trace = trace
        self.operations = operations
        self.collectives = collectives
        self.names = {name for names in operations.values() for name in names}
        self.seen: dict[int, set[tuple[Any, Any]]] = defaultdict(set)

    def line(self, plane: str, events: Iterable[Any]) -> None:
        """A thread of a CPU, or a stream of a GPU: events that say where they belong."""
        names = self.names
        for event in events:
            name = event.name
            if name in names:
                stats = dict(event.stats)
            elif plane != "/host:CPU":
                # A GPU's events have the kernel's name.
                stats = dict(event.stats)
                name = stats.get("hlo_op", "")
                if name not in names:
                    continue
            else:
                continue
            number = stats.get("program_id")
            if number is None or "hlo_op" not in stats:
                continue
            device = plane if plane != "/host:CPU" else f"cpu:{stats.get('device_ordinal', 0)}"
            self.add(int(number), name, device, event.start_ns, event.duration_ns)
            self.trace.names.setdefault(int(number), str(stats.get("hlo_module", "")))
            self.seen[int(number)].add((device, stats.get("run_id", stats.get("correlation_id"))))

    def tpu(self, plane: str, lines: Mapping[str, Any]) -> None:
        """A TPU's plane: operations lie within modules, which are named ``jit_step(number)``."""
        starts: list[float] = []
        modules: list[tuple[float, int]] = []
        for event in (
            sorted(lines["XLA Modules"].events, key=lambda one: one.start_ns)
            if "XLA Modules" in lines
            else ()
        ):
            found = _MODULE.match(event.name)
            if found:
                number = int(found[2])
                starts.append(event.start_ns)
                modules.append((event.start_ns + event.duration_ns, number))
                self.trace.names.setdefault(number, found[1])
                self.seen[number].add((plane, event.start_ns))
        for title in ("XLA Ops", "Async XLA Ops"):
            for event in lines[title].events if title in lines else ():
                at = bisect.bisect_right(starts, event.start_ns) - 1
                if at < 0 or event.start_ns > modules[at][0]:
                    continue
                found = _TPU_NAME.match(event.name)
                name = found[1] if found else event.name
                number = modules[at][1]
                if name in self.operations.get(number, ()):
                    self.add(number, name, plane, event.start_ns, event.duration_ns)

    def add(self, number: int, name: str, device: str, start: float, length: float) -> None:
        trace = self.trace
        entry = trace.counts.setdefault((number, name), [0, 0.0])
        entry[0] += 1
        entry[1] += length
        trace.events += 1
        (trace.exchanges if name in self.collectives else trace.spans)[device].append((start, start + length))

    def end(self) -> None:
        self.trace.runs = {number: len(runs) for number, runs in self.seen.items()}


def _union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)
