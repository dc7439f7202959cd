"""``plan``: from a configuration and a slice to a ranked list of layouts, before you rent hardware."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.hardware import Price
from capibara.plan.attribution import Attribution, attribute
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_program, find_compiler
from capibara.plan.compiler.limits import within
from capibara.plan.errors import CompilationError, CompilerMissingError, DoesNotFitError, PlanError
from capibara.plan.grids import MOST_CHIPS, at_least
from capibara.plan.improvements import Improvement, find_improvements
from capibara.plan.memory.least import LeastMemory, find_least_memory
from capibara.plan.narrowed import Kept, Narrowed
from capibara.plan.own import OwnLayout, read_layout, why_not
from capibara.plan.planned import train_command
from capibara.plan.program import read_program
from capibara.plan.search.best_first import Search, search
from capibara.plan.sizes import limit_text, size_text
from capibara.plan.slices import Slice, parse_slice
from capibara.plan.time import Part, StepTime, predict_step
from capibara.plan.validation import COMPILE_REMEDY, check_counts, host_notes, limit_of, price_of
from capibara.plan.work import Rough, TrainWork, Work
from capibara.sharding import Layout

__all__ = ["Plan", "Progress", "as_work", "candidate_of", "memory_by_kind", "plan"]


@dataclass(frozen=True)
class Plan:
    """What a step needs on a slice, and the best ways found to run it.

    Attributes:
      work: a one-line description.
      target: the slice.
      limit_bytes: memory that a device may use.
      candidates: those that fit, the fastest first.
      refused: layouts that the compiler refused, with its messages.
      considered, promising, compiled: numbers of layouts in total, that might fit, and that were compiled.
      scheduled: number of further layouts that the compiler scheduled, but made no machine code for.
      notes: caveats, such as that nothing was compiled or that no price is known.
      least_memory: the least memory that the compiler fits the best candidate into, if that was asked for and is less
        than what it takes otherwise.
      improvements: changes of settings that give more tokens per second, if they were asked for, the best first.
      own: the user's own layout, if one was given; where it fits it is one of the candidates, too.
      config: the configuration that was planned; None for a step function.
      config_name: the file or packaged name that it comes from, if that is known; with ``base`` a model's folder.
      base: the settings with which that model is trained if nothing else is said.
    """

    work: str
    target: Slice
    limit_bytes: int
    candidates: tuple[Candidate, ...]
    refused: tuple[tuple[Layout, str], ...] = ()
    considered: int = 0
    promising: int = 0
    compiled: int = 0
    scheduled: int = 0
    notes: tuple[str, ...] = ()
    config: ModularModelConfig | None = field(default=None, repr=False)
    config_name: str | None = None
    base: ModularModelConfig | None = field(default=None, repr=False)
    least_memory: LeastMemory | None = None
    improvements: tuple[Improvement, ...] = ()
    own: OwnLayout | None = None

    @property
    def best(self) -> Candidate:
        """The fastest that fits."""
        return self.candidates[0]

    @cached_property
    def where(self) -> Attribution | None:
        """Where the best candidate's time and memory go; None if nothing was compiled, or the compiled program is no
        longer in the cache."""
        if not self.candidates or self.best.program is None:
            return None
        try:
            return attribute(self.best.program, self.target, self.best.layout.mesh)
        except PlanError:
            return None

    @property
    def chip(self) -> str:
        """The chip's name in the catalogue."""
        return self.target.chip.name.removesuffix("-core")

    @property
    def num_chips(self) -> int:
        """Chips of the slice."""
        return self.target.num_chips

    @property
    def step_seconds(self) -> float:
        """Of the best."""
        return self.best.step_seconds

    @property
    def tokens_per_step(self) -> int | None:
        """Of the best."""
        return self.best.tokens

    @property
    def fits(self) -> bool:
        """Whether anything fits (a plan that does not is an error, unless it was asked for)."""
        return bool(self.candidates)

    def overrides(self) -> list[str]:
        """``key=value`` settings of the best candidate, each an argument of ``capibara train``."""
        return self.best.layout.overrides()

    def command(self) -> str | None:
        """The command line that trains the best candidate; None if the source of the configuration is not known.

        Raises:
          ConfigError: the file of the configuration no longer exists.
        """
        if self.config is None or self.config_name is None or not self.candidates:
            return None
        return train_command(self.config, self.best.layout, self.config_name, self.base)

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts."""
        return {
            "work": self.work,
            "topology": self.target.text,
            "slice": self.target.slice_name,
            "view": self.target.view,
            "limit_bytes": self.limit_bytes,
            "considered": self.considered,
            "promising": self.promising,
            "compiled": self.compiled,
            "scheduled": self.scheduled,
            "notes": list(self.notes),
            "config": None if self.config is None else self.config.to_dict(),
            "candidates": [candidate.to_json() for candidate in self.candidates],
            "where": None if self.where is None else self.where.to_json(),
            "least_memory": None if self.least_memory is None else self.least_memory.to_json(),
            "improvements": [each.to_json() for each in self.improvements],
            "own": None if self.own is None else self.own.to_json(self.best if self.fits else None),
            "refused": [{"layout": layout.to_json(), "message": message} for layout, message in self.refused],
        }

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write a page (``.html``) or a figure (``.png``): memory, time and where it goes, the links of each mesh axis.

        Raises:
          PlanError: the name ends otherwise. MissingExtraError: matplotlib is not installed.
        """
        from capibara.plan.report.page import write_report

        return write_report(self, path)

    def lock(self, path: str | os.PathLike[str]) -> None:
        """Write the best candidate into a lockfile; see :mod:`capibara.plan.lock`.

        Raises:
          PlanError: it was not compiled, or is not the plan of a configuration.
        """
        from capibara.plan.lock import write_lock

        write_lock(self, path)

    def __str__(self) -> str:
        from capibara.plan.report.table import plan_text

        return plan_text(self)


Progress = Callable[[str, Layout, CompiledProgram | None], None]


def plan(
    work: ModularModelConfig | Work | str | os.PathLike[str],
    topology: str | Slice = "v4-32",
    *,
    view: str | None = None,
    memory_limit_gb: float | None = None,
    compile: bool | None = None,
    max_compiles: int = 8,
    top: int = 5,
    keep: Iterable[str] = (),
    layout: Layout | str | os.PathLike[str] | Iterable[str] | None = None,
    least_memory: bool = False,
    improve: int = 0,
    fixed: Iterable[str] = (),
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest way to run a step on a TPU slice, without the hardware.

    Hundreds of layouts (mesh, sharding, rematerialisation, microbatches, optimizer sharding, offload) are ranked by
    rough estimates; the real TPU compiler (``libtpu``, ahead of time, in separate processes) schedules the best of
    them, which takes some seconds each, and compiles the best of those. HBM is the compiler's figure; the time is
    predicted from the compiled program (:mod:`capibara.plan.time`).

    Args:
      work: a configuration, its name or path (as ``ModularModelConfig.from_toml``), or a :class:`Work`.
      topology: ``"v4:2x2x4"``, ``"v4-32"``, ``"v5p:4x4x4"``, ``"v6e-16"`` …
      view: ``"chip"`` or ``"core"``, what a device is; by default a chip, if its cores can act as one.
      memory_limit_gb: GiB that a device may use, if less than it has. The compiler is told so, and makes programs
        smaller that are a little too large; training is told by the layout's flags.
      compile: whether to compile; otherwise figures are estimates and labelled as such. By default if the TPU
        compiler is installed; without it the plan is an estimate, whose notes say how to install it.
      max_compiles: maximum number of layouts that the compiler sees. top: how many to report.
      keep: settings of the configuration that a plan otherwise chooses, and shall not: any of
        :data:`capibara.plan.narrowed.LAYOUT_SETTINGS`, such as ``"model.remat"``.
      layout: your own layout, to be compiled and priced beside the pick (:attr:`Plan.own`): a :class:`Layout`,
        ``key=value`` settings (those not given are the configuration's), or the path of a lockfile. One that cannot
        be divided or does not fit is reported with the reason.
      least_memory: also find the least memory that the compiler fits the best layout into, and its step time; a few
        further compilations.
      improve: of changes of settings that a plan may not choose (dtypes, sizes, the batch), so many that give most
        tokens per second; some further compilations. fixed: settings that none of these may change.
      region, term, prices: which price, and a file of your own (see :func:`capibara.hardware.get_price`).
      cache: the folder of compiled results, instead of the user's.
      workers: parallel compilations.
      progress: called with ``"start"`` or ``"done"``, a layout, and the compiled program.

    Raises:
      DoesNotFitError: nothing fits; the message gives the smallest layout's memory, and what would help.
      TopologyError, PriceError, ConfigError: an unknown topology, an invalid term or price file, an unknown
        configuration.
      PlanError: an invalid slice, a batch that cannot be divided, or the compiler failed for another reason.
      CompilerMissingError: ``compile`` is requested and the TPU compiler is not installed.
    """
    if not isinstance(topology, str | Slice):
        raise PlanError(
            f"topology: got {type(topology).__name__}, expected one slice, as 'v4-32'. capibara.plan.plan_slices "
            "compares several"
        )
    target = parse_slice(topology, view)
    task = as_work(work)
    limit = limit_of(target, memory_limit_gb)
    if isinstance(improve, bool) or not isinstance(improve, int) or improve < 0:
        raise PlanError(f"improve={improve!r} must be an integer from 0")
    if improve and not isinstance(task, TrainWork):
        raise PlanError("improve: a step function has no settings to change. Leave it out")
    check_counts(max_compiles=max_compiles, top=top, **({} if workers is None else {"workers": workers}))
    notes: list[str] = []
    given = None if layout is None else within(read_layout(layout, task), limit, target)
    narrowed = Narrowed(task, limit, _kept(task, keep, notes))
    notes += host_notes(target)
    price = price_of(target, region, term, prices, notes)
    if compile is None:
        compile = _can_compile(notes)
    elif not compile:
        notes.append(f"nothing was compiled: memory and time are estimates ({COMPILE_REMEDY})")
    least = None
    improvements: tuple[Improvement, ...] = ()
    if compile:
        notes += find_compiler().notes()
        store = ProgramCache(cache)
        times: dict[Layout, StepTime] = {}

        glances: dict[Layout, StepTime] = {}

        def time_of(program: CompiledProgram, layout: Layout, cycles: bool) -> StepTime:
            facts = read_program(program.text)
            return predict_step(facts, target, layout.mesh, places=program.coordinates, cycles=cycles)

        def seconds_of(program: CompiledProgram, layout: Layout) -> float:
            times[layout] = time_of(program, layout, True)
            return times[layout].seconds

        def glance_of(program: CompiledProgram, layout: Layout) -> float:
            if layout not in glances:
                glances[layout] = time_of(program, layout, False)
            return glances[layout].seconds

        found = search(
            narrowed,
            target,
            seconds_of,
            glance_of=glance_of,
            limit_bytes=limit,
            max_compiles=max_compiles,
            workers=workers,
            cache=store,
            progress=progress,
        )
        candidates = [
            _compiled_candidate(
                task, target, each.layout, each.program, each.rough.memory, times[each.layout], price
            )
            for each in found.fitting
        ]
        candidates += [
            _compiled_candidate(
                task,
                target,
                each.layout,
                each.program,
                each.rough.memory,
                glances[each.layout].slower(each.seconds or 0.0),
                price,
            )
            for each in found.scheduled
        ]
        # The best is compiled, whatever the others promise.
        candidates[1:] = sorted(candidates[1:], key=lambda one: one.step_seconds)
        refused = tuple((c.layout, c.program.message) for c in found.compiled if c.seconds is None)
        own = None if given is None else _own(task, target, given, limit, price, store, progress)
        candidates = _with_own(candidates, own, narrowed)
        if all(candidate.scheduled for candidate in candidates):
            _check(found, narrowed, target, limit)
        counts = (found.considered, found.promising, len(found.compiled))
        scheduled = len(found.scheduled)
        if least_memory:
            first = candidates[0]
            assert first.program is not None
            try:
                least = find_least_memory(
                    task, target, first.layout, first.program, cache=store, progress=progress
                )
                if least is None:
                    notes.append("the compiler cannot fit the best layout into less memory than it takes")
            except CompilationError as error:  # the plan is worth keeping
                notes.append(f"the least memory is not known: {error}")
        if improve and isinstance(task, TrainWork):
            improvements = find_improvements(
                task.config,
                candidates[0],
                limit_bytes=limit,
                most=improve,
                fixed=set(fixed),
                cache=store,
                workers=workers,
                progress=progress,
            )
            if not improvements:
                notes.append("no change of settings that was compiled gives more tokens per second")
    else:
        if improve:
            raise PlanError(
                "improve: what a change saves is known to the compiler, and nothing is compiled here"
            )
        if least_memory:
            raise PlanError(
                f"least_memory: only the compiler knows it, and nothing is compiled here ({COMPILE_REMEDY})"
            )
        if not isinstance(task, TrainWork):
            notes.append(
                "the memory is that of the step's arguments: outputs that take no argument's place and temporaries are "
                "known only to the compiler"
            )
        own = None if given is None else _own_estimate(task, target, given, limit, price)
        candidates, counts = _uncompiled(narrowed, target, limit, price, own)
        refused, scheduled = (), 0
    return Plan(
        work=task.title,
        target=target,
        limit_bytes=limit,
        candidates=_shown(candidates, top, own),
        refused=refused,
        considered=counts[0],
        promising=counts[1],
        compiled=counts[2],
        scheduled=scheduled,
        notes=tuple(notes),
        config=task.config if isinstance(task, TrainWork) else None,
        config_name=os.fspath(work) if isinstance(work, str | os.PathLike) else None,
        least_memory=least,
        improvements=improvements,
        own=own,
    )


def _kept(task: Work, keep: Iterable[str], notes: list[str]) -> tuple[Kept, int] | None:
    """What is kept of a configuration, with the rows of its batch; a note says so.

    Raises:
      PlanError: it is no setting of a layout, or the work has no configuration.
    """
    if isinstance(keep, Mapping) or not isinstance(keep, Iterable):
        raise PlanError(
            f"keep: got {keep!r:.100}, expected names of settings, such as ['model.remat']: their values are the "
            "configuration's"
        )
    if not (names := tuple([keep] if isinstance(keep, str) else keep)):
        return None
    if not isinstance(task, TrainWork):
        raise PlanError(f"keep: got {list(names)}, but a step function has no settings to keep. Leave it out")
    kept = Kept.of(task.config, names)
    notes.append(f"kept as given: {kept}")
    return kept, task.config.train.batch_size


def _can_compile(notes: list[str]) -> bool:
    """Whether there is a compiler; where not, a note says how to get it."""
    try:
        find_compiler()
    except CompilerMissingError as error:
        notes.append(f"nothing was compiled, memory and time are estimates: {error}")
        return False
    return True


def candidate_of(
    work: Work,
    target: Slice,
    layout: Layout,
    *,
    price: Price | None = None,
    cache: ProgramCache | None = None,
    progress: Progress | None = None,
) -> tuple[CompiledProgram, Candidate | None]:
    """Compile one layout; the candidate is None if the compiler refuses it.

    Raises:
      CompilerMissingError, CompilationError: as :func:`plan`.
    """
    if progress is not None:
        progress("start", layout, None)
    program = compile_program(work.job(layout, target), cache=cache)
    if progress is not None:
        progress("done", layout, program)
    if program.memory is None:
        return program, None
    time = predict_step(read_program(program.text), target, layout.mesh, places=program.coordinates)
    rough = work.rough(layout, target).memory
    return program, _compiled_candidate(work, target, layout, program, rough, time, price)


def memory_by_kind(program: CompiledProgram, rough: Mapping[str, int]) -> dict[str, int]:
    """The compiler's memory figure for a device, split by kind.

    Arguments are exact. The compiler's temporaries are split into the activations saved for the backward pass
    (estimated) and the rest.
    """
    memory = program.memory
    if memory is None:
        raise PlanError(f"the program did not compile: {program.message}")
    kinds = {name: size for name, size in memory.kinds.items() if size}
    padding = memory.arguments - sum(kinds.values())
    if padding < 0:  # arguments that the program does not use are dropped
        kinds, padding = {"arguments": memory.arguments}, 0
    activations = min(rough.get("activations", 0), memory.temporaries)
    kinds |= {
        "activations": activations,
        "temporaries": memory.temporaries - activations,
        "outputs": memory.outputs - memory.aliased,
        "padding": padding,
    }
    return {name: size for name, size in kinds.items() if size}


def _compiled_candidate(
    task: Work,
    target: Slice,
    layout: Layout,
    program: CompiledProgram,
    rough: Mapping[str, int],
    time: StepTime,
    price: Price | None,
) -> Candidate:
    return Candidate(
        layout=layout,
        target=target,
        memory=memory_by_kind(program, rough),
        memory_source="compiler",
        time=time,
        tokens=task.tokens,
        flops=task.flops,
        price=price,
        program_hash=program.program_hash,
        versions=program.versions,
        coordinates=program.coordinates,
        compile_seconds=program.compile_seconds,
        program=program,
    )


def _own(
    task: Work,
    target: Slice,
    layout: Layout,
    limit: int,
    price: Price | None,
    cache: ProgramCache,
    progress: Progress | None,
) -> OwnLayout:
    """The user's own layout, compiled."""
    if reason := why_not(task, layout, target):
        return OwnLayout(layout, reason=reason)
    try:
        program, candidate = candidate_of(task, target, layout, price=price, cache=cache, progress=progress)
    except (ConfigError, PlanError) as error:
        return OwnLayout(layout, reason=str(error))
    if candidate is None and program.status == "oom" and program.needed_bytes:
        return OwnLayout(layout, reason=_takes(program.needed_bytes, target, limit, "by the compiler"))
    if candidate is None:
        return OwnLayout(layout, reason=program.message)
    if candidate.hbm_bytes > limit:
        return OwnLayout(layout, candidate, _takes(candidate.hbm_bytes, target, limit, "by the compiler"))
    return OwnLayout(layout, candidate)


def _own_estimate(task: Work, target: Slice, layout: Layout, limit: int, price: Price | None) -> OwnLayout:
    """The user's own layout, estimated."""
    if reason := why_not(task, layout, target):
        return OwnLayout(layout, reason=reason)
    try:
        candidate = _estimated_candidate(task, target, layout, task.rough(layout, target), price)
    except (ConfigError, PlanError) as error:
        return OwnLayout(layout, reason=str(error))
    if candidate.hbm_bytes > limit:
        return OwnLayout(layout, candidate, _takes(candidate.hbm_bytes, target, limit, "estimated"))
    return OwnLayout(layout, candidate)


def _takes(size: int, target: Slice, limit: int, source: str) -> str:
    return f"it takes {size_text(size)} a device ({source}), and {limit_text(target, limit)}"


def _with_own(candidates: list[Candidate], own: OwnLayout | None, narrowed: Narrowed) -> list[Candidate]:
    """The candidates with the user's own layout in its place, if it fits and has what is kept."""
    if own is None or own.candidate is None or own.reason or not narrowed.keeps(own.layout):
        return candidates
    others = [each for each in candidates if each.layout != own.layout]
    ordered = sorted([own.candidate, *others], key=lambda each: each.step_seconds)
    # The best is compiled, whatever those promise that are only scheduled.
    best = next(each for each in ordered if not each.scheduled)
    return [best, *(each for each in ordered if each is not best)]


def _shown(candidates: list[Candidate], top: int, own: OwnLayout | None) -> tuple[Candidate, ...]:
    """The first, and the user's own wherever it stands."""
    return tuple(
        each
        for number, each in enumerate(candidates)
        if number < top or (own is not None and each is own.candidate)
    )


def _uncompiled(
    task: Narrowed, target: Slice, limit: int, price: Price | None, own: OwnLayout | None = None
) -> tuple[list[Candidate], tuple[int, int, int]]:
    rough = {layout: task.rough(layout, target) for layout in task.layouts(target)}
    fitting = {k: r for k, r in rough.items() if r.hbm_bytes <= limit and k.offload == "none"}
    fitting = fitting or {k: r for k, r in rough.items() if r.hbm_bytes <= limit}
    ordered = sorted(fitting, key=lambda k: fitting[k].seconds)
    candidates = [_estimated_candidate(task, target, layout, fitting[layout], price) for layout in ordered]
    candidates = _with_own(candidates, own, task)
    if not candidates and not rough:
        raise _no_layout(task, target)
    if not candidates:
        least = min(rough.values(), key=lambda r: r.hbm_bytes)
        raise DoesNotFitError(_does_not_fit(task, target, limit, least.hbm_bytes, least.memory, "estimated"))
    return candidates, (len(rough), len(fitting), 0)


def _estimated_candidate(
    task: Work, target: Slice, layout: Layout, rough: Rough, price: Price | None
) -> Candidate:
    return Candidate(
        layout=layout,
        target=target,
        memory=dict(rough.memory),
        memory_source="analytic",
        time=_rough_time(rough),
        tokens=task.tokens,
        flops=task.flops,
        price=price,
    )


def _rough_time(rough: Rough) -> StepTime:
    """The estimate as a range: everything at its peak and hidden, to nothing hidden and half of the rate."""
    parts = [("compute", rough.compute), ("memory", rough.traffic), ("communication", rough.communication)]
    return StepTime(
        seconds=rough.seconds,
        low=rough.compute * 0.75,
        high=2 * rough.seconds,
        compute=rough.compute,
        memory=rough.traffic,
        communication=rough.communication,
        hidden=0.0,
        parts=tuple(Part(label, value, "estimate") for label, value in parts),
    )


def _check(found: Search, task: Work, target: Slice, limit: int) -> None:
    if found.fitting:
        return
    if not found.compiled:
        raise _no_layout(task, target)
    errors = [c for c in found.compiled if c.program.status == "error"]
    if len(errors) == len(found.compiled):
        message = errors[0].program.message
        gap = "\n" if "\n" in message else " "
        raise PlanError(f"the program could not be made or compiled:{gap}{message}")

    def size(program: CompiledProgram) -> int:
        return program.memory.total if program.memory else program.needed_bytes or 0

    least = min((c for c in found.compiled if c not in errors), key=lambda c: size(c.program) or math.inf)
    needed = size(least.program) or least.rough.hbm_bytes
    source = "by the compiler" if size(least.program) else "estimated"
    refusal = DoesNotFitError(_does_not_fit(task, target, limit, needed, least.rough.memory, source))
    refusal.layout = least.layout
    raise refusal


def _does_not_fit(
    task: Work, target: Slice, limit: int, needed: int, kinds: Mapping[str, int], source: str
) -> str:
    largest = sorted(kinds.items(), key=lambda item: -item[1])[:3]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in largest)
    if source != "estimated":  # the kinds are, and need not add up to the compiler's figure
        parts = f"estimated: {parts}"
    chips = math.ceil(target.num_chips * needed / limit)
    larger = at_least(target.generation, chips)
    more = (
        f"More than the {MOST_CHIPS[target.generation]} chips of a {target.generation} pod"
        if larger is None
        else f"A slice such as {Slice(target.generation, larger)}"
    )
    help = (
        "a smaller train.batch_size or train.sequence_length would help; capibara plan --explain lists the largest "
        "buffers"
        if _trains(task)
        else "or a smaller batch would help"
    )
    return (
        f"nothing fits: {task.title} on {target} takes at least {size_text(needed)} a device ({source}; {parts}), "
        f"and {limit_text(target, limit)}. {more}, {help}"
    )


def _no_layout(task: Work, target: Slice) -> PlanError:
    if not _trains(task):
        return PlanError(
            f"no mesh of {target.num_devices} devices divides the work ({task.title}): the first dimension of every "
            "batch argument (batch_argnums) must be a multiple of the devices along 'data', and the longest dimension "
            f"of the others of those along 'model', together {target.num_devices}"
        )
    return PlanError(
        f"no mesh of {target.num_devices} devices divides the work ({task.title}): train.batch_size must be a multiple "
        "of the devices along 'data', model.num_heads of those along 'model', and model.num_layers of those along "
        f"'pipeline', together {target.num_devices}"
    )


def _trains(work: Work) -> bool:
    """Whether it is the step of a configuration."""
    return isinstance(work.work if isinstance(work, Narrowed) else work, TrainWork)


def as_work(work: Any) -> Work:
    """A step that can be planned, of a configuration, its name or path, or itself.

    Raises:
      PlanError: it is something else. ConfigError: an unknown configuration.
    """
    if isinstance(work, str | os.PathLike):
        return TrainWork(ModularModelConfig.from_toml(Path(work) if isinstance(work, os.PathLike) else work))
    if isinstance(work, ModularModelConfig):
        return TrainWork(work)
    if all(hasattr(work, name) for name in ("layouts", "rough", "job", "title")):
        return work
    raise PlanError(
        f"work is {type(work).__name__}, expected a ModularModelConfig, its name or path, or a step made by "
        "capibara.plan.step_work(function, args, …)"
    )
