"""Compile the most promising layout, correct the rough estimates by the result, and repeat.

Rough estimates rank a few hundred layouts in milliseconds; the compiler takes half a minute for one. So the search
compiles the best of several meshes and of each rematerialisation first, corrects the rough time and memory of every
other layout by the results of its nearest compiled relatives, and continues while a layout that is not compiled yet may
be better than the best compiled one. All results were compiled.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_programs
from capibara.plan.targets import Target
from capibara.plan.work import Rough, Work
from capibara.sharding import Layout

__all__ = ["Compiled", "Search", "search"]

# A layout whose corrected estimate passes the memory by up to this much is still tried: the compiler decides.
_MARGIN = 1.10
# Corrected estimates order the layouts of one mesh within about this much: what promises more is not compiled.
_WORTH = 1.05
# A mesh or rematerialisation whose best layout looks this much slower than the best of all is not compiled to learn how
# rough that is.
_FAR = 1.75


@dataclass(frozen=True)
class Compiled:
    """A layout with the results of the compiler and the time model; ``seconds`` is None if it does not fit."""

    layout: Layout
    rough: Rough
    program: CompiledProgram
    seconds: float | None


@dataclass
class Search:
    """The result of a search.

    Attributes:
      considered: number of layouts. promising: those that may fit by rough estimate. compiled: in order of
        completion.
    """

    considered: int = 0
    promising: int = 0
    compiled: list[Compiled] = field(default_factory=list)

    @property
    def fitting(self) -> list[Compiled]:
        """Those that fit, the fastest first."""
        return sorted((c for c in self.compiled if c.seconds is not None), key=lambda c: c.seconds or 0.0)


Progress = Callable[[str, Layout, CompiledProgram | None], None]


def search(
    work: Work,
    target: Target,
    seconds_of: Callable[[CompiledProgram, Layout], float],
    *,
    limit_bytes: int,
    max_compiles: int = 8,
    workers: int | None = None,
    cache: ProgramCache | None = None,
    progress: Progress | None = None,
) -> Search:
    """Find the fastest layout that fits ``limit_bytes`` per device.

    Args:
      seconds_of: the time model.
      max_compiles: maximum number of layouts to compile.
      progress: called with ``"start"`` or ``"done"``, the layout, and its result.

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
    waiting = dict(waiting)

    def compile_now(chosen: list[Layout]) -> None:
        def started(number: int) -> None:
            if progress is not None:
                progress("start", chosen[number], None)

        jobs = [work.job(layout, target) for layout in chosen]
        # Closed at once when something fails here: nothing goes on compiling behind a traceback.
        with contextlib.closing(
            compile_programs(jobs, cache=cache, workers=workers, started=started)
        ) as results:
            for number, program in results:
                layout = chosen[number]
                seconds = None
                if program.memory is not None and program.memory.total <= limit_bytes:
                    seconds = seconds_of(program, layout)
                found.compiled.append(Compiled(layout, waiting[layout], program, seconds))
                if progress is not None:
                    progress("done", layout, program)
        for layout in chosen:
            del waiting[layout]

    compile_now(_first(waiting, max_compiles))
    while waiting and len(found.compiled) < max_compiles:
        if all(c.program.status == "error" for c in found.compiled):
            break  # it is not the layout that is wrong
        leader = next(iter(found.fitting), None)
        best = float("inf") if leader is None or leader.seconds is None else leader.seconds
        promises = {k: _corrected(k, r, found.compiled) for k, r in waiting.items()}
        chosen = [
            k
            for k in sorted(promises, key=lambda k: promises[k][0])
            if promises[k][0] < best * _WORTH
            and promises[k][1] <= limit_bytes * (_MARGIN if best == float("inf") else 1)
            and not _only_other_flags(k, leader, found.compiled)
        ]
        if not chosen:
            break
        room = max_compiles - len(found.compiled)
        compile_now(chosen[: min(2, room)])
    return found


def _first(waiting: Mapping[Layout, Rough], most: int) -> list[Layout]:
    """What is compiled before the rough order is believed: one layout of each mesh and of each rematerialisation."""
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
    several = list(meshes.values())[: max(1, most // 2)]
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
