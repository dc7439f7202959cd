"""Take a profile: run a region under JAX's tracer, between two points at which no device is at work."""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
from capibara.measure import copy_bandwidth, machine_description, matmul_rate
from capibara.observe.errors import ProfileError
from capibara.observe.profile.joined import RegionClock
from capibara.observe.profile.operations import KnownPrograms, count_operations
from capibara.observe.profile.parts import OwnTrace, Part, Parts, PeakMemory
from capibara.observe.profile.programs import Held, HeldPrograms
from capibara.observe.profile.result import Operation, Profile, ProgramRuns
from capibara.observe.profile.settling import Settled, settle
from capibara.observe.profile.timeline import Timeline, host_track
from capibara.observe.profile.trace import Trace, covered

__all__ = ["GPU_EVENT_SECONDS", "Capture", "Captured", "capture", "prepare_folder"]

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
    """Filled with the profile when the region of :func:`capture` ends; until then, its traces (None without any)."""

    profile: Profile | None = None
    parts: Parts | None = None


@contextlib.contextmanager
def capture(
    name: str, what: Capture, folder: Path | None = None, *, within: OwnTrace | None = None
) -> Iterator[Captured]:
    """Profile the body of a ``with`` block.

    Args:
      name: of the region.
      what: to capture.
      folder: where to keep the trace, the programs and ``profile.json``; nothing is kept if None.
      within: a trace that the program itself takes now, which is read in place of one of ours.

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
            settle(restless)
        held = stack.enter_context(HeldPrograms()) if what.traces else None
        memory = None
        parts = None
        if not what.traces or place is None:
            memory = _MemoryWatch() if what.memory else None
        else:
            watch = (lambda: _MemoryWatch().end) if what.memory else None
            parts = captured.parts = Parts(place, restless, watch)
            if within is None:
                parts.begin()
            else:
                parts.own_begins(within)
        failed = True
        began = time.perf_counter()
        settled = Settled(began, began)
        try:
            with count_compilations() as counts, _Tracing() as tracing:
                yield captured
            settled = settle(restless)
            if parts is not None:
                parts.note_memory()
            peak = memory.end() if memory is not None else parts and parts.peak_memory()
            loaded = {} if held is None else held.by_number()
            failed = False
        finally:
            # In a process that was forked meanwhile the tracer and XLA's threads are not there: it is the parent's.
            if parts is not None and os.getpid() == process:
                parts.end(settled, quiet=failed)
        if os.getpid() != process:
            stack.pop_all()
            return
        pieces = parts.parts if parts is not None else [Part(began, settled.held, settled.quiet, None)]
        cost = 0.0 if parts is None else parts.event_cost
        captured.profile, texts = _result(name, what, pieces, counts, tracing, peak, loaded, cost)
        if folder is not None:
            _keep(folder, captured.profile, texts, pieces)


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

    def spans(self, clock: RegionClock) -> list[tuple[str, int, int]]:
        """Kind, start after the region's begin and length, in nanoseconds of the region's time."""
        found = []
        for event, at, length in self._spans:
            start, end = (round(clock.at(time / 1e9) * 1e9) for time in (at, at + length))
            if end > start:
                found.append(("compiling" if event == COMPILED else "tracing", start, end - start))
        return found


def _tracing_seconds(spans: list[tuple[str, int, int]]) -> float:
    compiled = [span for span in spans if span[0] == "compiling"]
    return (_covered(spans) - _covered(compiled)) / 1e9


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

    def end(self) -> PeakMemory:
        """The most memory that was in use since."""
        if not self.reports:
            peak, live = host_memory().peak, live_array_bytes()
            if self.reason or peak is None or self.resident is None:
                why = self.reason or "the operating system does not report this process's memory"
                return PeakMemory(None, why, 0)
            most = max(self.live + peak - self.resident, live, self.live)
            return PeakMemory(most, "", min(self.live, live))
        # Allocators keep the highest mark since the process began: it is the region's if it rose in it.
        grown = [
            after.peak
            for before, after in zip(self.before, device_memory(), strict=True)
            if after.peak is not None and before.peak is not None and after.peak > before.peak
        ]
        if grown:
            return PeakMemory(max(grown), "", 0)
        reason = (
            "the device's memory peaked before the region, and its allocator keeps only the highest mark: "
            "profile it in a fresh process"
        )
        return PeakMemory(None, reason, 0)


def _give_back() -> None:
    """Freed memory goes back to the system, where the C library is glibc."""
    if sys.platform.startswith("linux") and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _result(
    name: str,
    what: Capture,
    parts: Sequence[Part],
    counts: CompilationCounts,
    compiling: _Tracing,
    memory: PeakMemory | None,
    loaded: Mapping[int, list[Held]],
    cost: float,
) -> tuple[Profile, dict[int, str]]:
    """The profile of parts of a region, and the texts of the programs that ran, by number."""
    import jax

    reasons: dict[str, str] = {}
    wall = sum(one.quiet - one.began for one in parts)
    clock = RegionClock([(one.began, one.quiet - one.began) for one in parts])
    peak, held = None, 0
    if memory is None:
        reasons["peak_memory_bytes"] = "capture_memory=False"
    else:
        peak, why, held = memory
        if why:
            reasons["peak_memory_bytes"] = why
    trace, texts, traces = Trace(), {}, ()
    programs: tuple[ProgramRuns, ...] = ()
    operations: tuple[Operation, ...] = ()
    if what.traces:
        known = KnownPrograms(loaded, [one.path for one in parts if one.path is not None], reasons)
        trace, programs, operations, traces, clock = count_operations(parts, known, reasons)
        wall = wall if trace.wall_seconds is None else trace.wall_seconds
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
    spans = compiling.spans(clock)
    compiled, compile_seconds = counts.programs, counts.seconds
    if len(parts) > 1:
        inside = [length for kind, _, length in spans if kind == "compiling"]
        compiled, compile_seconds = len(inside), sum(inside) / 1e9
    own = [one for one in traces if one.folder is not None]
    if own and not all(one.left_out for one in own) and what.traces:
        reasons["perturbation"] = (
            "of recording operations; what else the program's own traces record, such as calls of Python functions, "
            "takes more time"
        )
    counted = what.flops and ran
    rates = (
        _rates(device.platform, chip, dtype or "f32", max(1, trace.devices), reasons)
        if counted
        else (None, None)
    )
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
        compiled=compiled,
        compile_seconds=compile_seconds,
        events=trace.events,
        perturbation=_perturbation(device.platform, trace, cost, wall, reasons) if what.traces else None,
        programs=programs,
        operations=operations if what.kernels else (),
        reasons=reasons,
        versions=machine_description(devices=False)["versions"],
        within_seconds=None if trace.within_ns is None else trace.within_ns / 1e9,
        tracing_seconds=_tracing_seconds(spans),
        timeline=_with_host(trace.timeline, spans, wall),
        traces=traces if own else (),
        lines=_texts_of_lines(
            {source for one in operations for source, _ in (*one.parts, (one.source, 1))}
            if what.kernels
            else set()
        ),
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


def _rates(
    platform: str, chip: Chip, dtype: str, devices: int, reasons: dict[str, str]
) -> tuple[float | None, float | None]:
    """FLOP/s and bytes per second of one of the devices: of the catalogue, or, for a CPU, measured here."""
    if platform == "cpu":
        # Emulated devices that were at work shared the cores.
        flops, moved = _measured(dtype)
        return flops / devices, moved / devices
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
def _measured(dtype: str) -> tuple[float, float]:
    """Of this process's cores together."""
    import jax

    # A CPU multiplies what it has no instructions for as float32. XLA's names of types:
    kind = {"f64": "float64", "bf16": "bfloat16", "f16": "float16"}.get(dtype, "float32")
    if jax.dtypes.canonicalize_dtype(kind) != kind:
        kind = "float32"
    return matmul_rate(kind), copy_bandwidth()


def _keep(folder: Path, profile: Profile, texts: Mapping[int, str], parts: Sequence[Part]) -> None:
    replace_file(folder / "profile.json", profile.to_json().encode())
    paths = [one.path for one in parts if one.path is not None]
    if not texts or not paths:
        return
    # Beside the first trace, in the folder that is named after its time.
    kept = paths[0].parent / "programs"
    kept.mkdir(exist_ok=True)
    for number, text in texts.items():
        name = text.split(",", 1)[0].removeprefix("HloModule ").strip()
        safe = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name)[:100]
        replace_file(kept / f"{safe}.{number}.hlo.txt", text)
