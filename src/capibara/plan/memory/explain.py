"""Why a step does not fit a device's memory, and what would make it fit.

The compiler refuses a program that is too large with a single figure. Here its own report is used to show what the
memory peak consists of: the largest buffers, where in the model they come from, and how much of them is padding. Then
remedies are compiled, with their memory and predicted time: only remedies that the compiler accepted are listed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_programs
from capibara.plan.compiler.limits import within
from capibara.plan.errors import CompilationError, PlanError
from capibara.plan.memory.estimate import MemoryEstimate, estimate_memory
from capibara.plan.memory.naming import named
from capibara.plan.memory.remedies import Change, changes
from capibara.plan.program import read_program
from capibara.plan.sizes import limit_text, size_text
from capibara.plan.targets import Target
from capibara.plan.time import predict_step
from capibara.plan.validation import check_counts, limit_of
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

__all__ = ["OomReport", "Remedy", "explain_oom"]

Progress = Callable[[str, Layout, CompiledProgram | None], None]


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that was compiled and fits.

    Attributes:
      words: the change, as text.
      layout, target: what to run, and where.
      hbm_bytes: of one device, by the compiler.
      seconds: predicted for one step; chip_seconds: times the number of chips, which determines the price.
    """

    words: str
    layout: Layout
    target: Target
    hbm_bytes: int
    seconds: float

    @property
    def chip_seconds(self) -> float:
        """Seconds of a step times chips."""
        return self.seconds * self.target.num_chips

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "change": self.words,
            "layout": self.layout.to_json(),
            "slice": self.target.text,
            "chips": self.target.num_chips,
            "hbm_bytes": self.hbm_bytes,
            "seconds": self.seconds,
            "chip_seconds": self.chip_seconds,
        }


@dataclass(frozen=True, kw_only=True)
class OomReport:
    """Why a layout does not fit, and what would.

    Attributes:
      layout, target: as requested.
      needed_bytes: of one device, by the compiler. limit_bytes: memory that a device may use.
      buffers: the largest at the memory peak, as returned by :func:`capibara.plan.compiler.buffers.read_buffers`,
        with a source for those created by the compiler itself.
      estimate: the estimated memory, by kind.
      remedies: changes that were compiled and fit, the fastest step first.
      refused: changes that were compiled and do not fit, or did not compile, as text.
    """

    layout: Layout
    target: Target
    needed_bytes: int
    limit_bytes: int
    buffers: tuple[Mapping[str, Any], ...]
    estimate: MemoryEstimate
    remedies: tuple[Remedy, ...]
    refused: tuple[str, ...] = ()

    @property
    def padding_bytes(self) -> int:
        """Padding of the listed buffers to tiles."""
        return sum(each["padding"] for each in self.buffers)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "layout": self.layout.to_json(),
            "slice": self.target.text,
            "needed_bytes": self.needed_bytes,
            "limit_bytes": self.limit_bytes,
            "padding_bytes": self.padding_bytes,
            "buffers": [dict(each) for each in self.buffers],
            "estimate": self.estimate.to_json(),
            "remedies": [each.to_json() for each in self.remedies],
            "refused": list(self.refused),
        }

    def __str__(self) -> str:
        lines = [
            f"{self.layout} on {self.target} takes {size_text(self.needed_bytes)} a device; "
            f"{limit_text(self.target, self.limit_bytes)}.",
            "",
            "The largest buffers at the memory peak:",
        ]
        lines += [f"  {line}" for line in _rows(self.buffers, 10)]
        if self.target.pads_to_tiles:
            lines.append(
                f"Padding to tiles takes {size_text(self.padding_bytes)} of the {len(self.buffers)} largest."
            )
        none = "No change that was compiled fits." if self.refused else "No change was compiled."
        lines += ["", "What fits (compiled):" if self.remedies else none]
        for each in self.remedies:
            lines.append(
                f"  {each.words}: {size_text(each.hbm_bytes)}, {each.seconds:.3g} s a step on "
                f"{each.target.num_chips} {each.target.unit}s"
            )
        if self.refused:
            lines.append(f"Does not fit either: {'; '.join(self.refused)}")
        return "\n".join(lines)


def explain_oom(
    config: ModularModelConfig,
    layout: Layout,
    target: Target,
    *,
    program: CompiledProgram | None = None,
    remedies: int = 3,
    max_compiles: int = 5,
    memory_limit_gb: float | None = None,
    workers: int | None = None,
    cache: ProgramCache | str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> OomReport:
    """Compile a layout that does not fit, list what fills the memory, and compile possible remedies in parallel.

    Args:
      config: as for training. layout, target: what does not fit.
      program: its compilation, if available.
      remedies: number of remedies to find. max_compiles: maximum number of changes to compile.
      memory_limit_gb: GiB that a device may use, if less than it has; also applies to remedies.
      workers: parallel compilations.
      cache: cache of compiled results, or its folder.
      progress: called with ``"start"`` or ``"done"``, a layout, and the compiled program.

    Raises:
      PlanError: the layout fits, or an argument is invalid.
      CompilerMissingError: the compiler is not installed.
      CompilationError: the compiler failed for another reason than memory.
    """
    for name, value in (("remedies", remedies), ("max_compiles", max_compiles)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"{name}={value!r} must be an integer from 0")
    if workers is not None:
        check_counts(workers=workers)
    limit = limit_of(target, memory_limit_gb)
    estimate = estimate_memory(config, layout, target)
    limited = within(layout, limit, target)
    tries = _Tries(
        TrainWork(config),
        limit,
        cache if isinstance(cache, ProgramCache) else ProgramCache(cache),
        workers,
        progress,
    )
    if program is not None:
        _check_refused(program, layout, target, limit)
    candidates = _spread(changes(config, limited, target, limit))[:max_compiles]
    found: list[Remedy] = []
    refused: list[str] = []
    # As many at a time as are still wanted, so that which changes are named does not depend on the workers.
    while program is None or (candidates and len(found) < remedies):
        several, candidates = candidates[: remedies - len(found)], candidates[remedies - len(found) :]
        asked = [] if program is not None else [(limited, target, True)]
        results = tries.compile([*asked, *((each.layout, each.target, False) for each in several)])
        if program is None:
            program = results.pop(0)
        for change, result in zip(several, results, strict=True):
            remedy = _remedy(change, result, limit)
            found += [remedy] if isinstance(remedy, Remedy) else []
            refused += [remedy] if isinstance(remedy, str) else []
    needed = program.memory.total if program.memory else program.needed_bytes or estimate.total
    return OomReport(
        layout=layout,
        target=target,
        needed_bytes=needed,
        limit_bytes=limit,
        buffers=named(program.buffers),
        estimate=estimate,
        remedies=tuple(sorted(found, key=lambda each: each.seconds)),
        refused=tuple(refused),
    )


@dataclass(frozen=True)
class _Tries:
    """What is compiled for one report."""

    work: TrainWork
    limit: int
    cache: ProgramCache
    workers: int | None
    progress: Progress | None

    def compile(self, asked: list[tuple[Layout, Target, bool]]) -> list[CompiledProgram]:
        """Programs of layouts, in their order; the one that is explained has to be refused.

        Raises:
          PlanError, CompilationError: it is not.
        """

        def started(number: int) -> None:
            if self.progress is not None:
                self.progress("start", asked[number][0], None)

        jobs = [self.work.job(layout, target) for layout, target, _ in asked]
        done: dict[int, CompiledProgram] = {}
        with contextlib.closing(
            compile_programs(jobs, cache=self.cache, workers=self.workers, started=started)
        ) as results:
            for number, program in results:
                layout, target, explained = asked[number]
                if explained:
                    _check_refused(program, layout, target, self.limit)
                done[number] = program
                if self.progress is not None:
                    self.progress("done", layout, program)
        return [done[number] for number in range(len(asked))]


def _check_refused(program: CompiledProgram, layout: Layout, target: Target, limit: int) -> None:
    if program.status == "error":
        raise CompilationError(f"the step was refused for another reason than memory: {program.message}")
    if program.memory is not None and program.memory.total <= limit:
        raise PlanError(
            f"{layout} fits {target}: it takes {size_text(program.memory.total)} of {size_text(limit)}"
        )


def _spread(candidates: tuple[Change, ...]) -> list[Change]:
    """The candidates with the kinds of change mixed: the best of each kind before the second of any."""
    groups: dict[str, list[Change]] = {}
    for each in candidates:
        groups.setdefault(_kind(each), []).append(each)
    order = []
    while any(groups.values()):
        order += [group.pop(0) for group in groups.values() if group]
    return order


def _kind(change: Change) -> str:
    for word in ("chips", "GPUs", "hosts", "along model", "remat", "microbatches", "shard"):
        if word in change.words:
            return word
    return change.words


def _remedy(change: Change, program: CompiledProgram, limit: int) -> Remedy | str:
    """What a change gives, or in words that it does not help."""
    if program.status == "error":  # one remedy less, not the whole report
        return f"{change.words} (not for its memory: {program.message[:200]})"
    if program.memory is None or program.memory.total > min(limit, change.target.usable_hbm_bytes):
        return change.words
    time = predict_step(
        read_program(program.text), change.target, change.layout.mesh, places=program.coordinates
    )
    return Remedy(
        words=change.words,
        layout=change.layout,
        target=change.target,
        hbm_bytes=program.memory.total,
        seconds=time.seconds,
    )


def _rows(buffers: tuple[Mapping[str, Any], ...], most: int) -> list[str]:
    """A line a buffer; equal ones together."""
    counted: dict[tuple[Any, ...], int] = {}
    for each in buffers:
        where = each.get("place") or each["op_name"] or ""
        key = (each["bytes"], each["shape"], each["kind"], where, each["padding"])
        counted[key] = counted.get(key, 0) + 1
    lines = []
    for (size, shape, kind, where, padding), count in list(counted.items())[:most]:
        times = f"{count} × " if count > 1 else ""
        waste = f", {padding / size:.0%} padding" if padding > 0.02 * size else ""
        lines.append(f"{times}{size_text(size)} {shape or '(no shape)'} {kind}{waste}: {where or 'unnamed'}")
    return lines
