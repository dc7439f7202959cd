"""``ledger.jsonl``: where a run's wall time goes, over all the processes that it took.

Every moment between the start of a process and its end belongs to one bucket, the innermost that is entered, so the
buckets add up to the time that passed. Lines are written with those of ``metrics.jsonl``; what a killed process had not
written yet is the beginning of the gap before the next one::

    {"kind": "begin", "began": 1764218000.1, "time": 1764218003.9, "step": 200, "devices": 4, "chip": "tpu-v4"}
    {"kind": "spent", "time": 1764218003.9, "step": 200, "seconds": {"startup": 3.8}}
    {"kind": "spent", "time": 1764218013.9, "step": 220, "seconds": {"step": 9.2, "input": 0.1, …}}
    {"kind": "spent", "time": 1764218014.0, "step": 220, "seconds": {"step": 0.1}, "reached": 223, …}
    {"kind": "back", "time": 1764218014.0, "step": 200}
    {"kind": "moved", "time": 1764218014.2, "step": 200, "devices": 2}

``unfinished``: steps that nothing came of, since a failure ended them; ``reached``: the last of them. Times within a
process are those of a clock that is never set, and goes on while the machine is suspended.

``capibara report RUN`` adds them up (:mod:`capibara.observe.goodput`).
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["BUCKETS", "LEDGER", "Ledger"]

LEDGER = "ledger.jsonl"
# In which a process spends its time. "step": the devices train, or the host waits for them; "recovery": it goes back to
# a checkpoint, or moves to other devices.
BUCKETS: tuple[str, ...] = ("startup", "compile", "input", "step", "validation", "checkpoint", "recovery")


# What is looked at of a ledger's end for a line that was not finished: no line is longer.
_TAIL = 1 << 16
_kept_one = False


def _boot_clock() -> float:
    """Seconds of a clock that nobody sets, and that goes on while the machine is suspended."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)


class Ledger:
    """Keeps the time of one process; a context manager.

    A ledger that cannot be written ends no run: it warns once, keeps what is not written, and tries again with the next
    line.

    Args:
      path: the file, to which lines are appended; None: nothing is written (of all processes but the first).
      began: when the process began, in seconds since 1970; by default as the operating system says, or now if this
        process kept a ledger before.
      clock: seconds, for what is spent. now: seconds since 1970, looked at once.
      warn: is told why nothing is written.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        began: float | None = None,
        clock: Callable[[], float] = _boot_clock,
        now: Callable[[], float] = time.time,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self._clock, self._warn = clock, warn or warnings.warn
        self._mark, at = clock(), now()
        self._since_1970 = at - self._mark
        self._began = at if path is None else _process_began(at) if began is None else began
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        self._stack = ["startup"]
        self._seconds["startup"] = max(0.0, at - self._began)
        self._path = path
        self._file: int | None = None
        self._end = 0  # of what is written
        self._waiting: list[bytes] = []
        self._warned = False
        self._step = self._reached = 0

    def begin(self, step: int, *, devices: int, chip: str) -> None:
        """Say that a process goes on from a step, on so many devices."""
        self._switch()
        self._stack[0] = "recovery"  # what stands in no bucket of its own from here on
        self._step = self._reached = step
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

    def reach(self, step: int) -> None:
        """Say that a step is being taken, which is lost if a failure comes before the next line."""
        self._reached = step

    def spent(self, step: int, *, unfinished: bool = False) -> None:
        """Write what was spent since the last line, up to a step; ``unfinished``: on steps that nothing came of."""
        self._switch()
        seconds = {name: value for name, value in self._seconds.items() if value}
        self._seconds = dict.fromkeys(BUCKETS, 0.0)
        entry: dict[str, Any] = {"kind": "spent", "step": step, "seconds": seconds}
        if unfinished:
            entry |= {"reached": max(step, self._reached), "unfinished": True}
        self._step = self._reached = step
        self._write(entry)

    def back(self, step: int) -> None:
        """Say that the steps after this one are taken again, and those since the last line."""
        self.spent(self._step, unfinished=True)
        self._step = self._reached = step
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
        if self._path is None:
            return
        # Up to when the time is in a bucket of this line or of one before.
        line = json.dumps({**entry, "time": self._since_1970 + self._mark}) + "\n"
        self._waiting.append(line.encode())
        try:
            if self._file is None:
                self._file, self._end = _open(self._path)
            self._append(b"".join(self._waiting))
            self._waiting.clear()
        except OSError as error:
            # A full disk ends a run where its checkpoints and metrics are written, with what to do; not here.
            if not self._warned:
                self._warned = True
                self._warn(
                    f"{self._path} cannot be written ({error}): where the time of this run goes is kept in memory, and "
                    "written when that succeeds"
                )

    def _append(self, content: bytes) -> None:
        assert self._file is not None
        written = 0
        try:
            while written < len(content):
                written += os.pwrite(self._file, content[written:], self._end + written)
        except OSError:
            if written:  # half a line would be taken for a damaged one
                with contextlib.suppress(OSError):
                    os.ftruncate(self._file, self._end)
            raise
        self._end += written

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._file is not None or self._waiting:
            self.spent(self._step, unfinished=kind is not None)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
        self._path = self._file = None


def _process_began(now: float) -> float:
    """When this process began, from ``/proc``; now, where the system does not say, or the time before is no run's."""
    global _kept_one
    before, _kept_one = _kept_one, True
    # A notebook's hours before are not the run's, nor are the runs before this one.
    if before or hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return now
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        up = float(Path("/proc/uptime").read_text().split()[0])
        age = up - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return now
    return now - max(0.0, age)


def _open(path: Path) -> tuple[int, int]:
    """A descriptor of the file, and where its last whole line ends.

    What a full disk or a power cut left behind that is removed: the next line would be part of it.
    """
    # Without O_NONBLOCK a FIFO in its place would hold the run.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode):
            raise OSError(f"{path} is not a regular file")
        start = max(0, about.st_size - _TAIL)
        tail = os.pread(file, about.st_size - start, start)
        end = start + tail.rfind(b"\n") + 1
        if end == start > 0:  # no line of ours is that long: it stays as it is
            return file, about.st_size + os.pwrite(file, b"\n", about.st_size)
        if end < about.st_size:
            os.ftruncate(file, end)
        return file, end
    except BaseException:
        os.close(file)
        raise
