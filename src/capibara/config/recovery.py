"""``[recovery]``: what a training run does by itself when something goes wrong."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from capibara.config.sections import Section

__all__ = ["RecoverySection"]


class RecoverySection(Section):
    """``[recovery]``: what a run does by itself when a loss diverges, a step hangs or a device computes wrongly."""

    max_skips: Annotated[int, Field(ge=0, le=100_000)] = Field(
        default=3,
        description="batches left out between two checkpoints since the loss diverged on them; 0: the run ends at once",
    )
    spike_sigmas: Annotated[float, Field(ge=0.0, le=1e6)] = Field(
        default=0.0,
        description="a loss so many standard deviations above the recent ones has diverged; 0: no finite one has",
    )
    spike_window: Annotated[int, Field(ge=8, le=65_536)] = Field(
        default=64, description="how many losses are the recent ones"
    )
    stuck_seconds: Annotated[float, Field(ge=0.0, le=1e9)] = Field(
        default=10.0,
        description="after so long without a step (or ten times the longest) stacks are printed; 0: never",
    )
    exit_when_stuck: bool = Field(
        default=False, description="end the process then (code 75), for what supervises it to start it again"
    )
    replay_every: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        default=0, description="steps between two that are computed twice and compared bit by bit; 0: none"
    )
