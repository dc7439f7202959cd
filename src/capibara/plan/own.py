"""A layout of the user's own, compiled and priced beside the one that a plan picks."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from capibara.config import ModularModelConfig
from capibara.config.overrides import apply_overrides, override_names
from capibara.errors import ConfigError
from capibara.hardware.topology import TopologyError, parse_topology
from capibara.plan.candidate import Candidate
from capibara.plan.errors import PlanError
from capibara.plan.narrowed import LAYOUT_SETTINGS
from capibara.plan.planned import read_planned
from capibara.plan.targets import Target
from capibara.plan.work import TrainWork, Work
from capibara.sharding import Layout

__all__ = ["OwnLayout", "no_host_memory", "read_layout", "why_not"]

_CHIPS = "tpu.num_chips"
# Settings that overrides() prints as well, and that follow from the others.
_DERIVED = ("tpu.enabled", _CHIPS)
_EXAMPLE = "tpu.topology=16x1 model.remat=dots"
# Figures of a candidate that are compared, in the order in which they are told.
_FIGURES = ("step_seconds", "hbm_bytes", "tokens_per_second", "usd_per_step", "usd_per_billion_tokens")


@dataclass(frozen=True)
class OwnLayout:
    """A layout given by hand.

    Attributes:
      layout: as it was given.
      candidate: with its memory, time and price; None if it cannot be compiled.
      reason: why it cannot run on the slice; empty if it can.
    """

    layout: Layout
    candidate: Candidate | None = None
    reason: str = ""

    def beside(self, pick: Candidate) -> dict[str, float]:
        """Figures over those of the pick, by name: 1.1 is ten percent more. Those that one of them lacks are left out.

        Names: ``step_seconds``, ``hbm_bytes``, ``tokens_per_second``, ``usd_per_step``, ``usd_per_billion_tokens``.
        """
        found = {}
        for name in _FIGURES:
            mine, theirs = getattr(self.candidate, name, None), getattr(pick, name)
            if mine is not None and theirs:
                found[name] = mine / theirs
        return found

    def to_json(self, pick: Candidate | None) -> dict[str, Any]:
        """Plain data; ``pick``: what it is compared with."""
        return {
            "layout": self.layout.to_json(),
            "overrides": self.layout.overrides(),
            "reason": self.reason or None,
            "candidate": None if self.candidate is None else self.candidate.to_json(),
            "beside_best": {} if pick is None else self.beside(pick),
        }


def read_layout(given: Layout | str | os.PathLike[str] | Iterable[str], task: Work) -> Layout:
    """A layout from what was given.

    Args:
      given: a layout; ``key=value`` settings, in a text quoted as for a shell or one by one; or the path of a lockfile
        or of the output of ``capibara plan --json``. Settings that are not given are the configuration's, as
        ``capibara train`` has them.
      task: the step that is planned.

    Raises:
      PlanError: a setting that is not one of a layout, settings for a step function, or an invalid file.
      ConfigError: an unknown setting, or an invalid value.
    """
    if isinstance(given, Layout) and not isinstance(task, TrainWork):
        return given
    words = _words(given)
    if not isinstance(task, TrainWork):
        raise PlanError(
            f"layout: got {words[0]!r:.100}, but a step function has no settings. Give a capibara.sharding.Layout"
        )
    names = override_names(words, ModularModelConfig)
    for name in names:
        if name not in (*LAYOUT_SETTINGS, *_DERIVED):
            raise PlanError(
                f"layout: {name} is not a setting of a layout, expected some of {', '.join(LAYOUT_SETTINGS)}. Change "
                "it in what is planned"
            )
    merged = apply_overrides(task.config.to_dict(), words, ModularModelConfig)[0]
    more = ["tpu.enabled=true"]
    if "tpu.topology" in names and _CHIPS not in names:
        with contextlib.suppress(TopologyError):  # the settings' own check says more
            more.append(f"{_CHIPS}={parse_topology(str(merged['tpu']['topology'])).size}")
    # Whether its rows divide is a question of the plan, not of what may be written.
    microbatches = merged["train"]["gradient_accumulation_steps"]
    if type(microbatches) is int and microbatches > 0:
        more.append(f"train.batch_size={microbatches}")
    return Layout.from_config(task.config.with_overrides([*words, *more]))


def _words(given: Any) -> list[str]:
    """``key=value`` settings."""
    if isinstance(given, Layout):
        return given.overrides()
    if isinstance(given, os.PathLike):
        return read_planned(given).layout.overrides()
    if isinstance(given, Mapping) or not isinstance(given, Iterable):
        raise PlanError(
            f"layout: got {given!r:.100}, expected a Layout, key=value settings as {_EXAMPLE!r}, or the path of a "
            "lockfile"
        )
    words = [str(each) for each in given] if not isinstance(given, str) else []
    if isinstance(given, str):
        try:
            words = shlex.split(given)
        except ValueError as error:
            raise PlanError(f"layout: got {given!r:.200}: {error}. Quote it as for a shell") from None
        if len(words) == 1 and "=" not in words[0]:
            return read_planned(words[0]).layout.overrides()
    if not words:
        raise PlanError(f"layout: got {given!r:.100}, expected key=value settings as {_EXAMPLE!r}")
    return words


def no_host_memory(target: Target) -> str:
    """Why nothing is offloaded on a target that does not plan the host's memory."""
    return (
        f"tpu.offload: a plan for {target} keeps all arrays on the {target.unit}s, since JAX does not know the host's "
        "memory of those that are only described. Leave it out, or pass tpu.offload=none"
    )


def why_not(task: Work, layout: Layout, target: Target) -> str:
    """Why a layout cannot divide the step over a slice; empty if it can."""
    if layout.num_devices != target.num_devices:
        return f"its mesh has {layout.num_devices} devices, and {target} has {target.num_devices}"
    if layout.offload != "none" and not target.plans_host_memory:
        return no_host_memory(target)
    if not isinstance(task, TrainWork):
        return ""
    from capibara.core.pipelined import (
        check_stages,
    )  # imports JAX, which figures without a program do not need
    from capibara.train.placement import Placement, check_axes

    length, parts = task.config.train.sequence_length, layout.axis_sizes.get("context", 1)
    try:
        check_axes(layout)
        Placement((), None, layout).check_rows(task.config.train.batch_size)
        if layout.stages > 1:
            check_stages(task.config, layout.stages)
    except ConfigError as error:
        return str(error)
    if length % parts:
        return f"train.sequence_length={length} must be a multiple of the {parts} devices along 'context'"
    return ""
