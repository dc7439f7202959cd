"""Have the most promising layouts scheduled, correct the rough estimates by the results, and compile the best.

Rough estimates rank a few hundred layouts in milliseconds. In some seconds the compiler fuses, orders and places all
operations of one, which gives its memory, and its time at the roofline of every operation; a minute of machine code
later it gives the cycles, too. So the search

1. has the best of several meshes and of each rematerialisation scheduled, corrects the rough time and memory of every
   other layout by the results of its nearest relatives, and continues while a layout that is not scheduled yet may be
   better than the best of those that are;
2. has the best of these compiled, corrects the times of the others by what the cycles make of their relatives', and
   continues while one that is only scheduled may be better than the best compiled one.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace

from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_programs
from capibara.plan.targets import Target
from capibara.plan.work import Rough, Work
from capibara.sharding import Layout

__all__ = ["Compiled", "Search", "search"]

# A scheduled layout is compiled, too, if it promises no more than the best compiled one times this.
_CLOSE = 1.01
# Times this, if no layout with its rematerialisation was compiled: their ratios of cycles to rooflines differ by up to
# so much.
_UNLEARNT = 1.05
# Two are compiled before the ratio is known, if the second promises no more than this times the first.
_SECOND = 1.08
# A layout whose corrected estimate passes the memory by up to this much is still tried: the compiler decides.
_MARGIN = 1.10
# Corrected estimates order the layouts of one mesh within about this much: what promises more is not compiled.
_WORTH = 1.05
# A mesh or rematerialisation whose best layout looks this much slower than the best of all is not compiled to learn how
# rough that is.
_FAR = 1.75


@dataclass(frozen=True)
class Compiled:
    """A layout with the results of the compiler and the time model.

    Attributes:
      seconds: of a step; None if it does not fit. By the cycles of the compiled program, or if it was only scheduled by
        its roofline and what cycles make of its relatives'.
      glance: with every operation at its roofline.
    """

    layout: Layout
    rough: Rough
    program: CompiledProgram
    seconds: float | None
    glance: float | None = None


@dataclass
class Search:
    """The result of a search.

    Attributes:
      considered: number of layouts. promising: those that may fit by rough estimate.
      compiled: those that were compiled, or do not fit by their schedule, in order of completion.
      scheduled: the others that fit by their schedule.
    """

    considered: int = 0
    promising: int = 0
    compiled: list[Compiled] = field(default_factory=list)
    scheduled: list[Compiled] = field(default_factory=list)

    @property
    def fitting(self) -> list[Compiled]:
        """The compiled ones that fit, the fastest first."""
        return sorted((c for c in self.compiled if c.seconds is not None), key=_seconds)


def _seconds(one: Compiled) -> float:
    return float("inf") if one.seconds is None else one.seconds


Progress = Callable[[str, Layout, CompiledProgram | None], None]


def search(
    work: Work,
    target: Target,
    seconds_of: Callable[[CompiledProgram, Layout], float],
    *,
    glance_of: Callable[[CompiledProgram, Layout], float] | None = None,
    limit_bytes: int,
    max_compiles: int = 8,
    workers: int | None = None,
    cache: ProgramCache | None = None,
    progress: Progress | None = None,
) -> Search:
    """Find the fastest layout that fits ``limit_bytes`` per device.

    Args:
      seconds_of: the time model of compiled programs. glance_of: that of scheduled ones, without cycles; by default the
        same.
      max_compiles: maximum number of layouts that the compiler sees. If it is 1, that one is compiled.
      progress: called with ``"start"`` or ``"done"``, the layout, and its result: once when it is scheduled, and again
        if it is compiled.

    Raises:
      CompilerMissingError, PlanError: as :func:`compile_programs`.
    """
    found = Search()
    rough = {layout: work.rough(layout, target) for layout in work.layouts(target)}
    found.considered = len(rough)
    # One compilation has to be of a layout that fits.
    likely = limit_bytes * (_MARGIN if max_compiles > 1 else 2 - _MARGIN)
    on_device = {k: r for k, r in rough.items() if k.offload == "none" and r.hbm_bytes <= likely}
    waiting = on_device or {k: r for k, r in rough.items() if r.hbm_bytes <= likely}
    found.promising = len(waiting)
    if not waiting and rough:
        # Rough figures may be wrong: the compiler has the last word on the least of them.
        least = min(rough, key=lambda k: rough[k].hbm_bytes)
        waiting = {least: rough[least]}

    def results(
        chosen: list[Layout], schedule: bool
    ) -> Generator[tuple[Layout, CompiledProgram], None, None]:
        def started(number: int) -> None:
            if progress is not None:
                progress("start", chosen[number], None)

        jobs = [work.job(layout, target) for layout in chosen]
        # Closed at once when something fails here: nothing goes on compiling behind a traceback.
        with contextlib.closing(
            compile_programs(jobs, cache=cache, workers=workers, started=started, schedule=schedule)
        ) as programs:
            for number, program in programs:
                yield chosen[number], program
                if progress is not None:
                    progress("done", chosen[number], program)

    def look(chosen: list[Layout], schedule: bool) -> list[Compiled]:
        seen = []
        with contextlib.closing(results(chosen, schedule)) as programs:
            for layout, program in programs:
                seconds = glance = None
                if program.memory is not None and program.memory.total <= limit_bytes:
                    glance = (glance_of or seconds_of)(program, layout)
                    seconds = seconds_of(program, layout) if program.complete else None
                one = Compiled(layout, rough[layout], program, seconds, glance)
                whole = program.complete or glance is None
                (found.compiled if whole else found.scheduled).append(one)
                seen.append(one)
        return seen

    _widen(waiting, limit_bytes, max_compiles, lambda chosen: look(chosen, max_compiles > 1))
    _complete(found, max_compiles, lambda chosen: look(chosen, False))
    return found


def _widen(
    rough: Mapping[Layout, Rough], limit: int, most: int, look: Callable[[list[Layout]], list[Compiled]]
) -> None:
    """Have layouts scheduled while one may be better than the best of them."""
    waiting = dict(rough)
    seen: list[Compiled] = []

    def have(chosen: list[Layout]) -> None:
        # What the schedules say is compared with one another, also where a compiled program is in the cache.
        seen.extend(replace(one, seconds=one.glance) for one in look(chosen))
        for layout in chosen:
            del waiting[layout]

    have(_first(waiting, most))
    while waiting and len(seen) < most:
        if all(c.program.status == "error" for c in seen):
            break  # it is not the layout that is wrong
        leader = min((c for c in seen if c.seconds is not None), key=_seconds, default=None)
        best = float("inf") if leader is None else _seconds(leader)
        promises = {k: _corrected(k, r, seen) for k, r in waiting.items()}
        chosen = [
            k
            for k in sorted(promises, key=lambda k: promises[k][0])
            if promises[k][0] < best * _WORTH
            and promises[k][1] <= limit * (_MARGIN if best == float("inf") else 1)
            and not _only_other_flags(k, leader, seen)
        ]
        if not chosen:
            break
        have(chosen[: min(2, most - len(seen))])


def _complete(found: Search, most: int, finish: Callable[[list[Layout]], list[Compiled]]) -> None:
    """Have scheduled layouts compiled while one may be better than the best compiled one."""

    def promised() -> list[Compiled]:
        ratios = [(c.layout, c.seconds / c.glance) for c in found.fitting if c.seconds and c.glance]
        return sorted(
            (replace(c, seconds=(c.glance or 0.0) * _ratio(c.layout, ratios)) for c in found.scheduled),
            key=_seconds,
        )

    compiled = 0
    while (promises := promised()) and compiled < most:
        if found.fitting:
            best, learnt = _seconds(found.fitting[0]), {c.layout.remat for c in found.fitting}
            chosen = [
                c
                for c in promises
                if _seconds(c) < best * (_CLOSE if c.layout.remat in learnt else _UNLEARNT)
            ][:2]
        else:
            # The second preferably with another rematerialisation or mesh, so that more is learnt from it.
            near = [c for c in promises[1:] if _seconds(c) <= _seconds(promises[0]) * _SECOND]
            near.sort(key=lambda c: _kind(c) == _kind(promises[0]))
            chosen = [promises[0], *near[:1]]
        if not (chosen := chosen[: most - compiled]):
            break
        layouts = [c.layout for c in chosen]
        found.scheduled = [c for c in found.scheduled if c.layout not in layouts]
        compiled += len(finish(layouts))
    found.scheduled = promised()


def _kind(one: Compiled) -> tuple[object, str]:
    return one.layout.mesh, one.layout.remat


def _first(waiting: Mapping[Layout, Rough], most: int) -> list[Layout]:
    """What is compiled before the rough order is believed: one layout of each mesh and of each rematerialisation.

    With and without stages, and with and without a divided sequence, rough figures have little in common: so first one
    of each of these.
    """
    ordered = sorted(waiting, key=lambda k: waiting[k].seconds)
    near = [k for k in ordered if waiting[k].seconds <= _FAR * waiting[ordered[0]].seconds]
    best = near[:1]
    remats: dict[str, Layout] = {}
    # On one mesh where there are such, so that they differ in little else.
    for layout in sorted(near, key=lambda k: k.mesh != best[0].mesh):
        remats.setdefault(layout.remat, layout)
    meshes: dict[object, Layout] = {}
    for layout in near:
        meshes.setdefault(layout.mesh, layout)
    kinds: dict[object, Layout] = {}
    for layout in near:
        kinds.setdefault((layout.stages > 1, layout.axis_sizes.get("context", 1) > 1), layout)
    several = list(dict.fromkeys([*kinds.values(), *meshes.values()]))[: max(1, most // 2)]
    return list(dict.fromkeys([*best, *remats.values(), *several]))[:most]


def _only_other_flags(layout: Layout, leader: Compiled | None, compiled: list[Compiled]) -> bool:
    """Whether it differs from a compiled one in nothing but the compiler's flags, and that one is not the best.

    Rough figures know nothing of flags, and often the program is the same: only the best is tried with others.
    """
    plain = replace(layout, flags=())
    alike = [c.layout for c in compiled if replace(c.layout, flags=()) == plain]
    return bool(alike) and (leader is None or leader.layout not in alike)


# What two layouts may have in common, the nearest relatives first.
_RELATIONS: tuple[Callable[[Layout], object], ...] = (
    lambda k: (k.mesh, k.parameters, k.optimizer, k.microbatches),
    lambda k: (k.mesh, k.parameters, k.optimizer),
    lambda k: k.mesh,
    lambda k: None,
)

Values = list[tuple[Layout, float]]


def _corrected(layout: Layout, rough: Rough, compiled: list[Compiled]) -> tuple[float, float]:
    """Seconds and bytes, by what the nearest relatives turned out to take against their own rough figures."""
    times = [(c.layout, c.seconds / c.rough.seconds) for c in compiled if c.seconds is not None]
    sizes = [
        (c.layout, size / c.rough.hbm_bytes)
        for c in compiled
        if (size := c.program.memory.total if c.program.memory else c.program.needed_bytes)
    ]
    return rough.seconds * _ratio(layout, times), rough.hbm_bytes * _ratio(layout, sizes)


def _ratio(layout: Layout, values: Values) -> float:
    """That of the nearest relatives with the same rematerialisation on this mesh; else of those with another one, by
    what that makes of it elsewhere."""
    alike = [(other, value) for other, value in values if other.remat == layout.remat]
    here = [(other, value) for other, value in alike if other.mesh == layout.mesh]
    by_change = [(other, value * _change(other.remat, layout.remat, values)) for other, value in values]
    for known in (here, by_change):
        for relation in _RELATIONS:
            if near := [value for other, value in known if relation(other) == relation(layout)]:
                return statistics.median(near)
    return 1.0


def _change(before: str, after: str, values: Values) -> float:
    """The ratio with one rematerialisation over that with another, on the meshes where both were compiled."""
    found = []
    for mesh in {k.mesh for k, _ in values}:
        of = {r: [v for k, v in values if (k.mesh, k.remat) == (mesh, r)] for r in (before, after)}
        if of[before] and of[after]:
            found.append(statistics.median(of[after]) / statistics.median(of[before]))
    return statistics.median(found) if found else 1.0
