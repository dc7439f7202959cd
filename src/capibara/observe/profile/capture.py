"""Take a profile: run a region under JAX's tracer, between two points at which no device is at work."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from capibara.compilation import CompilationCounts, count_compilations
from capibara.compilation.counting import COMPILED
from capibara.errors import CapibaraError
from capibara.files import read_bounded, replace_file
from capibara.hardware import Chip, detect_chip
from capibara.hardware.telemetry import device_memory, host_memory, live_array_bytes
from capibara.jax_versions import stop_profile
from capibara.measure import copy_bandwidth, machine_description, matmul_rate
from capibara.observe.errors import ProfileError
from capibara.observe.profile.arguments import (
    FROM_CALL,
    FROM_PROGRAM,
    MOST_ARGUMENTS,
    program_arguments,
)
from capibara.observe.profile.modules import module_digest, module_name, traced_modules
from capibara.observe.profile.programs import Held, HeldPrograms, KnownProgram, known_program
from capibara.observe.profile.result import Operation, Profile, ProgramRuns
from capibara.observe.profile.timeline import Timeline, host_track
from capibara.observe.profile.trace import Trace, covered, find_trace, mark_region, read_trace

__all__ = ["GPU_EVENT_SECONDS", "Capture", "Captured", "capture", "prepare_folder"]

# A run of a program must have at least this share of the operations that its text lists, or the tracer dropped some.
_COMPLETE = 0.98
# Seconds for which a thread must be awake without a break to be taken for one that never sleeps.
_RESTLESS = 10.0
# And for which threads are waited for at all.
_LONGEST_WAIT = 15.0
# What CUPTI takes: of seven programs the region was longer by 0.8 to 1.4 times what these say, or less.
GPU_EVENT_SECONDS, _GPU_RUN_SECONDS = 3e-6, 12e-6
_MOST_LINES, _LONGEST_LINE = 10_000, 300
_NO_TRACE = "no trace was taken: capture_flops, capture_communication or capture_kernel_details asks for one"


class Capture:
    """What to capture. A trace is taken if any of the last three is True.

    Attributes:
      memory: the most memory in use.
      flops: operations, FLOPs and bytes of the programs that ran.
      communication: time of collectives.
      kernels: each operation.
    """

    def __init__(self, memory: bool, flops: bool, communication: bool, kernels: bool) -> None:
        self.memory = memory
        self.flops = flops
        self.communication = communication
        self.kernels = kernels

    @property
    def traces(self) -> bool:
        return self.flops or self.communication or self.kernels


class Captured:
    """Filled with the profile when the region of :func:`capture` ends."""

    profile: Profile | None = None


@contextlib.contextmanager
def capture(name: str, what: Capture, folder: Path | None = None) -> Iterator[Captured]:
    """Profile the body of a ``with`` block.

    Args:
      name: of the region.
      what: to capture.
      folder: where to keep the trace, the programs and ``profile.json``; nothing is kept if None.

    Raises:
      ProfileError: another trace is being taken; or the tracer dropped operations.
    """
    captured = Captured()
    process = os.getpid()
    if folder is not None:
        prepare_folder(folder)
    with contextlib.ExitStack() as stack:
        place = folder
        if what.traces and place is None:
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="capibara-profile-")))
        # A failure of earlier work is that work's, and was or will be said there.
        restless: set[int] = set()
        with contextlib.suppress(RuntimeError):
            _settle(restless)
        memory = _MemoryWatch() if what.memory else None
        held = stack.enter_context(HeldPrograms()) if what.traces else None
        if what.traces:
            _start(Path(str(place)))
        failed = True
        began = time.perf_counter()
        try:
            with count_compilations() as counts, _Tracing() as tracing:
                yield captured
            wall = _settle(restless) - began
            peak = None if memory is None else memory.end()
            loaded = {} if held is None else held.by_number()
            cost = _event_cost() if what.traces else 0.0
            failed = False
        finally:
            # In a process that was forked meanwhile the tracer and XLA's threads are not there: it is the parent's.
            if what.traces and os.getpid() == process:
                _stop(quiet=failed)
        if os.getpid() != process:
            stack.pop_all()
            return
        profile, texts = _result(name, what, began, wall, counts, peak, place, loaded, cost)
        captured.profile = replace(
            profile,
            tracing_seconds=tracing.seconds(),
            timeline=_with_host(profile.timeline, tracing.spans(began), wall),
        )
        if folder is not None:
            _keep(folder, captured.profile, texts if what.traces else {})


def prepare_folder(folder: Path) -> None:
    """Make the folder, and see before the region runs that a profile can be kept there.

    Nothing in it is deleted: traces have folders named after their time, and only a profile of ours is replaced.

    Raises:
      ProfileError: it cannot be written to, or has another ``profile.json``.
    """
    kept = folder / "profile.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if kept.exists():
            Profile.from_json(read_bounded(kept, 512 * 2**20).decode())
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"folder: got {str(folder)!r}, expected one that can be written to, without a profile.json of something "
            f"else ({error}): choose another one"
        ) from error


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


def _stop(*, quiet: bool) -> None:
    """End the trace; ``quiet`` after a failure of the region, which is what the user is told."""
    try:
        stop_profile()
    except RuntimeError as error:
        if not quiet:
            raise ProfileError(
                f"the trace could not be written ({error}): is there room on the disk? End no trace of jax.profiler "
                "within the region"
            ) from error


def _settle(restless: set[int]) -> float:
    """Wait until no device is at work; the host's time (``perf_counter``) at which that began.

    ``restless`` are threads that are not waited for; more are added.

    Arrays that are held can be waited for. For results that were dropped JAX has no such function: TPUs and GPUs run
    programs in their order, so that one more ends after them; XLA on CPUs does not, but its threads sleep without work.
    """
    import jax

    jax.effects_barrier()
    for array in jax.live_arrays():
        if not array.is_deleted():
            with contextlib.suppress(RuntimeError):  # donated between the two lines by another thread
                array.block_until_ready()
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return _sleeping(restless)

    def last() -> float:
        jax.block_until_ready([jax.device_put(0, device) + 1 for device in devices])
        return time.perf_counter()

    end = last()
    return end - (last() - end)  # the second time only that is done: about a millisecond on a GPU


def _sleeping(restless: set[int], quiet: int = 10) -> float:
    """Wait until threads that are not Python's are seen asleep ``quiet`` times in a row; when they were first.

    XLA's have no names of their own, and it makes more of them as it needs them. Those that never sleep for
    ``_RESTLESS`` seconds are other libraries', which spin: they become part of ``restless``, and are not waited for. If
    one is XLA's after all, its last operations are missing in the trace, and that is refused. Where another thread
    gives XLA work all the time there is no end to wait for: after ``_LONGEST_WAIT`` seconds, that is now.
    """
    own = {thread.native_id for thread in threading.enumerate()}
    began = since = time.perf_counter()
    always: set[int] | None = None
    seen = 0
    while seen < quiet:
        now = time.perf_counter()
        if now - began > _LONGEST_WAIT:
            return now
        tasks = (int(path.name) for path in Path("/proc/self/task").glob("*"))
        threads = {number for number in tasks if number not in own and number not in restless}
        if not threads:
            return since
        awake = {number for number in threads if _awake(Path(f"/proc/self/task/{number}/stat"))}
        always = awake if always is None else always & awake
        if awake:
            since, seen = time.perf_counter(), 0
        else:
            seen += 1
        if always and now - began > _RESTLESS:
            restless |= always
            # It was they who were awake all the time: nothing is known of the others yet but what comes.
            since, seen, always = began, 0, set()
        time.sleep(0.0005)
    return since


def _awake(stat: Path) -> bool:
    """Whether a thread runs or waits for a disk; False for one that has ended."""
    try:
        return stat.read_text().rpartition(")")[2][1:2] in ("R", "D")
    except OSError:
        return False


def _event_cost() -> float:
    """Seconds that the tracer takes for one operation, measured while it is on."""
    import jax

    count = 200
    start = time.perf_counter()
    for _ in range(count):
        with jax.profiler.TraceAnnotation("capibara"):
            pass
    return (time.perf_counter() - start) / count


class _Tracing:
    """Time of tracing and lowering functions, without that of compiling. They lie within one another."""

    _EVENTS = (
        "/jax/core/compile/jaxpr_trace_duration",
        "/jax/core/compile/jaxpr_to_mlir_module_duration",
        COMPILED,
    )

    def __init__(self) -> None:
        self._spans: list[tuple[str, int, int]] = []

    def __enter__(self) -> _Tracing:
        import jax.monitoring

        self._began = time.perf_counter_ns()
        jax.monitoring.register_event_duration_secs_listener(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        import jax.monitoring

        with contextlib.suppress(Exception):  # a program may have removed all listeners
            jax.monitoring.unregister_event_duration_listener(self._event)

    def _event(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in self._EVENTS:
            now = time.perf_counter_ns()
            start = max(self._began, now - int(duration_secs * 1e9))  # it may have begun before the region
            self._spans.append((event, start, now - start))

    def spans(self, began: float) -> list[tuple[str, int, int]]:
        """Kind, start after ``began`` (``perf_counter``) and length, in nanoseconds."""
        start = round(began * 1e9)
        return [
            ("compiling" if event == COMPILED else "tracing", at - start, length)
            for event, at, length in self._spans
        ]

    def seconds(self) -> float:
        compiled = [span for span in self._spans if span[0] == COMPILED]
        return (_covered(self._spans) - _covered(compiled)) / 1e9


def _with_host(timeline: Timeline | None, spans: list[tuple[str, int, int]], wall: float) -> Timeline | None:
    if timeline is None:
        return None
    return replace(timeline, tracks=(host_track(spans, round(wall * 1e9)), *timeline.tracks))


def _covered(spans: list[tuple[str, int, int]]) -> int:
    return covered(
        np.array([start for _, start, _ in spans], np.int64), np.array([one for *_, one in spans], np.int64)
    )


class _MemoryWatch:
    """The most memory in use between its making and :meth:`end`, of the fullest device."""

    def __init__(self) -> None:
        self.before = device_memory()
        self.reports = all(one.peak is not None for one in self.before)
        self.reason = ""
        if not self.reports:
            # A CPU's arrays are the process's memory: the kernel keeps a high-water mark, which can be set back. What
            # was freed goes back to the system first, or arrays that take its place would not show.
            _give_back()
            self.live = live_array_bytes()
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError as error:
                self.reason = f"the kernel does not reset this process's high-water mark: {error}"
            self.resident = host_memory().in_use

    def end(self) -> tuple[int | None, str, int]:
        """Bytes, or None and the reason; and, on a CPU, bytes of arrays that were there all the time."""
        if not self.reports:
            peak, live = host_memory().peak, live_array_bytes()
            if self.reason or peak is None or self.resident is None:
                return None, self.reason or "the operating system does not report this process's memory", 0
            return max(self.live + peak - self.resident, live, self.live), "", min(self.live, live)
        # Allocators keep the highest mark since the process began: it is the region's if it rose in it.
        grown = [
            after.peak
            for before, after in zip(self.before, device_memory(), strict=True)
            if after.peak is not None and before.peak is not None and after.peak > before.peak
        ]
        if grown:
            return max(grown), "", 0
        reason = (
            "the device's memory peaked before the region, and its allocator keeps only the highest mark: "
            "profile it in a fresh process"
        )
        return None, reason, 0


def _give_back() -> None:
    """Freed memory goes back to the system, where the C library is glibc."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _result(
    name: str,
    what: Capture,
    began: float,
    wall: float,
    counts: CompilationCounts,
    memory: tuple[int | None, str, int] | None,
    folder: Path | None,
    loaded: Mapping[int, list[Held]],
    cost: float,
) -> tuple[Profile, dict[int, str]]:
    """The profile, and the texts of the programs that ran, by number."""
    import jax

    reasons: dict[str, str] = {}
    peak, held = None, 0
    if memory is None:
        reasons["peak_memory_bytes"] = "capture_memory=False"
    else:
        peak, why, held = memory
        if why:
            reasons["peak_memory_bytes"] = why
    trace, texts = Trace(), {}
    programs: tuple[ProgramRuns, ...] = ()
    operations: tuple[Operation, ...] = ()
    if what.traces:
        path = find_trace(str(folder))
        known = _KnownPrograms(loaded, path, reasons)
        trace, programs, operations = _counted(path, known, began, wall, reasons)
        texts = known.texts
    if peak is not None and held:
        # Where the system hands out the same pages again, at least what a program needs beside the arrays.
        peak = max(peak, held + max((one.temporary_bytes or 0 for one in programs), default=0))
    ran = bool(trace.events)
    unclear = next((f"{name}: {why}" for name, why in reasons.items() if name.startswith("program ")), "")
    for figure, asked, setting in (
        ("flops", what.flops, "capture_flops"),
        ("communication_seconds", what.communication, "capture_communication"),
    ):
        if not asked:
            reasons[figure] = f"{setting}=False"
        elif not ran:
            reasons[figure] = (
                unclear or "the trace holds no operation of a compiled program: none ran in the region"
            )
        elif unclear and figure == "flops":
            reasons[figure] = unclear
    if not what.traces:
        reasons.update(busy_seconds=_NO_TRACE, idle_share=_NO_TRACE)
    elif not ran:
        reasons.update(busy_seconds=reasons.get("flops", ""), idle_share=reasons.get("flops", ""))
    device = jax.local_devices()[0]
    chip = detect_chip(device)
    largest = max(operations, key=lambda one: one.flops, default=None)
    dtype = largest.dtype if largest and largest.flops else ""
    counted = what.flops and ran
    rates = _rates(device.platform, chip, dtype or "f32", reasons) if counted else (None, None)
    profile = Profile(
        name=name,
        platform=device.platform,
        chip=chip.name,
        devices=max(1, trace.devices),
        wall_seconds=wall,
        flops=sum(one.flops for one in programs) if counted and not unclear else None,
        bytes=sum(one.bytes for one in programs) if counted and not unclear else None,
        busy_seconds=trace.busy_ns / 1e9 if ran else None,
        communication_seconds=trace.exposed_ns / 1e9 if ran and what.communication else None,
        peak_memory_bytes=peak,
        peak_flops=rates[0],
        peak_bandwidth=rates[1],
        compiled=counts.programs,
        compile_seconds=counts.seconds,
        events=trace.events,
        perturbation=_perturbation(device.platform, trace, cost, wall, reasons) if what.traces else None,
        programs=programs,
        operations=operations if what.kernels else (),
        reasons=reasons,
        versions=machine_description(devices=False)["versions"],
        within_seconds=None if trace.within_ns is None else trace.within_ns / 1e9,
        timeline=trace.timeline,
        lines=_texts_of_lines({one.source for one in operations} if what.kernels else set()),
    )
    return profile, texts


def _texts_of_lines(sources: set[str]) -> dict[str, str]:
    """The text of source lines, as the interpreter's tracebacks find it."""
    found = {}
    for source in sorted(sources)[:_MOST_LINES]:
        file, _, number = source.rpartition(":")
        if number.isdecimal() and (text := linecache.getline(file, int(number)).strip()):
            found[source] = "".join(letter for letter in text[:_LONGEST_LINE] if letter.isprintable())
    return found


def _perturbation(platform: str, trace: Trace, cost: float, wall: float, reasons: dict[str, str]) -> float:
    """Share of the region's time that recording took."""
    spent = cost * trace.events
    if platform == "gpu":
        spent = GPU_EVENT_SECONDS * trace.events + _GPU_RUN_SECONDS * sum(trace.runs.values())
        reasons["perturbation"] = (
            f"estimated: recording takes the host about {1e6 * GPU_EVENT_SECONDS:.0f} µs for a kernel and "
            f"{1e6 * _GPU_RUN_SECONDS:.0f} µs for a run (measured on an H200); less where devices had work"
        )
    return min(1.0, spent / max(1, trace.devices) / wall)


class _KnownPrograms(Mapping[int, Mapping[str, str]]):
    """The operations of each number's programs, and their kinds; a text is read when it is asked for.

    A process may hold hundreds of programs of which few ran.
    """

    def __init__(self, loaded: Mapping[int, list[Held]], trace: Path, reasons: dict[str, str]) -> None:
        import jax

        self._loaded, self._reasons = loaded, reasons
        self._read: dict[int, list[KnownProgram]] = {}
        self._digests: dict[int, bytes] = {}
        self._meant: dict[int, list[Held]] = {}
        self.texts: dict[int, str] = {}
        self.trips = _Trips(self)
        # Loaded programs of others have numbers of their own: see capibara.observe.profile.modules.
        on_cpu = jax.local_devices()[0].platform == "cpu"
        self._numbers_are_traced = on_cpu and not _reads_programs()
        self._traced = {} if on_cpu else traced_modules(trace)

    def candidates(self, number: int) -> list[KnownProgram]:
        """The programs that may be meant by a number of the trace; all, if nothing is known of it."""
        found = self._programs(number)
        if found and self._is_sure(number):
            return found
        others = [one for other in self._loaded for one in self._programs(other)]
        return [*found, *(one for one in others if all(one is not this for this in found))]

    def _is_sure(self, number: int) -> bool:
        return self._numbers_are_traced or bool(self._same_as_traced(number))

    def _same_as_traced(self, number: int) -> list[Held]:
        """The loaded programs that are what the trace has under a number."""
        if number not in self._meant and number in self._traced:
            traced = self._traced[number]
            name, digest = module_name(traced), module_digest(traced)
            held = [one for others in self._loaded.values() for one in others if one.module.name == name]
            self._meant[number] = [one for one in held if self._digest(one.module) == digest]
        return self._meant.get(number, [])

    def _digest(self, module: Any) -> bytes:
        if id(module) not in self._digests:
            self._digests[id(module)] = module_digest(module.as_serialized_hlo_module_proto())
        return self._digests[id(module)]

    def _programs(self, number: int) -> list[KnownProgram]:
        if number not in self._read:
            self._read[number] = []
            for module, temporary, call in self._same_as_traced(number) or self._loaded.get(number, ()):
                try:
                    self._read[number].append(known_program(module.to_string(), temporary, call))
                except CapibaraError as error:
                    self._reasons[f"program {number}"] = f"its text could not be read: {error}"
        return self._read[number]

    def ran(self, number: int, seen: Collection[str]) -> KnownProgram | None:
        """The program of a number: that with the operations that were seen, and fewest others."""
        own = self._programs(number)
        if not seen:
            return own[0] if own else None
        found = [one for one in self.candidates(number) if set(seen) <= set(one.operations)]
        if not found:
            return None
        fewest = min(len(one.operations) for one in found)
        found = [one for one in found if len(one.operations) == fewest]
        chosen = next((one for one in found if one in own), found[0])
        if not self._is_sure(number) and len({_work(one) for one in found}) > 1:
            cached = "it may have come from JAX's persistent cache, and " if _reads_programs() else ""
            remedy = ". Profile without the cache (JAX_ENABLE_COMPILATION_CACHE=false)" if cached else ""
            self._reasons[f"program {number}"] = (
                f"{cached}{len(found)} programs like {chosen.name} are loaded: which of them ran is not known{remedy}"
            )
        self.texts[number] = chosen.text
        return chosen

    def __getitem__(self, number: int) -> Mapping[str, str]:
        return {name: about.kind for one in self.candidates(number) for name, about in one.operations.items()}

    def __iter__(self) -> Iterator[int]:
        return iter(self._loaded)

    def __len__(self) -> int:
        return len(self._loaded)


class _Trips(Mapping[int, Mapping[str, int | None]]):
    """How often operations run in one run of each program."""

    def __init__(self, known: _KnownPrograms) -> None:
        self._known = known

    def __getitem__(self, number: int) -> Mapping[str, int | None]:
        return {
            name: about.trips
            for one in self._known.candidates(number)
            for name, about in one.operations.items()
        }

    def __iter__(self) -> Iterator[int]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


def _reads_programs() -> bool:
    """Whether JAX may have read programs from its persistent cache."""
    import jax

    return bool(jax.config.values.get("jax_compilation_cache_dir")) and bool(
        jax.config.values.get("jax_enable_compilation_cache")
    )


def _work(program: KnownProgram) -> tuple[tuple[str, int | None, int | None, int], ...]:
    return tuple((name, one.trips, one.flops, one.bytes) for name, one in sorted(program.operations.items()))


def _counted(
    path: Path, known: _KnownPrograms, began: float, wall: float, reasons: dict[str, str]
) -> tuple[Trace, tuple[ProgramRuns, ...], tuple[Operation, ...]]:
    trace = read_trace(path, known, wall, known.trips)
    seen: dict[int, set[str]] = {number: set() for number in trace.runs}
    for number, name in trace.counts:
        seen[number].add(name)
    for number in trace.unclear:
        reasons.setdefault(
            f"program {number}",
            "the trace does not say when a run of it began (an older JAX?): how often it ran is not known",
        )
    programs: list[ProgramRuns] = []
    operations: list[Operation] = []
    silent: dict[str, None] = {}
    room = MOST_ARGUMENTS
    for number, runs in trace.runs.items():
        program = known.ran(number, seen[number])
        if program is None:
            reasons.setdefault(
                f"program {number}",
                "it was not among the loaded programs: its operations are not known",
            )
            continue
        if f"program {number}" not in reasons:
            _complete(program, number, runs, trace)
        mine = []
        for name, about in program.operations.items():
            count, spent = trace.counts.get((number, name), (0, 0.0))
            if about.trips is not None and not count and number in trace.in_graphs:
                count = about.trips * runs  # it ran under another's name: see Trace.unnamed
            elif about.trips is not None:
                count = min(count, about.trips * runs)  # a thread of a pool may have a span of its own for it
            if not count and not about.trips:
                continue  # a branch that was not taken
            if count and about.flops is None and "callback" not in about.opcode:
                silent[about.opcode] = None
            mine.append(
                Operation(
                    program=program.name,
                    name=name,
                    kind=about.kind,
                    opcode=about.opcode,
                    path=about.op_name,
                    source=program.sources.get(name, ""),
                    dtype=about.dtype,
                    count=count,
                    seconds=spent / 1e9,
                    flops=(about.flops or 0) * count,
                    bytes=about.bytes * count,
                    reread=about.reread * count,
                    tiled_flops=about.tiled_flops * count,
                    products=about.products * count,
                )
            )
        mine += [
            Operation(program.name, kernel, "kernel", kernel, "", "", "", count, spent / 1e9, 0, 0)
            for (other, kernel), (count, spent) in trace.unnamed.items()
            if other == number
        ]
        operations += mine
        call = program.call
        arguments, source = (
            (call.arguments, FROM_CALL) if call and call.arguments is not None else (None, FROM_PROGRAM)
        )
        if arguments is None:
            arguments = program_arguments(program.text)
        if len(arguments) > room:
            arguments, source = (), ""
        room -= len(arguments)
        programs.append(
            ProgramRuns(
                name=program.name,
                runs=runs,
                seconds=sum(one.seconds for one in mine),
                flops=sum(one.flops for one in mine),
                bytes=sum(one.bytes for one in mine),
                temporary_bytes=program.temporary_bytes,
                function=call.function if call else "",
                compiled_at=max(0.0, call.began - began) if call else None,
                compile_seconds=call.seconds if call else None,
                arguments_from=source,
                arguments=arguments,
            )
        )
    if silent:
        reasons["flops"] = f"at least: {', '.join(list(silent)[:5])} do not say what they compute"
    by_time = sorted(operations, key=lambda one: -one.seconds)
    return trace, tuple(sorted(programs, key=lambda one: -one.seconds)), tuple(by_time)


def _complete(program: KnownProgram, number: int, runs: int, trace: Trace) -> None:
    """Refuse a trace in which operations are missing: its sums would be wrong without a sign of it."""
    for name, about in program.operations.items():
        if about.trips is None:
            continue
        seen = trace.counts.get((number, name), (0, 0.0))[0]
        # In CUDA graphs kernels stand for others with the same code.
        expected = 0 if number in trace.in_graphs else about.trips * runs
        if seen < _COMPLETE * expected:
            raise ProfileError(
                f"the trace is incomplete: {name} of {program.name} ran {expected:,} times, and {seen:,} were "
                "recorded. Profile fewer steps, and wait for the results within the region "
                "(jax.block_until_ready(result))"
            )


def _rates(
    platform: str, chip: Chip, dtype: str, reasons: dict[str, str]
) -> tuple[float | None, float | None]:
    """FLOP/s and bytes per second of one device: of the catalogue, or, for a CPU, measured here."""
    if platform == "cpu":
        return _measured(dtype)
    try:
        # JAX lets GPUs round the operands of products in float32 to TF32 unless a precision is asked for.
        rounded = platform == "gpu" and dtype == "f32" and "tf32" in chip.peak_flops
        peak = chip.peak("tf32" if rounded else dtype)
    except CapibaraError as error:
        peak = None
        reasons["compute_efficiency"] = str(error)
    if chip.hbm_bandwidth is None:
        reasons["memory_efficiency"] = f"the catalogue has no memory bandwidth of {chip.name}"
    return peak, chip.hbm_bandwidth


@lru_cache(maxsize=8)
def _measured(dtype: str) -> tuple[float | None, float | None]:
    import jax

    # Emulated devices share the cores: the process's rate is one device's where there is one.
    share = max(1, jax.local_device_count())
    # A CPU multiplies what it has no instructions for as float32. XLA's names of types:
    kind = {"f64": "float64", "bf16": "bfloat16", "f16": "float16"}.get(dtype, "float32")
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        kind = "float32"
    return matmul_rate(kind) / share, copy_bandwidth() / share


def _keep(folder: Path, profile: Profile, texts: Mapping[int, str]) -> None:
    replace_file(folder / "profile.json", profile.to_json().encode())
    if not texts:
        return
    # Beside the trace, in the folder that is named after its time.
    kept = find_trace(folder).parent / "programs"
    kept.mkdir(exist_ok=True)
    for number, text in texts.items():
        name = text.split(",", 1)[0].removeprefix("HloModule ").strip()
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:100]
        replace_file(kept / f"{safe}.{number}.hlo.txt", text)
