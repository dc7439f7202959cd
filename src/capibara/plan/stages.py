"""One stage of a pipeline as a model of its own, for figures without a program.

The devices of a stage hold its blocks, and embedding and head whole. They do what devices without stages do with a
model of so many blocks, once for every microbatch, and in ``p - 1`` ticks more nothing
(:mod:`capibara.ops.collective.pipeline`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from capibara.config import ModularModelConfig
from capibara.errors import ConfigError
from capibara.plan.errors import PlanError
from capibara.sharding import Layout

__all__ = ["can_have_stages", "kept_inputs", "stage_of", "ticks"]


def can_have_stages(config: ModularModelConfig, stages: int) -> bool:
    """Whether the model can be divided into so many equal stages."""
    whole: Any = config  # frozen, and so hashable
    try:
        _shortened(whole, stages)
    except PlanError:
        return False
    return True


def stage_of(config: ModularModelConfig, layout: Layout) -> tuple[ModularModelConfig, Layout]:
    """The configuration of one stage, and how it is sharded over the stage's devices; without stages the same.

    Raises:
      PlanError: the model cannot be divided into so many stages.
    """
    if layout.stages == 1:
        return config, layout
    mesh = tuple(pair for pair in layout.mesh if pair[0] != "pipeline") or (("data", 1),)
    whole: Any = config
    return _shortened(whole, layout.stages), replace(layout, mesh=mesh)


@lru_cache(maxsize=256)
def _shortened(config: Any, stages: int) -> ModularModelConfig:
    from capibara.core.pipelined import check_stages  # imports JAX, which the rest here does not need

    try:
        check_stages(config, stages)
    except ConfigError as error:
        raise PlanError(f"layout: {error}") from None
    return config.replace(model=config.model.replace(num_layers=config.model.num_layers // stages))


def ticks(layout: Layout) -> float:
    """How long a step takes against one in which no stage waits: ``(m + p - 1) / m``."""
    return 1 / (1 - layout.bubble)


def kept_inputs(layout: Layout) -> int:
    """Of how many microbatches the first stage has the input at one time: at most ``2 p - 1``, and what is dropped."""
    return 0 if layout.stages == 1 else min(layout.microbatches + 1, 2 * layout.stages - 1)
