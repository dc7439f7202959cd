"""Choose settings of the program for a plan: all of them compiled, together where several help."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.config import ModularModelConfig
from capibara.errors import CapibaraError
from capibara.plan.candidate import Candidate
from capibara.plan.compiler import CompiledProgram, ProgramCache
from capibara.plan.improvements import (
    Improvement,
    Progress,
    Proposal,
    Refused,
    proposal,
    try_proposals,
    worth_it,
)
from capibara.plan.program_settings import ProgramChange, program_changes

__all__ = ["SettingsChoice", "choose_settings"]


@dataclass(frozen=True, kw_only=True)
class SettingsChoice:
    """Settings of the program that a plan chose.

    Attributes:
      settings: ``key=value``, each an argument of ``capibara train``; empty if those of the configuration are the
        fastest.
      speed: tokens per second beside those of the configured settings, in the same layout: 1.1 is ten percent more.
      effects: what each chosen setting changes of the results, by name.
      tried: the settings that were compiled, alone and together, the fastest first.
      refused: those that do not fit, or do not compile.
      untried: why others were not compiled, by name.
      config: the configuration with the chosen settings. program: compiled with them; None if none was chosen.
    """

    settings: tuple[str, ...] = ()
    speed: float = 1.0
    effects: Mapping[str, str] = field(default_factory=dict)
    tried: tuple[Improvement, ...] = ()
    refused: tuple[Refused, ...] = ()
    untried: Mapping[str, str] = field(default_factory=dict)
    config: ModularModelConfig = field(repr=False)
    program: CompiledProgram | None = field(default=None, repr=False, compare=False)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "settings": list(self.settings),
            "speed": self.speed,
            "effects": dict(self.effects),
            "tried": [each.to_json() for each in self.tried],
            "refused": [each.to_json() for each in self.refused],
            "untried": dict(self.untried),
        }


def choose_settings(
    config: ModularModelConfig,
    best: Candidate,
    *,
    limit_bytes: int,
    keep: Collection[str] = (),
    cache: ProgramCache | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> SettingsChoice:
    """The settings of the program that give most tokens per second in a plan's layout.

    Every combination is scheduled, and compiled while it may be the fastest. What is chosen was compiled.

    Args:
      config: what was planned. best: its compiled candidate.
      limit_bytes: that a device may use.
      keep: names of settings that stay as they are.
      cache: of compiled results. workers: parallel compilations.
      progress: called with ``"start"`` or ``"done"``, the settings (an object whose text they are), and the compiled
        program.

    Raises:
      CompilerMissingError, CompilationError: as :func:`capibara.plan.compiler.compile_programs`.
    """
    others = [each for each in program_changes(config, best.layout) if each.name not in keep]
    asked = _combined(config, best, [each for each in others if not each.reason])
    found, refused = try_proposals(
        asked, best, limit_bytes=limit_bytes, most=1, cache=cache, workers=workers, progress=progress
    )
    untried = {each.name: each.reason for each in others if each.reason}
    tried = tuple(sorted(found, key=lambda one: -one.speed))
    if not (faster := worth_it(found)):
        return SettingsChoice(tried=tried, refused=tuple(refused), untried=untried, config=config)
    first = faster[0]
    names = {setting.partition("=")[0] for setting in first.settings}
    return SettingsChoice(
        settings=first.settings,
        speed=first.speed,
        effects={each.name: each.effect for each in others if each.name in names},
        tried=tried,
        refused=tuple(refused),
        untried=untried,
        config=next(each.config for each in asked if each.settings == first.settings),
        program=first.program,
    )


def _combined(config: ModularModelConfig, best: Candidate, changes: list[ProgramChange]) -> list[Proposal]:
    """Each change alone, and each set of several."""
    found = []
    for count in range(1, len(changes) + 1):
        for chosen in itertools.combinations(changes, count):
            merged = {key: value for each in chosen for key, value in each.change.items()}
            # What does not go together is not a proposal.
            with contextlib.suppress(CapibaraError):
                found.append(proposal(config, best.layout, "; ".join(each.words for each in chosen), merged))
    return found
