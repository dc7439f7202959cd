"""``ledger.jsonl``: where a run's wall time goes, over all the processes that it took.

Every moment between the start of a process and its end belongs to one bucket, the innermost that is entered, so the
buckets add up to the time that passed. Lines are written with those of ``metrics.jsonl``; what a killed process had not
written yet is the beginning of the gap before the next one::

    {"kind": "begin", "began": 1764218000.1, "time": 1764218003.9, "step": 200, "devices": 4, "chip": "tpu-v4"}
    {"kind": "spent", "time": 1764218003.9, "step": 200, "seconds": {"startup": 3.8}}
    {"kind": "spent", "time": 1764218013.9, "step": 220, "seconds": {"step": 9.2, "input": 0.1, …}}
    {"kind": "spent", "time": 1764218014.0, "step": 220, "seconds": {"step": 0.1}, "unfinished": true}
    {"kind": "back", "time": 1764218014.0, "step": 200}
    {"kind": "moved", "time": 1764218014.2, "step": 200, "devices": 2}

``unfinished``: steps that nothing came of, since a failure ended them.

``capibara report RUN`` adds them up (:mod:`capibara.observe.goodput`).
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["BUCKETS", "LEDGER", "Ledger"]

LEDGER = "ledger.jsonl"
# In which a process spends its time. "step": the devices train, or the host waits for them; "recovery": it goes back to
# a checkpoint, or moves to other devices.
BUCKETS: tuple[str, ...] = ("startup", "compile", "input", "step", "validation", "checkpoint", "recovery")


class Ledger:
    """Keeps the time of one process; a context manager.

    Args:
      path: the file, to which lines are appended; None: nothing is written (of all processes but the first).
      began: when the process began, in seconds since 1970; by default as the operating system says.
      clock: seconds, for what is spent. now: seconds since 1970.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        began: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clock, self._now = clock, now
        self._began = (_process_began(now) if began is None else began) if path is not None else now()
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._stack = ["startup"]
        self._mark = clock()
        self._seconds["startup"] = max(0.0, now() - self._began)
        self._stream: IO[str] | None = None
        self._path = path
        self._step = 0

    def begin(self, step: int, *, devices: int, chip: str) -> None:
        """Say that a process goes on from a step, on so many devices."""
        if self._path is not None:
            _cut_unfinished(self._path)
            self._stream = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        self._switch()
        self._stack[0] = "recovery"  # what stands in no bucket of its own from here on
        self._step = step
        self._write({"kind": "begin", "began": self._began, "step": step, "devices": devices, "chip": chip})
        # A process that is killed while it compiles has started, too.
        self.spent(step)

    @contextlib.contextmanager
    def during(self, bucket: str) -> Iterator[None]:
        """Time of the body belongs to a bucket, without what is entered in it."""
        self._switch()
        self._stack.append(bucket)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def spent(self, step: int, *, unfinished: bool = False) -> None:
        """Write what was spent since the last line, up to a step; ``unfinished``: on steps that nothing came of."""
        self._switch()
        self._step = step
        seconds = {name: value for name, value in self._seconds.items() if value}
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        entry = {"kind": "spent", "step": step, "seconds": seconds}
        self._write({**entry, "unfinished": True} if unfinished else entry)

    def back(self, step: int) -> None:
        """Say that the steps after this one are taken again, and those since the last line."""
        self.spent(self._step, unfinished=True)
        self._step = step
        self._write({"kind": "back", "step": step})

    def moved(self, devices: int) -> None:
        """Say that the run goes on with so many devices."""
        self.spent(self._step)
        self._write({"kind": "moved", "step": self._step, "devices": devices})

    def _switch(self) -> None:
        now = self._clock()
        self._seconds[self._stack[-1]] += now - self._mark
        self._mark = now

    def _write(self, entry: dict[str, Any]) -> None:
        if self._stream is None:
            return
        try:
            self._stream.write(json.dumps({**entry, "time": self._now()}) + "\n")
            self._stream.flush()
        except OSError:
            # A full disk ends a run where its checkpoints and metrics are written, with what to do; not here.
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._stream is not None:
            self.spent(self._step, unfinished=kind is not None)
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._stream = None


def _process_began(now: Callable[[], float]) -> float:
    """When this process began, from ``/proc``; now, where the system does not say."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        age = up - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now()
    # Longer before than any import takes: a notebook, whose hours before are not the run's.
    return now() - age if 0 <= age < 300 else now()


def _cut_unfinished(path: Path) -> None:
    """Remove a line that a full disk or a power cut left without its end: the next one would be part of it."""
    try:
        with open(path, "r+b") as stream:
            content = stream.read()
            end = content.rfind(b"\n") + 1
            if end < len(content):
                stream.truncate(end)
    except FileNotFoundError:
        pass
