"""``Plan``: what a step needs on a slice or a host, and the best ways found to run it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from capibara.config import ModularModelConfig
from capibara.plan.attribution import Attribution, attribute
from capibara.plan.candidate import Candidate
from capibara.plan.errors import PlanError
from capibara.plan.improvements import Improvement
from capibara.plan.memory.least import LeastMemory
from capibara.plan.own import OwnLayout
from capibara.plan.planned import train_command
from capibara.plan.settings_choice import SettingsChoice
from capibara.plan.slices import Slice
from capibara.plan.targets import Target
from capibara.sharding import Layout

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """What a step needs on a slice or host, and the best ways found to run it.

    Attributes:
      work: a one-line description.
      target: the slice, or host of GPUs; with several slices, one of them.
      slices: how many slices there are.
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
      settings_choice: the settings of the program that were chosen for the best candidate, if that was asked for.
      config: the configuration that was planned, with the chosen settings of the program; None for a step function.
      config_name: the file or packaged name that it comes from, if that is known; with ``base`` a model's folder.
      base: the settings with which that model is trained if nothing else is said.
    """

    work: str
    target: Target
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
    settings_choice: SettingsChoice | None = None
    slices: int = 1

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
            found = attribute(self.best.program, self.target, self.best.layout.mesh)
        except PlanError:
            return None
        exchange = self.best.exchange
        return found if exchange is None else found.and_waiting("gradients between slices", exchange.seconds)

    @property
    def chip(self) -> str:
        """The chip's name in the catalogue."""
        return self.target.chip.name.removesuffix("-core")

    @property
    def num_chips(self) -> int:
        """Chips of all slices, or GPUs of the host."""
        return self.target.num_chips * self.slices

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
        return self.best.overrides()

    def command(self) -> str | None:
        """The command line that trains the best candidate; None if the source of the configuration is not known.

        Raises:
          ConfigError: the file of the configuration no longer exists.
        """
        if self.config is None or self.config_name is None or not self.candidates:
            return None
        return train_command(self.config, self.best.training_layout, self.config_name, self.base)

    def to_json(self) -> dict[str, Any]:
        """Plain data for scripts."""
        return {
            "work": self.work,
            "topology": self.target.text,
            "slice": self.target.slice_name,
            "slices": self.slices,
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
            "settings_choice": None if self.settings_choice is None else self.settings_choice.to_json(),
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

    def export(self, format: str) -> str:
        """The best candidate as a file of another program; see :func:`capibara.plan.export.export_layout`.

        Args:
          format: ``"maxtext"`` or ``"jax"``.

        Raises:
          PlanError: an unknown format; MaxText cannot express a setting; or it is the plan of a step function, whose
            shardings are ``work.specs(found.best.layout)``.
        """
        from capibara.plan.export import check_export, export_layout

        if self.config is None:
            raise PlanError(
                "only the plan of a configuration can be exported: a step function's shardings are "
                "work.specs(found.best.layout)"
            )
        check_export(self.config, self.target, format)
        assert isinstance(self.target, Slice)  # it was checked
        best = self.best
        return export_layout(
            self.config,
            best.training_layout,
            self.target,
            format,
            slices=self.slices,
            coordinates=best.coordinates,
        )

    def __str__(self) -> str:
        from capibara.plan.report.table import plan_text

        return plan_text(self)
