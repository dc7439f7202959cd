"""The traces of one region, one after the other: JAX takes one at a time.

A program under ``capibara profile`` may take traces of its own. Ours ends before each of them, the program's covers
the time in which it is taken, and ours begins again behind it. What lies between (writing a trace) is not recorded, and
its time not part of the region.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from capibara.jax_versions import stop_profile
from capibara.observe.errors import ProfileError
from capibara.observe.profile.settling import Settled, settle
from capibara.observe.profile.trace import find_trace, mark_region

__all__ = ["OwnTrace", "Part", "Parts", "PeakMemory", "why_unreadable"]

_RUNS = Path("plugins") / "profile"  # where jax.profiler puts the folder of each trace


@dataclass(frozen=True)
class OwnTrace:
    """A trace that the program takes itself.

    Attributes:
      folder: where it asked for it.
      reason: why it cannot say what ran; empty if it can.
    """

    folder: str
    reason: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a region, between two moments at which no device was at work.

    Attributes:
      began: by ``perf_counter``.
      held, quiet: likewise; see :class:`Settled`.
      path: the trace; None if there is none.
      own: that the program took, if it did.
      reason: why it cannot be read.
    """

    began: float
    held: float
    quiet: float
    path: Path | None
    own: OwnTrace | None = None
    reason: str = ""


class PeakMemory(NamedTuple):
    """Bytes, or None and the reason; and, on a CPU, bytes of arrays that were there all the time."""

    peak: int | None
    reason: str
    held: int


class Parts:
    """Takes the traces of a region.

    Args:
      place: a folder for them. Those that the program takes are copied there: it may delete its own.
      restless: threads that are not waited for; see :func:`settle`.
      memory: begins to watch the most memory in use, and returns what ends that and says it; None if nobody asks.
        Between the parts traces are written, which takes memory that is not the program's.
    """

    def __init__(
        self, place: Path, restless: set[int], memory: Callable[[], Callable[[], PeakMemory]] | None = None
    ) -> None:
        self._place, self._restless, self._memory = place, restless, memory
        self._ends_memory: Callable[[], PeakMemory] | None = None
        self._peaks: list[PeakMemory] = []
        self._began = 0.0
        self._on = False
        self._own: OwnTrace | None = None
        self._lost = ""
        self._before: dict[Path, tuple[int, int]] = {}
        self._folder = place
        self.parts: list[Part] = []
        # Seconds that the tracer takes for one operation.
        self.event_cost = 0.0

    @property
    def of_the_program(self) -> bool:
        """Whether the trace that is being taken is the program's."""
        return self._own is not None

    def begin(self) -> None:
        """Begin a trace of ours.

        Raises:
          ProfileError: another one is being taken.
        """
        # jax.profiler names a trace after the second in which it ends: the next one must not take its place.
        self._folder = Path(tempfile.mkdtemp(prefix="trace-", dir=self._place)) if self.parts else self._place
        self._watch_memory()
        _start(self._folder)
        self._on, self._began = True, time.perf_counter()

    def begin_again(self) -> None:
        """Begin one behind the program's. Where that fails the rest of the region is left out."""
        try:
            self.begin()
        except ProfileError as error:
            self._on, self._began, self._lost = True, time.perf_counter(), str(error)

    def settle(self) -> Settled:
        """Wait until no device is at work, at the end of a part."""
        settled = settle(self._restless)
        self.note_memory()
        return settled

    def _watch_memory(self) -> None:
        self._ends_memory = self._memory() if self._memory is not None else None

    def note_memory(self) -> None:
        """At the end of a part: the most memory that was in use in it."""
        if self._ends_memory is not None:
            self._peaks.append(self._ends_memory())
            self._ends_memory = None

    def peak_memory(self) -> PeakMemory | None:
        """Over all parts; None if it was not watched."""
        if not self._peaks:
            return None
        known = [one for one in self._peaks if one.peak is not None]
        return max(known, key=lambda one: one.peak or 0) if known else self._peaks[0]

    def end(self, settled: Settled, *, quiet: bool = False) -> None:
        """End the trace that is being taken; ``quiet`` after a failure of the region, which is what the user is told.

        Raises:
          ProfileError: it could not be written.
        """
        if not self._on:
            return
        self._on = False
        if self._own is not None:
            # The program left it open: now it is written where that asked for it.
            error = ""
            try:
                stop_profile()
            except RuntimeError as failure:
                error = str(failure)
            self.own_ended(settled, error)
            if not quiet and not self.event_cost:
                self._measure_cost()
            return
        if self._lost:
            self.parts.append(Part(self._began, settled.held, settled.quiet, None, None, self._lost))
            self._lost = ""
            return
        try:
            if not quiet:
                self.event_cost = _event_cost()
            stop_profile()
        except RuntimeError as error:
            if quiet:
                return
            raise ProfileError(
                f"the trace could not be written ({error}): is there room on the disk? End no trace of jax.profiler "
                "within the region"
            ) from error
        if quiet:
            return
        path = find_trace(self._folder)
        if self._folder != self._place:
            path = self._take(path, move=True)
            shutil.rmtree(self._folder, ignore_errors=True)
        self.parts.append(Part(self._began, settled.held, settled.quiet, path))

    def own_begins(self, own: OwnTrace) -> None:
        """The program begins a trace; ours has ended."""
        self._watch_memory()
        self._before = _traces(own.folder)
        self._own, self._on, self._began = own, True, time.perf_counter()

    def own_failed(self) -> None:
        """It did not begin."""
        self._own, self._on = None, False

    def own_ended(self, settled: Settled, error: str = "") -> None:
        """The program's trace has ended, and was written, or was not for a reason."""
        own, self._own, self._on = self._own, None, False
        assert own is not None
        reason, path = own.reason or error, None
        if not reason:
            new = [file for file, version in _traces(own.folder).items() if self._before.get(file) != version]
            try:
                if new:
                    path = self._take(max(new, key=lambda file: self._key(file)), move=False)
                else:
                    reason = f"no trace was written to {own.folder!r}, or not to a folder of this machine"
            except OSError as failure:
                reason = f"its trace could not be copied: {failure}"
        self.parts.append(Part(self._began, settled.held, settled.quiet, path, own, reason))

    def _key(self, file: Path) -> tuple[bool, int]:
        """Processes of several machines may write to one folder: ours is named after this one."""
        return file.name.removesuffix(".xplane.pb") == os.uname().nodename, file.stat().st_mtime_ns

    def _take(self, file: Path, *, move: bool) -> Path:
        """Put a trace into a folder of its own beside the others."""
        runs = self._place / _RUNS
        runs.mkdir(parents=True, exist_ok=True)
        name, number = file.parent.name, 1
        while True:
            kept = runs / (name if number == 1 else f"{name}-{number}")
            try:
                kept.mkdir()
                break
            except FileExistsError:
                number += 1
        if move:
            for one in file.parent.iterdir():
                shutil.move(one, kept / one.name)
        else:
            # What Perfetto opens stands beside what XProf does.
            host = file.name.removesuffix(".xplane.pb")
            for one in (file, file.with_name(f"{host}.trace.json.gz")):
                if one.is_file():
                    shutil.copyfile(one, kept / one.name)
        return kept / file.name

    def _measure_cost(self) -> None:
        """In a trace that is thrown away: no marks of ours are put into one of the program's."""
        with (
            tempfile.TemporaryDirectory(dir=self._place, ignore_cleanup_errors=True) as folder,
            contextlib.suppress(ProfileError, RuntimeError),
        ):
            _start(Path(folder))
            self.event_cost = _event_cost()
            stop_profile()


def _traces(folder: str) -> dict[Path, tuple[int, int]]:
    """The traces that a folder has, each with what changes when it is written anew."""
    found = {}
    for file in Path(folder).glob(str(_RUNS / "*" / "*.xplane.pb")):
        with contextlib.suppress(OSError):
            about = file.stat()
            found[file] = about.st_ino, about.st_mtime_ns
    return found


def _start(folder: Path) -> None:
    import jax

    options = jax.profiler.ProfileOptions()
    # Python's tracer records every call of a function, which slows a program several times.
    options.python_tracer_level = 0
    # XLA on CPUs tells its operations at this level; beside a GPU each one would slow the host that starts the kernels.
    options.host_tracer_level = 1 if jax.local_devices()[0].platform == "gpu" else 2
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except RuntimeError as error:
        raise ProfileError(
            f"a trace is being taken already ({error}): end it first; profiles do not lie within one another"
        ) from error
    mark_region()


def _event_cost() -> float:
    """Seconds that the tracer takes for one operation, measured while it is on."""
    import jax

    count = 200
    start = time.perf_counter()
    for _ in range(count):
        with jax.profiler.TraceAnnotation("capibara"):
            pass
    return (time.perf_counter() - start) / count


def why_unreadable(folder: str, options: Any) -> str:
    """Why a trace with these ``ProfileOptions`` (None: JAX's own) does not say what ran; empty if it does."""
    import jax

    if not folder:
        return "it was kept in memory, and written nowhere"
    if "://" in folder:
        return f"it was written to {folder}, which is not a folder of this machine"
    level = getattr(options, "host_tracer_level", 2)
    if jax.local_devices()[0].platform == "cpu" and level < 2:
        return (
            f"it was taken with host_tracer_level={level}, at which XLA does not record its operations on a CPU "
            "(they need 2, JAX's default)"
        )
    return ""
