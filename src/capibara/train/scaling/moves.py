"""How a run of :func:`capibara.train.train` moves to other devices between two steps.

The state is copied from the old devices to the new ones, which need not be others. If the old ones cannot be read any
more, or belong to several processes, it comes from the newest checkpoint. Batches stay as they are: their order is a
function of their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.errors import JaxRuntimeError

from capibara.hardware import build_mesh
from capibara.sharding import Layout
from capibara.train.checkpoint_files import first_line
from capibara.train.errors import ScalingError
from capibara.train.processes import Processes
from capibara.train.progress import Reporter
from capibara.train.run import Run
from capibara.train.scaling.autoscaler import Controller, active_scaler
from capibara.train.state import TrainState

__all__ = ["Moves", "move_state", "move_trainer"]


def move_state(state: TrainState, described: TrainState) -> TrainState:
    """The state on the devices, and with the shardings, of another one that has no arrays.

    Equivalent JAX: ``jax.device_put(state, shardings)``.
    """
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, described))


# What a move to other devices replaces in a trainer.
_PLACED = (
    "layout",
    "mesh",
    "placement",
    "model",
    "optimizer",
    "schedule",
    "_described",
    "_evaluations",
    "_feeder",
    "_programs",
    "_state",
    "_step",
    "_trained",
)


def move_trainer(trainer: Any, devices: Sequence[Any], layout: Layout) -> None:
    """Move a :class:`~capibara.train.distributed.TpuDistributedTrainer` to other devices, or leave it as it was.

    Args:
      layout: its layout there.

    Raises:
      ScalingError: the state cannot be read from its devices any more.
    """
    names, sizes = zip(*layout.mesh, strict=True)
    before = {name: vars(trainer)[name] for name in _PLACED if name in vars(trainer)}
    places: dict[Any, dict[str, Any]] = vars(trainer).setdefault("_places", {})
    if trainer._state is not None:  # and so a model; coming back compiles nothing
        old = (_numbers(trainer.placement.devices), trainer.layout)
        places[old] = {name: value for name, value in before.items() if name != "_state"}
    try:
        if (known := places.get((_numbers(devices), layout))) is not None:
            vars(trainer).update(known)
        else:
            trainer._place(build_mesh(sizes, names, devices), layout)
        if trainer._state is not None:
            trainer._state = jax.block_until_ready(move_state(trainer._state, trainer._described))
    except Exception as error:
        vars(trainer).update(before)
        if not isinstance(error, JaxRuntimeError):
            raise
        raise ScalingError(
            f"the state cannot be read from its devices any more: {first_line(error)}. Make a trainer for the devices "
            "that are left, and restore() a checkpoint"
        ) from error


def _numbers(devices: Iterable[Any]) -> tuple[int, ...]:
    return tuple(device.id for device in devices)


class Moves:
    """Moves a run whenever the active scaler says so.

    Attributes:
      controller: what the loop asks; None: nobody scales this run, or another process asks.
    """

    def __init__(self, controller: Controller | None, processes: Processes, reporter: Reporter) -> None:
        self.controller, self._processes, self._reporter = controller, processes, reporter
        self._moved = False
        # By the numbers of their devices: a run that comes back compiles nothing.
        self._runs: dict[tuple[int, ...], Run] = {}
        self._programs: dict[tuple[int, ...], tuple[Any, Any]] = {}

    @classmethod
    def of(cls, run: Run, processes: Processes, reporter: Reporter) -> Moves:
        """For a run, as the ``managed_scaling()`` context says in which it is."""
        scaler, controller = active_scaler(), None
        if scaler is not None:
            made = scaler.controller(run.placement.devices, run.device_counts, note=reporter.note)
            controller = made if processes.first else None
        return cls(controller, processes, reporter)

    def compiled(self, run: Run, state: TrainState, number: int) -> tuple[Any, Any]:
        """:meth:`Run.compiled` for the batch of this number, once for the same devices."""
        key = _numbers(run.placement.devices)
        if key not in self._programs:
            self._runs[key] = run
            self._programs[key] = run.compiled(state, run.put_batch(number))
        return self._programs[key]

    def just_moved(self) -> bool:
        """Whether the run has moved since this was last called."""
        moved, self._moved = self._moved, False
        return moved

    @property
    def takes_failures(self) -> bool:
        """Whether :meth:`after` may go on after a failure of a device."""
        return self.controller is not None and self._processes.count == 1

    def carry(self, state: TrainState, moved: Run) -> TrainState | None:
        """The state on the devices of a run that has moved; None if it has to come from the newest checkpoint."""
        if self._processes.count > 1:
            return None
        try:
            return jax.block_until_ready(move_state(state, moved.state))
        except JaxRuntimeError as error:
            self._reporter.warn(
                f"the state cannot be read from its devices ({first_line(error)}): going on from the newest checkpoint"
            )
            return None

    def after(self, failure: RuntimeError, run: Run, step: int) -> Run:
        """The run on those of its devices that still answer after a failure.

        Raises:
          JaxRuntimeError: ``failure`` itself, if all devices answer.
          ScalingError: it cannot go on with those.
        """
        assert self.controller is not None
        self.controller.after(failure, step)
        return self.to(run)

    def to(self, run: Run) -> Run:
        """The run on the devices that were decided."""
        ids: Any = self._processes.first_does(
            lambda: None if self.controller is None else list(_numbers(self.controller.devices))
        )
        known = {device.id: device for device in jax.devices(run.placement.devices[0].platform)}
        moved = self._runs.get(tuple(ids)) or run.on_devices([known[number] for number in ids])
        if self.controller is not None:
            self.controller.moved()
        self._moved = True
        layout = moved.placement.layout
        self._reporter.note(
            f"moved to {len(moved.placement.devices)} devices" + ("" if layout is None else f": {layout}")
        )
        return moved
