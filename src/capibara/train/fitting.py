"""The loop of :meth:`capibara.train.TpuDistributedTrainer.train`, and what it did."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from capibara.errors import ConfigError
from capibara.train.checkpoint import CheckpointStore
from capibara.train.errors import DataError, DivergedError
from capibara.train.feed import rows_of
from capibara.train.processes import Processes
from capibara.train.scaling.autoscaler import active_scaler

if TYPE_CHECKING:
    from capibara.train.distributed import TpuDistributedTrainer

__all__ = ["FitReport", "first_save", "make_way", "run_batches", "sizes_for"]

_STEPS_AHEAD = 2


@dataclass(frozen=True)
class FitReport:
    """What :meth:`TpuDistributedTrainer.train` did.

    Attributes:
      steps: optimizer steps that it took; step: those of the trainer in all.
      losses: of each of its steps.
      metrics: of the last step.
      validation: of the last evaluation; None without validation data.
      dropped_rows: rows of batches that the mesh does not divide, which were left out.
      seconds: from the first step to the last, with compilation.
    """

    steps: int
    step: int
    losses: tuple[float, ...] = field(repr=False)
    metrics: Mapping[str, float]
    validation: Mapping[str, float] | None
    dropped_rows: int
    seconds: float

    @property
    def loss(self) -> float:
        """Of the last step."""
        return self.losses[-1]


def run_batches(
    trainer: TpuDistributedTrainer,
    batches: Iterable[Any],
    *,
    steps: int | None,
    on_step: Callable[[int, Mapping[str, float]], None] | None,
    save: tuple[str | os.PathLike[str], int | None] | None,
    look: Callable[[], None] = lambda: None,
) -> tuple[list[float], dict[str, float], int]:
    """Take a step for each batch, reading the loss of one only when the next ones are already queued.

    Args:
      steps: stop after so many; None: with the last batch.
      on_step: called with the number and the metrics of each step.
      save: the folder of checkpoints, and the number of steps between them.
      look: called before each step.

    Returns:
      ``(losses, metrics of the last step, rows left out)``.

    Raises:
      DataError: there are no batches. DivergedError: a loss, or gradients, are not finite. ScalingError: the active
        scaler finds no devices to go on with; the trainer's state is that of the last step. ConfigError: a scaler is
        active in one of several processes.
    """
    scaler, scaling = active_scaler(), None
    if scaler is not None and Processes.here().count > 1:
        raise ConfigError(
            "managed_scaling(): TpuDistributedTrainer moves among the devices of one process, and there are "
            f"{Processes.here().count}. Use capibara.train.train, which moves by a checkpoint"
        )
    losses: list[float] = []
    pending: deque[tuple[int, dict[str, jax.Array]]] = deque()
    last: dict[str, float] = {}
    full = dropped = 0

    def counts(devices: Sequence[Any]) -> tuple[int, ...]:
        return trainer.device_counts(full, devices)

    def finish() -> None:
        nonlocal last
        number, metrics = pending.popleft()
        with nullcontext() if scaling is None else scaling.meter.waiting():
            last = {name: float(value) for name, value in jax.device_get(metrics).items()}
        for name, what in (("loss", "loss"), ("grad_norm", "norm of the gradients")):
            if not math.isfinite(last.get(name, 0.0)):
                raise DivergedError(
                    f"the {what} became {last[name]} at step {number}. Nothing of that is saved. Lower the learning "
                    "rate.",
                    step=number,
                )
        losses.append(last["loss"])
        if on_step is not None:
            on_step(number, last)

    for batch in batches:
        look()
        arrays = trainer.arrays(batch)
        rows = rows_of(arrays)
        if rows < full and not trainer.divides(rows):
            dropped += rows  # the rest at the end of a data set
            continue
        full = max(full, rows)
        if scaler is not None and scaling is None:
            scaling = scaler.controller(trainer.placement.devices, counts)
        if scaling is None:
            metrics = trainer.step(arrays)
        else:
            if scaling.meter.drains:
                while pending:
                    finish()
            if scaling.asks(trainer.step_count):
                while pending:
                    finish()
                trainer.move(scaling.devices, rows=full)
                scaling.moved()
                if rows < full and not trainer.divides(rows):
                    dropped += rows
                    continue
            metrics = scaling.meter.run(trainer.step, arrays)
        pending.append((trainer.step_count, metrics))
        while len(pending) > _STEPS_AHEAD:
            finish()
        if save is not None and save[1] and trainer.step_count % save[1] == 0:
            while pending:  # a checkpoint of a run that has diverged would replace the good ones
                finish()
            if scaling is not None:
                scaling.meter.pause()
            trainer.save(save[0], wait=False)
            if scaling is not None:
                scaling.meter.resume()
        if len(losses) + len(pending) == steps:
            break
    while pending:
        finish()
    if not losses:
        raise DataError("data: there is not one batch in it.")
    return losses, last, dropped


def make_way(store: CheckpointStore, step: int, skipped: Collection[int]) -> None:
    """Refuse to save into a folder that holds later steps: they would stay, and the new checkpoint would go.

    Args:
      step: that of the new checkpoint.
      skipped: damaged checkpoints that :meth:`TpuDistributedTrainer.restore` passed over, which are renamed.

    Raises:
      ConfigError: it names the newest step, in every process.
    """

    def look() -> None:
        later = [each for each in store.steps() if each > step]
        if not later:
            return
        if set(later) <= set(skipped):
            store.set_aside(after=step)
            return
        raise ConfigError(
            f"directory: {str(store.folder)!r} has the checkpoint of step {later[-1]}, which is later than step {step} "
            "to be saved; restore() would take that one. Call restore() first to continue from it, give another "
            "folder, or move the later checkpoints away"
        )

    Processes.here().first_does(look)


def first_save(taken: int, steps: int | None, save_every: int | None) -> int | None:
    """The first step that a run saves, as far as it is known before it begins."""
    known = []
    if steps is not None:
        known.append(taken + steps)
    if save_every:
        known.append((taken // save_every + 1) * save_every)
    return min(known, default=None)


def sizes_for(given: Mapping[str, Any], data: Any) -> dict[str, Any]:
    """The sizes that a validation set is asked for, of those that training was given."""
    if callable(getattr(data, "validation_batches", None)):
        return {name: given[name] for name in ("batch_size", "sequence_length")}
    in_memory = isinstance(data, tuple | Mapping) or hasattr(data, "shape")
    return {"batch_size": given["batch_size"]} if in_memory else {}
