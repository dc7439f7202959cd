"""``plan``: from a configuration and a slice or host to a ranked list of layouts, before you rent hardware."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.overrides import setting_text
from capibara.errors import ConfigError
from capibara.hardware import Price
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_program, compiler_for
from capibara.plan.compiler.limits import within
from capibara.plan.errors import CompilationError, CompilerMissingError, DoesNotFitError, PlanError
from capibara.plan.improvements import Improvement, find_improvements
from capibara.plan.memory.least import find_least_memory
from capibara.plan.narrowed import Kept, Narrowed
from capibara.plan.own import OwnLayout, no_host_memory, read_layout, why_not
from capibara.plan.program import read_program
from capibara.plan.program_settings import PROGRAM_SETTINGS
from capibara.plan.refusals import does_not_fit, no_layout, refusal, require_fitting
from capibara.plan.result import Plan
from capibara.plan.search.best_first import search
from capibara.plan.settings_choice import SettingsChoice
from capibara.plan.settings_choice import choose_settings as choose_program_settings
from capibara.plan.several import Several
from capibara.plan.sizes import limit_text, size_text
from capibara.plan.targets import Target, parse_target
from capibara.plan.time import Part, StepTime, predict_step
from capibara.plan.validation import check_counts, compile_remedy, limit_of, price_of
from capibara.plan.work import Rough, TrainWork, Work
from capibara.sharding import Layout

__all__ = ["Progress", "as_work", "candidate_of", "memory_by_kind", "plan"]

Progress = Callable[[str, Layout, CompiledProgram | None], None]


def plan(
    work: ModularModelConfig | Work | str | os.PathLike[str],
    topology: str | Target = "v4-32",
    *,
    view: str | None = None,
    dcn_gbps: float | None = None,
    memory_limit_gb: float | None = None,
    compile: bool | None = None,
    max_compiles: int = 8,
    top: int = 5,
    keep: Iterable[str] = (),
    layout: Layout | str | os.PathLike[str] | Iterable[str] | None = None,
    least_memory: bool = False,
    choose_settings: bool = False,
    improve: int = 0,
    fixed: Iterable[str] = (),
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the fastest way to run a step on a TPU slice or a host of GPUs, without the hardware.

    Hundreds of layouts (mesh, sharding, rematerialisation, microbatches, optimizer sharding, offload) are ranked by
    rough estimates; the real compiler (``libtpu``, or XLA's for GPUs; ahead of time, in separate processes) schedules
    the best of them, which takes some seconds each for TPUs, and compiles the best of those. HBM is the compiler's
    figure; the time is predicted from the compiled program (:mod:`capibara.plan.time`).

    Args:
      work: a configuration, its name or path (as ``ModularModelConfig.from_toml``), or a :class:`Work`.
      topology: ``"v4:2x2x4"``, ``"v4-32"``, ``"v5p:4x4x4"``, ``"v6e-16"`` …; ``"h100:8"`` for GPUs of one host; or,
        of several slices, ``"2xv5p:4x4x4"``: each has the whole model and its share of the batch, and they exchange
        gradients (:mod:`capibara.plan.time.network`).
      view: ``"chip"`` or ``"core"``, what a device is; by default a chip, if its cores can act as one.
      dcn_gbps: gigabits a second, one way, that a chip has of the network between several slices; by default as
        published.
      memory_limit_gb: GiB that a device may use, if less than it has. The compiler is told so, and makes programs
        smaller that are a little too large; training is told by the layout's flags. The GPU compiler cannot be told.
      compile: whether to compile; otherwise figures are estimates and labelled as such. By default if the
        compiler is installed; without it the plan is an estimate, whose notes say how to install it.
      max_compiles: maximum number of layouts that the compiler sees. top: how many to report.
      keep: settings of the configuration that a plan otherwise chooses, and shall not: any of
        :data:`capibara.plan.narrowed.LAYOUT_SETTINGS`, such as ``"model.remat"``, and of
        :data:`capibara.plan.program_settings.PROGRAM_SETTINGS`.
      layout: your own layout, to be compiled and priced beside the pick (:attr:`Plan.own`): a :class:`Layout`,
        ``key=value`` settings (those not given are the configuration's), or the path of a lockfile. One that cannot
        be divided or does not fit is reported with the reason.
      least_memory: also find the least memory that the compiler fits the best layout into, and its step time; a few
        further compilations.
      choose_settings: also choose settings of the program in the best layout (``model.scan_layers``,
        ``precision.exchange``): of all combinations that are compiled, the fastest becomes the best candidate. It may
        take several times as long.
      improve: of changes of settings that a plan may not choose (dtypes, sizes, the batch), so many that give most
        tokens per second; some further compilations. fixed: settings that none of these may change, beside those of
        the program that are kept.
      region, term, prices: which price, and a file of your own (see :func:`capibara.hardware.get_price`).
      cache: the folder of compiled results, instead of the user's.
      workers: parallel compilations.
      progress: called with ``"start"`` or ``"done"``, a layout, and the compiled program.

    Raises:
      DoesNotFitError: nothing fits; the message gives the smallest layout's memory, and what would help.
      TopologyError, PriceError, ConfigError: an unknown topology, an invalid term or price file, an unknown
        configuration.
      PlanError: an invalid target, a batch that cannot be divided, or the compiler failed for another reason.
      CompilerMissingError: ``compile`` is requested and the compiler is not installed.
    """
    if isinstance(topology, Iterable) and not isinstance(topology, str):
        raise PlanError(
            f"topology: got {type(topology).__name__}, expected one slice, as 'v4-32'. capibara.plan.plan_slices "
            "compares several"
        )
    several = Several.read(topology, view, dcn_gbps)
    if several is not None and several.count == 1:
        topology, several = several.target, None
    target = parse_target(topology, view) if several is None else several.target
    whole = as_work(work)
    task = whole if several is None else several.share(whole)
    if several is not None and layout is not None:
        raise PlanError("layout: one of your own is compared on one slice. Leave it out, or plan one slice")
    limit = limit_of(target, memory_limit_gb)
    if isinstance(improve, bool) or not isinstance(improve, int) or improve < 0:
        raise PlanError(f"improve={improve!r} must be an integer from 0")
    if improve and several is not None:
        raise PlanError("improve: changes are compiled for one slice. Leave it out, or plan one slice")
    if improve and not isinstance(task, TrainWork):
        raise PlanError("improve: a step function has no settings to change. Leave it out")
    if choose_settings and several is not None:
        raise PlanError(
            "choose_settings: settings are compiled for one slice. Plan one slice with its share of the batch, and "
            "pass the settings that it chooses"
        )
    if choose_settings and not isinstance(task, TrainWork):
        raise PlanError("choose_settings: a step function has no settings to choose. Leave it out")
    if least_memory and target.limit_flag(target.usable_hbm_bytes) is None:
        raise PlanError(
            f"least_memory: {target.compiler} does not make programs smaller for a limit. Leave it out; settings given "
            "by hand are kept, such as model.remat=full or train.gradient_accumulation_steps=4"
        )
    check_counts(max_compiles=max_compiles, top=top, **({} if workers is None else {"workers": workers}))
    notes: list[str] = []
    given = None if layout is None else within(read_layout(layout, task), limit, target)
    kept, program_settings = _kept(task, keep, notes)
    offloads = kept is not None and "tpu.offload" in kept[0].settings and kept[0].layout.offload != "none"
    if offloads and not target.plans_host_memory:
        raise PlanError(no_host_memory(target))
    narrowed = Narrowed(task, limit, kept)
    notes += target.notes()
    price = price_of(target, region, term, prices, notes)
    if compile is None:
        compile = _can_compile(target, notes)
    elif not compile:
        notes.append(f"nothing was compiled: memory and time are estimates ({compile_remedy(target)})")
    least = None
    choice: SettingsChoice | None = None
    improvements: tuple[Improvement, ...] = ()
    if compile:
        notes += compiler_for(target).notes()
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
        refused = tuple((c.layout, refusal(c, limit)) for c in found.compiled if c.seconds is None)
        own = None if given is None else _own(task, target, given, limit, price, store, progress)
        candidates = _with_own(candidates, own, narrowed)
        if all(candidate.scheduled for candidate in candidates):
            require_fitting(found, narrowed, target, limit)
        candidates = _joined(candidates, several, task)
        counts = (found.considered, found.promising, len(found.compiled))
        scheduled = len(found.scheduled)
        if choose_settings and isinstance(task, TrainWork):
            choice = choose_program_settings(
                task.config,
                candidates[0],
                limit_bytes=limit,
                keep=program_settings,
                cache=store,
                workers=workers,
                progress=progress,
            )
            if choice.program is not None:
                whole = task = TrainWork(choice.config)
                candidates.insert(0, _with_settings(task, candidates[0], choice, choice.program))
        if least_memory:
            first = candidates[0]
            assert first.program is not None
            try:
                least = find_least_memory(
                    task, target, first.layout, first.program, cache=store, progress=progress
                )
                if least is not None and first.exchange is not None:
                    least = replace(least, seconds=least.seconds + first.exchange.seconds)
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
                fixed={*fixed, *program_settings},
                cache=store,
                workers=workers,
                progress=progress,
            )
            if not improvements:
                notes.append("no change of settings that was compiled gives more tokens per second")
    else:
        if choose_settings:
            raise PlanError(
                "choose_settings: the compiler knows which settings are the fastest, and nothing is compiled here "
                f"({compile_remedy(target)})"
            )
        if improve:
            raise PlanError(
                "improve: what a change saves is known to the compiler, and nothing is compiled here"
            )
        if least_memory:
            raise PlanError(
                f"least_memory: only the compiler knows it, and nothing is compiled here ({compile_remedy(target)})"
            )
        if not isinstance(task, TrainWork):
            notes.append(
                "the memory is that of the step's arguments: outputs that take no argument's place and temporaries are "
                "known only to the compiler"
            )
        own = None if given is None else _own_estimate(task, target, given, limit, price)
        candidates, counts = _uncompiled(narrowed, target, limit, price, own)
        candidates = _joined(candidates, several, task)
        refused, scheduled = (), 0
    if several is not None:
        notes += several.notes(candidates[0])
    return Plan(
        work=whole.title,
        target=target,
        limit_bytes=limit,
        candidates=_shown(candidates, top, own),
        refused=refused,
        considered=counts[0],
        promising=counts[1],
        compiled=counts[2],
        scheduled=scheduled,
        notes=tuple(notes),
        config=whole.config if isinstance(whole, TrainWork) else None,
        slices=1 if several is None else several.count,
        config_name=os.fspath(work) if isinstance(work, str | os.PathLike) else None,
        least_memory=least,
        settings_choice=choice,
        improvements=improvements,
        own=own,
    )


def _joined(candidates: list[Candidate], several: Several | None, task: Work) -> list[Candidate]:
    """Those of all slices, in their order."""
    if several is None or not isinstance(task, TrainWork):
        return candidates
    return several.joined(candidates, task.config)


def _kept(
    task: Work, keep: Iterable[str], notes: list[str]
) -> tuple[tuple[Kept, int] | None, tuple[str, ...]]:
    """What is kept of a configuration's layout, with the rows of its batch, and its settings of the program that are
    kept; a note says so.

    Raises:
      PlanError: it is no setting of a layout, or the work has no configuration.
    """
    if isinstance(keep, Mapping) or not isinstance(keep, Iterable):
        raise PlanError(
            f"keep: got {keep!r:.100}, expected names of settings, such as ['model.remat']: their values are the "
            "configuration's"
        )
    if not (names := tuple([keep] if isinstance(keep, str) else keep)):
        return None, ()
    if not isinstance(task, TrainWork):
        raise PlanError(f"keep: got {list(names)}, but a step function has no settings to keep. Leave it out")
    program = tuple(dict.fromkeys(name for name in names if name in PROGRAM_SETTINGS))
    layout = [name for name in names if name not in program]
    kept = Kept.of(task.config, layout) if layout else None
    said = [] if kept is None else [str(kept)]
    for name in program:
        section, _, key = name.partition(".")
        said.append(f"{name}={setting_text(getattr(getattr(task.config, section), key))}")
    notes.append(f"kept as given: {', '.join(said)}")
    return None if kept is None else (kept, task.config.train.batch_size), program


def _can_compile(target: Target, notes: list[str]) -> bool:
    """Whether there is a compiler; where not, a note says how to get it."""
    try:
        compiler_for(target)
    except CompilerMissingError as error:
        notes.append(f"nothing was compiled, memory and time are estimates: {error}")
        return False
    return True


def candidate_of(
    work: Work,
    target: Target,
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
    target: Target,
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


def _with_settings(
    task: TrainWork, best: Candidate, choice: SettingsChoice, program: CompiledProgram
) -> Candidate:
    """The best candidate, compiled with the chosen settings of the program."""
    target, layout = best.target, best.layout
    time = predict_step(read_program(program.text), target, layout.mesh, places=program.coordinates)
    rough = task.rough(layout, target).memory
    found = _compiled_candidate(task, target, layout, program, rough, time, best.price)
    return replace(found, settings=choice.settings)


def _own(
    task: Work,
    target: Target,
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


def _own_estimate(task: Work, target: Target, layout: Layout, limit: int, price: Price | None) -> OwnLayout:
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


def _takes(size: int, target: Target, limit: int, source: str) -> str:
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
    task: Narrowed, target: Target, limit: int, price: Price | None, own: OwnLayout | None = None
) -> tuple[list[Candidate], tuple[int, int, int]]:
    rough = {layout: task.rough(layout, target) for layout in task.layouts(target)}
    fitting = {k: r for k, r in rough.items() if r.hbm_bytes <= limit and k.offload == "none"}
    fitting = fitting or {k: r for k, r in rough.items() if r.hbm_bytes <= limit}
    ordered = sorted(fitting, key=lambda k: fitting[k].seconds)
    candidates = [_estimated_candidate(task, target, layout, fitting[layout], price) for layout in ordered]
    candidates = _with_own(candidates, own, task)
    if not candidates and not rough:
        raise no_layout(task, target)
    if not candidates:
        least = min(rough.values(), key=lambda r: r.hbm_bytes)
        raise DoesNotFitError(does_not_fit(task, target, limit, least.hbm_bytes, least.memory, "estimated"))
    return candidates, (len(rough), len(fitting), 0)


def _estimated_candidate(
    task: Work, target: Target, layout: Layout, rough: Rough, price: Price | None
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
