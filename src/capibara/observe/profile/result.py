"""What a profile found, as plain data that prints well and goes into a file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from capibara.observe.errors import ProfileError
from capibara.observe.profile.arguments import (
    FROM_CALL,
    FROM_PROGRAM,
    Argument,
    Recompiled,
    nearest_changes,
    pack_arguments,
    summarised,
    unpack_arguments,
)
from capibara.observe.profile.timeline import Timeline

__all__ = ["KINDS", "Operation", "Profile", "ProgramRuns", "TracedPart", "seconds_text"]

# Of operations.
KINDS = ("compute", "kernel", "copy", "collective")

_FORMAT = 1
_MOST_PARTS = 64
_MOST_BYTES = 512 * 2**20
_MOST_TRACES = 10_000


@dataclass(frozen=True)
class Operation:
    """An operation of a compiled program, over all its runs on all devices of this process.

    Attributes:
      program: the program's name (``"jit_step"``).
      name: the instruction's name in that program (``"fusion.3"``).
      kind: ``"compute"``, ``"collective"``, ``"copy"``, or ``"kernel"`` for code that XLA did not generate.
      opcode: what XLA calls it (``"fusion"``, ``"all-reduce"``).
      path: where it comes from in the JAX program (``"jit(step)/while/body/dot_general"``), or empty.
      source: the source line that it comes from (``"model.py:31"``), or empty; where XLA put several together, that of
        most of the work.
      dtype: element type of the operands of its largest matrix product; without one, of its (first) result.
      count: how often it ran.
      seconds: time between its beginnings and ends, summed.
      flops: of its matrix products and convolutions, over all runs.
      bytes: read from and written to memory, over all runs, as its operands and results say.
      reread: those of them that are read from arrays which are the same in each turn of a loop.
      products: matrix products and convolutions, over all runs.
      tiled_flops: FLOPs were its products' sides multiples of a TPU's tiles: what its matrix units are at work for.
      elementwise: operations on elements, over all runs; a function such as a logarithm counts ten. None in profiles of
        earlier versions.
      parts: where it is of several source lines, each with its share of the work (products, or else elements), most
        first.
    """

    program: str
    name: str
    kind: str
    opcode: str
    path: str
    source: str
    dtype: str
    count: int
    seconds: float
    flops: int
    bytes: int
    reread: int = 0
    tiled_flops: int = 0
    products: int = 0
    elementwise: int | None = None
    parts: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class ProgramRuns:
    """A compiled program and how often it ran.

    Attributes:
      name: ``"jit_step"``.
      runs: executions, one for each device.
      seconds: time in its operations, summed over devices.
      flops: of its matrix products and convolutions, over all runs.
      bytes: moved between memory and the devices, over all runs.
      temporary_bytes: the compiler's figure for temporary memory of one run on one device; None if unknown.
      function: where the function is defined (``"model.py:12"``); empty if the program was compiled before the region.
      compiled_at: seconds after the region's begin at which compiling it began; None if that was before.
      compile_seconds: that it took, or reading it from the persistent cache; None likewise.
      arguments_from: ``"call"`` if ``arguments`` are those of the call that it was compiled for; ``"program"`` if they
        are those that its text has, as one device has them; empty if they are not known.
      arguments: that it was compiled for.
    """

    name: str
    runs: int
    seconds: float
    flops: int
    bytes: int
    temporary_bytes: int | None
    function: str = ""
    compiled_at: float | None = None
    compile_seconds: float | None = None
    arguments_from: str = ""
    arguments: tuple[Argument, ...] = ()


@dataclass(frozen=True)
class TracedPart:
    """A part of a region with a trace of its own.

    Attributes:
      began: seconds after the region's beginning, by the host's clock.
      seconds: of it.
      folder: where the program put the trace, if it took it itself; None of the profiler's.
      left_out: why it is no part of the profile; empty if it is.
    """

    began: float
    seconds: float
    folder: str | None = None
    left_out: str = ""


@dataclass(frozen=True)
class Profile:
    """One profiled region of a program.

    Attributes:
      name: the region's.
      platform: ``"cpu"``, ``"gpu"``, ``"tpu"``.
      chip: its name in the catalogue, or the CPU's.
      devices: devices of this process that ran something (at least 1).
      wall_seconds: by the host's clock, from the end of all earlier work to the end of the region's own.
      flops: of matrix products and convolutions of all programs, on all devices; None with a reason.
      bytes: moved between memory and devices, likewise.
      busy_seconds: time in which a device ran an operation, mean over devices; of emulated devices, which share the
        cores, time in which any did.
      communication_seconds: time in which a device ran collectives and nothing else, mean over devices; of emulated
        devices, time in which some did so and none ran anything else.
      peak_memory_bytes: the most memory in use during the region, of the fullest device.
      peak_flops: FLOP/s that one device can reach (a CPU's are measured).
      peak_bandwidth: bytes per second between one device and its memory (a CPU's are measured).
      compiled: programs that were compiled, or read from the persistent cache, in the region.
      compile_seconds: time that it took.
      events: operations recorded.
      perturbation: share of the region's time that recording them took, estimated from the measured cost of one.
      programs: by time.
      operations: by time.
      reasons: why a figure is None or doubtful, by its name.
      versions: of Python and the packages.
      tracing_seconds: time of tracing and lowering functions before they were compiled, beside ``compile_seconds``.
      within_seconds: time in which a GPU ran nothing between operations of one run of a program, mean over devices:
        what starting them takes. None on other platforms.
      timeline: what devices and host did when; None without a trace, and in profiles of earlier versions.
      lines: text of the source lines of operations (``"model.py:31"``), where the files could be read.
      traces: the parts of which the region consists, if the program took traces of its own in it. What lies between
        them, in which traces were written, and parts that are left out are not in any other figure.
    """

    name: str
    platform: str
    chip: str
    devices: int
    wall_seconds: float
    flops: int | None
    bytes: int | None
    busy_seconds: float | None
    communication_seconds: float | None
    peak_memory_bytes: int | None
    peak_flops: float | None
    peak_bandwidth: float | None
    compiled: int
    compile_seconds: float
    events: int
    perturbation: float | None
    programs: tuple[ProgramRuns, ...] = ()
    operations: tuple[Operation, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    tracing_seconds: float = 0.0
    within_seconds: float | None = None
    timeline: Timeline | None = None
    lines: Mapping[str, str] = field(default_factory=dict)
    traces: tuple[TracedPart, ...] = ()

    @property
    def tflops(self) -> float | None:
        """FLOP/s of all devices together, in 10¹²."""
        return None if self.flops is None else self.flops / self.wall_seconds / 1e12

    @property
    def compute_efficiency(self) -> float | None:
        """FLOP/s as a share of what the devices can reach, 0 to 1."""
        if self.flops is None or not self.peak_flops:
            return None
        return self.flops / self.wall_seconds / (self.peak_flops * self.devices)

    @property
    def memory_efficiency(self) -> float | None:
        """Bytes per second as a share of the memory's bandwidth. Above 1 where caches served much of it."""
        if self.bytes is None or not self.peak_bandwidth:
            return None
        return self.bytes / self.wall_seconds / (self.peak_bandwidth * self.devices)

    @property
    def at_once(self) -> float:
        """Seconds of operations in one second of work, at least 1: the devices; of emulated ones, which share cores,
        as many as were at work at once."""
        if self.platform != "cpu" or self.devices == 1 or not self.busy_seconds:
            return float(self.devices)
        return max(1.0, sum(one.seconds for one in self.operations) / self.busy_seconds)

    @property
    def idle_share(self) -> float | None:
        """Share of the time in which the devices, on average, ran nothing, 0 to 1."""
        if self.busy_seconds is None:
            return None
        return max(0.0, 1 - self.busy_seconds / self.wall_seconds)

    def recompilations(self) -> tuple[Recompiled, ...]:
        """Programs that were compiled in the region although there was one of the same function, and what changed.

        They are compared with those of the same name that ran in the region and had been compiled before.
        """
        found = []
        groups: dict[str, list[ProgramRuns]] = {}
        for one in sorted(
            self.programs, key=lambda one: -1.0 if one.compiled_at is None else one.compiled_at
        ):
            # Functions of one name that are not one; where it is defined is not known of what was compiled before.
            known = [
                other
                for other in groups.setdefault(one.name, [])
                if other.function in ("", one.function) or not one.function
            ]
            if known and one.compile_seconds is not None:
                changes, left_out = nearest_changes(
                    [(other.arguments_from, other.arguments) for other in known],
                    one.arguments_from,
                    one.arguments,
                )
                found.append(
                    Recompiled(
                        program=one.name,
                        function=one.function,
                        times=1,
                        seconds=one.compile_seconds,
                        reason="arguments" if changes else "same arguments",
                        known=len(known),
                        changes=changes,
                        left_out=left_out,
                    )
                )
            groups[one.name].append(one)
        return summarised(found)

    def metrics(self) -> dict[str, Any]:
        """The figures under the names of :meth:`TpuPerformanceProfiler.get_detailed_metrics`."""
        peak = self.peak_memory_bytes
        exposed = self.communication_seconds
        return {
            "name": self.name,
            "tflops": self.tflops,
            "total_flops": self.flops,
            "peak_memory_gb": None if peak is None else peak / 1e9,
            "memory_efficiency": self.memory_efficiency,
            "compute_efficiency": self.compute_efficiency,
            "comm_overhead_ms": None if exposed is None else exposed * 1e3,
            "wall_time_ms": self.wall_seconds * 1e3,
            "busy_time_ms": None if self.busy_seconds is None else self.busy_seconds * 1e3,
            "idle_share": self.idle_share,
            "devices": self.devices,
            "compiled_programs": self.compiled,
            "compile_time_ms": self.compile_seconds * 1e3,
            "perturbation": self.perturbation,
            "kernels": [asdict(operation) for operation in self.operations],
            "programs": [_without_arguments(program) for program in self.programs],
            "recompilations": [asdict(one) for one in self.recompilations()],
            "traces": [asdict(one) for one in self.traces],
            "reasons": dict(self.reasons),
        }

    def to_json(self) -> str:
        """JSON text that :meth:`from_json` reads."""
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        data |= {
            "format": _FORMAT,
            "programs": [
                {**_without_arguments(one), "arguments": packed}
                for one, packed in zip(
                    self.programs,
                    pack_arguments([(one.name, one.arguments) for one in self.programs]),
                    strict=True,
                )
            ],
            "operations": [asdict(one) for one in self.operations],
            "reasons": dict(self.reasons),
            "versions": dict(self.versions),
            "lines": dict(self.lines),
            "timeline": None if self.timeline is None else self.timeline.to_data(),
            "traces": [asdict(one) for one in self.traces],
        }
        return json.dumps(data, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read the output of :meth:`to_json`.

        Raises:
          ProfileError: the text is something else, or of another format.
        """
        if len(text) > _MOST_BYTES:
            raise ProfileError(f"a profile of {len(text):,} characters; at most {_MOST_BYTES:,}")
        try:
            data = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise ProfileError(f"a profile of another format than {_FORMAT}: take it again")
            programs = data["programs"]
            arguments = unpack_arguments([one.get("arguments", []) for one in programs])
            data["programs"] = tuple(
                _checked(ProgramRuns, {**one, "arguments": own})
                for one, own in zip(programs, arguments, strict=True)
            )
            data["timeline"] = Timeline.from_data(data.get("timeline"))
            data["operations"] = tuple(_checked(Operation, one) for one in data["operations"])
            traces = data.get("traces", [])
            if len(traces) > _MOST_TRACES:
                raise ValueError(f"traces: got {len(traces):,}, expected at most {_MOST_TRACES:,}")
            data["traces"] = tuple(_checked(TracedPart, one) for one in traces)
            return _checked(cls, data)
        except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, ProfileError):
                raise
            raise ProfileError(
                f"the text is not a profile as Profile.to_json() writes it: {error}"
            ) from error

    def __str__(self) -> str:
        lines = [
            f"{self.name}: {seconds_text(self.wall_seconds)} on {self.devices} × {self.chip}",
            f"  compute        {self._compute()}",
            f"  memory         {self._memory()}",
            f"  communication  {self._or_reason('communication_seconds', seconds_text)}",
            f"  idle           {self._or_reason('idle_share', _percent)}",
        ]
        if self.compiled:
            lines.append(f"  compiled       {self.compiled} programs in {seconds_text(self.compile_seconds)}")
        if self.perturbation is not None:
            lines.append(
                f"  the profile    {self.events:,} operations; about {_percent(self.perturbation)} of the time"
            )
        lines += self._traces()
        whole = sum(one.seconds for one in self.operations)
        if whole:
            lines.append("  share   time       runs     FLOP/s      operation")
        for one in self.operations[:10] if whole else ():
            rate = f"{one.flops / one.seconds / 1e9:8.1f} G" if one.flops and one.seconds else " " * 10
            where = one.source or one.path
            lines.append(
                f"  {one.seconds / whole:5.1%} {seconds_text(one.seconds):>9} {one.count:>9,} {rate}  "
                f"{one.program} {one.name}" + (f"  {where}" if where else "")
            )
        return "\n".join(lines)

    def _traces(self) -> list[str]:
        """What the program traced itself, and what is missing for it."""
        own = [one for one in self.traces if one.folder is not None]
        if not own:
            return []
        kept = [one for one in own if not one.left_out]
        lines = []
        if kept:
            folders = ", ".join(dict.fromkeys(str(one.folder) for one in kept))
            spent = seconds_text(sum(one.seconds for one in kept))
            lines.append(f"  own traces     {len(kept)} that the program took ({spent}) were read: {folders}")
        lines += [
            f"  left out       {seconds_text(one.seconds)}, from {seconds_text(one.began)} on: {one.left_out}"
            for one in self.traces
            if one.left_out
        ]
        ends = [one.began + one.seconds for one in self.traces]
        between = sum(
            max(0.0, later.began - end) for end, later in zip(ends[:-1], self.traces[1:], strict=True)
        )
        lines.append(
            f"  between them   {seconds_text(between)}, in which traces were written, are not counted"
        )
        return lines

    def _or_reason(self, name: str, shown: Any) -> str:
        value = getattr(self, name)
        return f"unknown: {self.reasons.get(name, 'not captured')}" if value is None else shown(value)

    def _compute(self) -> str:
        if self.tflops is None:
            return f"unknown: {self.reasons.get('flops', 'not captured')}"
        share = self.compute_efficiency
        of = "" if share is None else f", {_percent(share)} of what the devices can reach"
        least = "at least " if "flops" in self.reasons else ""
        return f"{least}{self.tflops:.3f} TFLOP/s{of}"

    def _memory(self) -> str:
        peak = self._or_reason("peak_memory_bytes", lambda value: f"{value / 1e9:.3f} GB at its peak")
        share = self.memory_efficiency
        return peak if share is None else f"{peak}; {_percent(share)} of the bandwidth"


def _without_arguments(program: ProgramRuns) -> dict[str, Any]:
    return {one.name: getattr(program, one.name) for one in fields(program) if one.name != "arguments"}


def _checked(cls: Any, data: Any) -> Any:
    """An object from JSON whose keys, types and numbers are such as its class has."""
    made = cls(**data)
    for one in fields(cls):
        value, kind = getattr(made, one.name), str(one.type)
        if value is None and kind.endswith("| None"):
            continue
        types = {"str": str, "int": int, "float": (int, float), "Mapping[str, str]": dict}.get(
            kind.removesuffix(" | None")
        )
        if types is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise TypeError(f"{one.name}: got {value!r:.100}, expected {one.type}")
        if isinstance(value, int | float) and not 0 <= value < 2**63:
            raise ValueError(f"{one.name}: got {value!r:.100}, expected a number from 0 on")
        texts = (
            [value]
            if isinstance(value, str)
            else [*value, *value.values()]
            if isinstance(value, dict)
            else []
        )
        if not all(isinstance(text, str) and _printable(text) for text in texts):
            raise ValueError(f"{one.name}: got {value!r:.100}, expected printable text")
    if isinstance(made, Profile) and not (made.wall_seconds > 1e-12 and made.devices > 0):
        raise ValueError("wall_seconds and devices: expected more than 0")
    if isinstance(made, ProgramRuns) and made.arguments_from not in ("", FROM_CALL, FROM_PROGRAM):
        raise ValueError(
            f"arguments_from: got {made.arguments_from!r:.100}, expected {FROM_CALL} or {FROM_PROGRAM}"
        )
    if isinstance(made, Operation):
        made = replace(made, parts=_checked_parts(made.parts))
    if isinstance(made, Operation) and made.kind not in KINDS:
        raise ValueError(f"kind: got {made.kind!r:.100}, expected one of {', '.join(KINDS)}")
    return made


def _checked_parts(parts: Any) -> tuple[tuple[str, float], ...]:
    """Parts of an operation from JSON."""
    found = tuple((source, share) for source, share in parts)
    if (
        len(found) > _MOST_PARTS
        or not all(
            isinstance(source, str) and _printable(source) and type(share) in (int, float) and 0 <= share <= 1
            for source, share in found
        )
        or sum(share for _, share in found) > 1 + 1e-6
    ):
        raise ValueError(
            f"parts: got {parts!r:.100}, expected source lines with shares from 0 to 1, 1 in all"
        )
    return found


def _printable(text: str) -> bool:
    """Whether a text has no codes for terminals, and can be written as UTF-8."""
    return all(letter.isprintable() or letter in "\n\t" for letter in text)


def seconds_text(value: float) -> str:
    """A time with its unit."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"


def _percent(value: float) -> str:
    return f"{value:.1%}".replace("%", " %")
