"""Settings of a configuration that a plan may not choose, and what they would save: compiled, not guessed.

A plan chooses the layout. What is left are settings that change the model or its training a little: their authors have
to choose them. Each is compiled in the planned layout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.overrides import setting_text
from capibara.errors import CapibaraError
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, ProgramCache, compile_programs
from capibara.plan.program import read_program
from capibara.plan.program_settings import program_changes
from capibara.plan.targets import Target
from capibara.plan.time import predict_step
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

__all__ = [
    "Improvement",
    "Proposal",
    "Refused",
    "find_improvements",
    "proposal",
    "try_proposals",
    "worth_it",
]

# Elements of a row of a TPU's registers and matrix unit, and of the tiles of matrix products on GPUs (NVIDIA, "Matrix
# Multiplication Background User's Guide").
_LANES = 128
# Of the rate, what is at least worth a change.
_WORTH = 1.005
# What is scheduled may be so much faster than its schedule and its relative's cycles say.
_ROUGH = 1.02

# What is told of is the proposal, whose text are its settings.
Progress = Callable[[str, Any, CompiledProgram | None], None]


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change of settings that was compiled.

    Attributes:
      words: why it may help.
      settings: ``key=value``, each an argument of ``capibara plan`` and ``capibara train``.
      layout: in which it was compiled.
      hbm_bytes: of one device. seconds: predicted for one step, of so many ``tokens``.
      speed: tokens per second beside those of the plan: 1.1 is ten percent more.
      program: the compiled program.
    """

    words: str
    settings: tuple[str, ...]
    layout: Layout
    hbm_bytes: int
    seconds: float
    tokens: int
    speed: float
    program: CompiledProgram | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "change": self.words,
            "settings": list(self.settings),
            "layout": self.layout.to_json(),
            "hbm_bytes": self.hbm_bytes,
            "step_seconds": self.seconds,
            "tokens_per_step": self.tokens,
            "speed": self.speed,
        }


@dataclass(frozen=True)
class Proposal:
    """Settings to compile.

    Attributes:
      words: why they may help.
      settings: ``key=value``.
      config: with them. layout: in which it is compiled.
    """

    words: str
    settings: tuple[str, ...]
    config: ModularModelConfig
    layout: Layout

    @property
    def keys(self) -> set[str]:
        """Names of the settings."""
        return {setting.partition("=")[0] for setting in self.settings}

    def __str__(self) -> str:
        count = self.layout.microbatches
        return f"{' '.join(self.settings)}, {count} microbatch{'' if count == 1 else 'es'}"


@dataclass(frozen=True)
class Refused:
    """A proposal without a compiled program that fits.

    Attributes:
      settings: ``key=value``.
      needed_bytes: of a device, if it does not fit. message: the compiler's, if that failed.
    """

    settings: tuple[str, ...]
    needed_bytes: int | None = None
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"settings": list(self.settings), "needed_bytes": self.needed_bytes, "message": self.message}


def find_improvements(
    config: ModularModelConfig,
    best: Candidate,
    *,
    limit_bytes: int,
    most: int = 3,
    fixed: Collection[str] = (),
    cache: ProgramCache | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Improvement, ...]:
    """The changes of settings that give most tokens per second in a plan's layout, the best first.

    Args:
      config: what was planned. best: its compiled candidate.
      limit_bytes: that a device may use.
      most: how many are named, of all that help. All proposals are scheduled, and the most promising compiled: each
        that is named was.
      fixed: settings that must not change, such as sizes of a published model.
      cache: of compiled results. workers: parallel compilations.
      progress: called with ``"start"`` or ``"done"``, a proposal (its text are its settings), and the compiled program.

    Raises:
      CompilerMissingError, CompilationError: as :func:`capibara.plan.compiler.compile_programs`.
    """
    asked = [each for each in _proposals(config, best.layout, best.target) if not each.keys & set(fixed)]
    found, _ = try_proposals(
        asked, best, limit_bytes=limit_bytes, most=most, cache=cache, workers=workers, progress=progress
    )
    return tuple(worth_it(found)[:most])


def try_proposals(
    asked: Sequence[Proposal],
    best: Candidate,
    *,
    limit_bytes: int,
    most: int,
    cache: ProgramCache | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Improvement], list[Refused]]:
    """Have proposals scheduled, and compiled while one may be among the best.

    Args: as of :func:`find_improvements`; ``asked``: the proposals.

    Returns:
      Those that were compiled and fit, in order of completion; and those that do not fit, or do not compile.

    Raises:
      CompilerMissingError, CompilationError: as :func:`capibara.plan.compiler.compile_programs`.
    """
    target = best.target
    works = [TrainWork(each.config) for each in asked]
    jobs = [work.job(each.layout, target) for work, each in zip(works, asked, strict=True)]
    rate = _rate(best.tokens, best.step_seconds)
    refused: list[Refused] = []

    def seconds_of(program: CompiledProgram, layout: Layout, cycles: bool) -> float:
        facts = read_program(program.text)
        return predict_step(facts, target, layout.mesh, places=program.coordinates, cycles=cycles).seconds

    # What cycles make of the roofline's time, of the same model in the same layout.
    ratio = 1.0
    if best.program is not None and (glance := seconds_of(best.program, best.layout, False)):
        ratio = best.step_seconds / glance

    def look(chosen: Sequence[int], schedule: bool) -> Iterator[tuple[int, Improvement]]:
        def started(number: int) -> None:
            if progress is not None:
                progress("start", asked[chosen[number]], None)

        with contextlib.closing(
            compile_programs(
                [jobs[number] for number in chosen],
                cache=cache,
                workers=workers,
                started=started,
                schedule=schedule,
            )
        ) as results:
            for place, program in results:
                number = chosen[place]
                each, tokens = asked[number], works[number].tokens
                if progress is not None:
                    progress("done", each, program)
                if program.memory is None or program.memory.total > limit_bytes:
                    needed = program.needed_bytes if program.memory is None else program.memory.total
                    refused.append(Refused(each.settings, needed, program.message))
                    continue
                seconds = seconds_of(program, each.layout, program.complete)
                seconds *= 1.0 if program.complete else ratio
                one = Improvement(
                    words=each.words,
                    settings=each.settings,
                    layout=each.layout,
                    hbm_bytes=program.memory.total,
                    seconds=seconds,
                    tokens=tokens,
                    speed=_rate(tokens, seconds) / rate,
                    program=program,
                )
                yield number, one

    found: list[Improvement] = []
    promises: list[tuple[float, int]] = []
    for number, one in look(range(len(asked)), True):
        if one.program is not None and one.program.complete:
            found.append(one)
        else:
            promises.append((one.speed, number))
    promises.sort(reverse=True)
    while promises:
        named = worth_it(found)[:most]
        least = named[-1].speed if len(named) == most else _WORTH
        if promises[0][0] * _ROUGH < least:
            break
        now, promises = promises[:2], promises[2:]
        found += [one for _, one in look([number for _, number in now], False)]
    return found, refused


def worth_it(found: Collection[Improvement]) -> list[Improvement]:
    """Those that help, the best first, each change once: of its layouts, the fastest."""
    best: dict[tuple[str, ...], Improvement] = {}
    for one in sorted(found, key=lambda one: -one.speed):
        if one.speed >= _WORTH:
            best.setdefault(one.settings, one)
    return list(best.values())


def _rate(tokens: int | None, seconds: float) -> float:
    """Tokens per second."""
    return (tokens or 0) / seconds if seconds else 0.0


def _proposals(config: ModularModelConfig, layout: Layout, target: Target) -> Iterator[Proposal]:
    for words, changed, where in _settings(config, layout, target):
        # What does not go together, such as a dtype that a layer does not have, is not a proposal.
        with contextlib.suppress(CapibaraError):
            yield proposal(config, where, words, changed)


def proposal(config: ModularModelConfig, layout: Layout, words: str, changed: Mapping[str, Any]) -> Proposal:
    """A configuration with some settings changed.

    Raises:
      ConfigError: they do not go together.
    """
    settings = tuple(f"{key}={setting_text(value)}" for key, value in changed.items())
    return Proposal(words, settings, ModularModelConfig.from_dict(config.to_dict(), settings), layout)


def _settings(
    config: ModularModelConfig, layout: Layout, target: Target
) -> Iterator[tuple[str, dict[str, Any], Layout]]:
    model, train = config.model, config.train
    if config.precision.compute_dtype == "float32":
        yield (
            "products of bfloat16, sums of float32",
            {"precision.compute_dtype": "bfloat16"},
            layout,
        )
    if model.residual == "accumulate" and config.precision.compute_dtype != config.precision.accumulate_dtype:
        yield "a residual stream of the dtype of products", {"model.residual": "compute"}, layout
    for each in program_changes(config, layout):
        if each.proposed:
            yield each.words, dict(each.change), layout
    what = "TPU" if target.platform == "tpu" else "GPU"
    tile = _LANES * layout.axis_sizes.get("model", 1)
    for key, size in (("model.vocab_size", model.vocab_size), ("model.mlp_dim", model.mlp_dim)):
        if size is not None and size % tile:
            yield f"sizes that fill a {what}'s tiles of {_LANES}", {key: -(-size // tile) * tile}, layout
    twice = {"train.batch_size": 2 * train.batch_size}
    yield (
        "twice the batch in twice the microbatches: gradients are exchanged half as often",
        twice,
        replace(layout, microbatches=2 * layout.microbatches),
    )
    yield "twice the batch in as many microbatches: larger products", twice, layout
