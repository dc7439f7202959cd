"""Which operations ran, and what they did: a trace's counts beside the texts of the loaded programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from capibara.errors import CapibaraError
from capibara.observe.errors import ProfileError
from capibara.observe.profile.arguments import FROM_CALL, FROM_PROGRAM, MOST_ARGUMENTS, program_arguments
from capibara.observe.profile.joined import RegionClock, join_traces
from capibara.observe.profile.modules import module_digest, module_name, traced_modules
from capibara.observe.profile.parts import Part
from capibara.observe.profile.programs import Held, KnownProgram, known_program
from capibara.observe.profile.result import Operation, ProgramRuns, TracedPart
from capibara.observe.profile.trace import Trace, read_trace

__all__ = ["Counted", "KnownPrograms", "count_operations"]

# A run of a program must have at least this share of the operations that its text lists, or the tracer dropped some.
_COMPLETE = 0.98


class KnownPrograms(Mapping[int, Mapping[str, str]]):
    """The operations of each number's programs, and their kinds; a text is read when it is asked for.

    A process may hold hundreds of programs of which few ran.
    """

    def __init__(
        self, loaded: Mapping[int, list[Held]], traces: Sequence[Path], reasons: dict[str, str]
    ) -> None:
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
        self._traced = {} if on_cpu else dict(one for path in traces for one in traced_modules(path).items())

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

    def __init__(self, known: KnownPrograms) -> None:
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


class Counted(NamedTuple):
    """What the traces of a region say: themselves together, programs and operations, the parts, and their time."""

    trace: Trace
    programs: tuple[ProgramRuns, ...]
    operations: tuple[Operation, ...]
    parts: tuple[TracedPart, ...]
    clock: RegionClock


def count_operations(parts: Sequence[Part], known: KnownPrograms, reasons: dict[str, str]) -> Counted:
    """What the traces of a region say.

    Args:
      parts: of the region, in order. Those that the program traced itself are left out where that says too little.
      known: the programs that may have run.
      reasons: why a figure is None or doubtful; more are added.

    Raises:
      ProfileError: a trace is damaged, or operations are missing in it; or all parts are left out.
    """
    traces: list[Trace] = []
    read: list[TracedPart] = []
    times: list[tuple[float, float]] = []
    for part in parts:
        trace, reason = None, part.reason
        if part.path is not None and not reason:
            try:
                trace = _read(part, part.path, known, reasons)
            except ProfileError as error:
                if part.own is None:
                    raise
                reason = str(error)
        seconds = part.quiet - part.began
        if trace is not None:
            seconds = seconds if trace.wall_seconds is None else trace.wall_seconds
            traces.append(trace)
            times.append((part.began, seconds))
        folder = None if part.own is None else part.own.folder
        read.append(TracedPart(part.began - parts[0].began, max(0.0, seconds), folder, reason))
    if not traces:
        raise ProfileError(
            f"nothing could be profiled: {'; '.join(dict.fromkeys(one.left_out for one in read))}"
        )
    trace = join_traces(traces)
    clock = RegionClock(times)
    seen = _seen(trace)
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
                    elementwise=about.elementwise * count,
                    parts=program.parts.get(name, ()),
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
                compiled_at=clock.at(call.began) if call else None,
                compile_seconds=call.seconds if call else None,
                arguments_from=source,
                arguments=arguments,
            )
        )
    if silent:
        reasons["flops"] = f"at least: {', '.join(list(silent)[:5])} do not say what they compute"
    by_time = sorted(operations, key=lambda one: -one.seconds)
    by_work = tuple(sorted(programs, key=lambda one: -one.seconds))
    return Counted(trace, by_work, tuple(by_time), tuple(read), clock)


def _read(part: Part, path: Path, known: KnownPrograms, reasons: dict[str, str]) -> Trace:
    """One trace, if it is complete."""
    trace = read_trace(path, known, part.quiet - part.began, known.trips, part.held - part.began)
    seen = _seen(trace)
    for number, runs in trace.runs.items():
        program = known.ran(number, seen[number])
        if program is not None and number not in trace.unclear and f"program {number}" not in reasons:
            _complete(program, number, runs, trace)
    return trace


def _seen(trace: Trace) -> dict[int, set[str]]:
    """The operations that ran of each program."""
    seen: dict[int, set[str]] = {number: set() for number in trace.runs}
    for number, name in trace.counts:
        seen[number].add(name)
    return seen


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
