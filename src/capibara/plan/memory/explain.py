"""Why a step does not fit a device's memory, and what would make it fit.

The compiler refuses a program that is too large with one number. Here its own report says what the fullest moment
consists of: the largest buffers, what they are, where in the model they come from, and what of them is padding. Then
remedies are compiled, each with what it takes and the time that is predicted for it: a remedy is only named if the
compiler took it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_program
from capibara.plan.errors import CompilationError, PlanError
from capibara.plan.layout import Layout
from capibara.plan.memory.estimate import MemoryEstimate, estimate_memory
from capibara.plan.memory.naming import named
from capibara.plan.memory.remedies import Change, changes
from capibara.plan.program import read_program
from capibara.plan.slices import Slice
from capibara.plan.time import predict_step
from capibara.plan.work import TrainWork

__all__ = ["OomReport", "Remedy", "explain_oom"]

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """A change that was compiled and fits.

    Attributes:
      words: what is changed.
      layout, target: what to run, and where.
      hbm_bytes: of one device, as the compiler has it.
      seconds: predicted for one step; chip_seconds: times the chips, what is paid for.
    """

    words: str
    layout: Layout
    target: Slice
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
    """Why a layout does not fit, and what does.

    Attributes:
      layout, target: what was asked for.
      needed_bytes: of one device, as the compiler says. limit_bytes: what a device has.
      buffers: the largest of the fullest moment, as :func:`capibara.plan.compiler.buffers.read_buffers` gives them,
        with a place for those that the compiler itself made.
      estimate: the arithmetic's view of the same, by kind.
      remedies: changes that were compiled and fit, the fastest step first.
      refused: changes that were compiled and do not fit, or did not compile, in words.
    """

    layout: Layout
    target: Slice
    needed_bytes: int
    limit_bytes: int
    buffers: tuple[Mapping[str, Any], ...]
    estimate: MemoryEstimate
    remedies: tuple[Remedy, ...]
    refused: tuple[str, ...] = ()

    @property
    def padding_bytes(self) -> int:
        """What tiles add to the listed buffers."""
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
            f"{self.layout} on {self.target} takes {self.needed_bytes / _GIB:.2f} GiB a device; a device has "
            f"{self.limit_bytes / _GIB:.2f} GiB.",
            "",
            "The largest buffers in the fullest moment:",
        ]
        lines += [f"  {line}" for line in _rows(self.buffers, 10)]
        lines.append(
            f"Padding to tiles takes {self.padding_bytes / _GIB:.2f} GiB of the {len(self.buffers)} largest."
        )
        none = "No change that was compiled fits." if self.refused else "No change was compiled."
        lines += ["", "What fits (compiled):" if self.remedies else none]
        for each in self.remedies:
            lines.append(
                f"  {each.words}: {each.hbm_bytes / _GIB:.2f} GiB, {each.seconds:.3g} s a step on "
                f"{each.target.num_chips} chips"
            )
        if self.refused:
            lines.append(f"Does not fit either: {'; '.join(self.refused)}")
        return "\n".join(lines)


def explain_oom(
    config: ModularModelConfig,
    layout: Layout,
    target: Slice,
    *,
    program: CompiledProgram | None = None,
    remedies: int = 3,
    max_compiles: int = 5,
    cache: ProgramCache | str | os.PathLike[str] | None = None,
) -> OomReport:
    """Compile a layout that does not fit, list what fills the memory, and compile what could help.

    Args:
      config: as for training. layout, target: what does not fit.
      program: its compilation with ``buffers=True``, if there is one already.
      remedies: how many changes to look for. max_compiles: how many to try for them.
      cache: of compiled results, or its folder.

    Raises:
      PlanError: the layout fits, or an argument is not what it should be.
      CompilerMissingError: the TPU compiler is not installed.
      CompilationError: the compiler failed for another reason than memory.
    """
    for name, value in (("remedies", remedies), ("max_compiles", max_compiles)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise PlanError(f"{name}={value!r} must be a whole number from 0")
    store = cache if isinstance(cache, ProgramCache) else ProgramCache(cache)
    estimate = estimate_memory(config, layout, target)
    if program is None:
        program = compile_program(TrainWork(config).job(layout, target, buffers=True), cache=store)
    if program.status == "error":
        raise CompilationError(f"the step was refused for another reason than memory: {program.message}")
    limit = target.usable_hbm_bytes
    if program.memory is not None and program.memory.total <= limit:
        raise PlanError(
            f"{layout} fits {target}: it takes {program.memory.total / _GIB:.2f} of {limit / _GIB:.2f} GiB"
        )
    needed = program.memory.total if program.memory else program.needed_bytes or estimate.total
    found, refused = _try(config, _spread(changes(config, layout, target)), remedies, max_compiles, store)
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
    for word in ("chips", "hosts", "along model", "remat", "microbatches", "shard"):
        if word in change.words:
            return word
    return change.words


def _try(
    config: ModularModelConfig, candidates: list[Change], wanted: int, most: int, store: ProgramCache
) -> tuple[list[Remedy], list[str]]:
    found: list[Remedy] = []
    refused: list[str] = []
    for change in candidates[:most]:
        if len(found) == wanted:
            break
        try:
            program = compile_program(TrainWork(config).job(change.layout, change.target), cache=store)
        except CompilationError as error:  # one remedy less, not the whole report
            refused.append(f"{change.words} (not for its memory: {str(error)[:200]})")
            continue
        if program.status == "error":
            refused.append(f"{change.words} (not for its memory: {program.message[:200]})")
            continue
        if program.memory is None or program.memory.total > change.target.usable_hbm_bytes:
            refused.append(change.words)
            continue
        time = predict_step(
            read_program(program.text), change.target, change.layout.mesh, places=program.coordinates
        )
        found.append(
            Remedy(
                words=change.words,
                layout=change.layout,
                target=change.target,
                hbm_bytes=program.memory.total,
                seconds=time.seconds,
            )
        )
    return found, refused


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
        lines.append(
            f"{times}{size / _GIB:.2f} GiB {shape or '(no shape)'} {kind}{waste}: {where or 'unnamed'}"
        )
    return lines
