"""A run: settings, devices, model and data, and what follows from these alone, before any folder is looked at.

It is built once, and everything that trains, resumes, validates or lowers a step asks it: the step that a plan compiles
is that of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from capibara.config import ModularModelConfig
from capibara.core.encoders import require_decoder
from capibara.core.float64 import check_float64
from capibara.errors import ConfigError
from capibara.sharding import Layout, resized
from capibara.train.optimizer import build_optimizer, learning_rate_schedule
from capibara.train.pipelines import check_pipeline
from capibara.train.placement import Placement, device_counts
from capibara.train.protocols import Batch, Batches, DataSource, Model, Optimizer
from capibara.train.state import TrainState
from capibara.train.step import make_eval_step, make_train_step, microbatch
from capibara.train.trainable import joined

__all__ = ["Run"]


@dataclass(frozen=True, eq=False)
class Run:
    """What is trained, on what, where.

    Attributes:
      config: the settings.
      placement: the devices, and the sharding of values over them.
      model: compiled for the placement's mesh, if it can be.
      data: what it trains on; None for a step that is only compiled.
      transformation: an optimizer of one's own, in place of the one of the settings.
      given: the model before it was compiled for the mesh.
    """

    config: ModularModelConfig
    placement: Placement
    model: Model
    data: DataSource | None = None
    transformation: Optimizer | None = None
    given: Model | None = None

    @classmethod
    def build(
        cls,
        config: ModularModelConfig,
        model: Model,
        data: DataSource,
        devices: Sequence[Any] | None = None,
        optimizer: Optimizer | None = None,
        *,
        elastic: bool = False,
    ) -> Run:
        """Place the model on the devices and check that settings, model and data go together.

        Args:
          devices: by default all local ones; see :meth:`Placement.of`, also for ``elastic``.
          optimizer: by default that of the settings.

        Raises:
          ConfigError: float64 without JAX's 64-bit mode, an encoder, devices or a vocabulary that are too few.
          DataError: the text is too short for one sequence.
        """
        check_float64(config, "training")
        require_decoder(config.model, "training")
        placement = Placement.of(config, devices, elastic=elastic)
        _check_vocabulary(config, data)
        run = cls(config, placement, _compiled_for(model, placement), data, optimizer, model)
        # What is wrong with them is said now, before anything is written.
        _ = run.validation, run.batches, run.optimizer
        if config.checkpoint.keep_best and not run.validation:
            raise ConfigError(
                "checkpoint.keep_best=true compares validations, and the data has none. Hold out a part of it, or pass "
                "checkpoint.keep_best=false"
            )
        return run

    @property
    def microbatch_rows(self) -> int:
        """Sequences of one microbatch."""
        return self.config.train.batch_size // self.config.train.gradient_accumulation_steps

    def device_counts(self, devices: Sequence[Any]) -> tuple[int, ...]:
        """How many of these devices the run could use."""
        layout = None if self.placement.layout is None else Layout.from_config(self.config)
        return device_counts(layout, self.microbatch_rows, devices)

    def on_devices(self, devices: Sequence[Any]) -> Run:
        """The same run on exactly these devices, as many as :meth:`device_counts` allows: with the same batches, in the
        same order."""
        if self.placement.layout is None:
            placement = Placement.choose(self.microbatch_rows, devices)
        else:
            layout = resized(Layout.from_config(self.config), self.microbatch_rows, len(devices))
            placement = Placement.planned(layout, devices)
        given = self.model if self.given is None else self.given
        moved = replace(self, placement=placement, model=_compiled_for(given, placement))
        # What was read of them, or looked up for them, stays.
        vars(moved).update(batches=self.batches, validation=self.validation)
        return moved

    @cached_property
    def batches(self) -> Batches:
        """What it trains on.

        Raises:
          DataError: the text is too short for one sequence.
        """
        train = self.config.train
        return self.source.batches(
            batch_size=train.batch_size, sequence_length=train.sequence_length, seed=train.seed
        )

    @cached_property
    def validation(self) -> list[Batch]:
        """The batches of every validation, cut into microbatches where a layout has no room for more."""
        train = self.config.train
        whole = self.source.validation_batches(
            batch_size=train.batch_size, sequence_length=train.sequence_length, max_batches=train.eval_batches
        )
        return self.placement.cut(whole, train.batch_size)

    @cached_property
    def schedule(self) -> Callable[[Any], Any] | None:
        """Step → learning rate; None if an optimizer of one's own keeps it to itself."""
        return None if self.transformation is not None else learning_rate_schedule(self.config)

    @cached_property
    def optimizer(self) -> Optimizer:
        """The gradient transformation: one's own, or that of the settings."""
        if self.transformation is not None:
            return self.transformation
        return build_optimizer(self.config, param_axes=getattr(self.model, "param_axes", None))

    @cached_property
    def state(self) -> TrainState:
        """The state as ``jax.ShapeDtypeStruct`` with shardings."""
        return self.placement.describe_state(self.model, self.optimizer, ema=self.ema is not None)

    @property
    def ema(self) -> float | None:
        """The decay of the parameters' moving average; None: there is none."""
        return self.config.train.ema or None

    def validated(self, state: TrainState) -> Any:
        """The parameters that are validated: the averaged ones if the settings say so."""
        return joined(state.ema, state.params) if self.config.train.validate_ema else state.params

    @property
    def shardings(self) -> TrainState | None:
        """Of the state, where a layout fixes them."""
        if self.placement.layout is None:
            return None
        return jax.tree.map(lambda leaf: leaf.sharding, self.state)

    @cached_property
    def train_step(self) -> jax.stages.Wrapped:
        """See :func:`capibara.train.step.make_train_step`."""
        return make_train_step(
            self.model, self.optimizer, schedule=self.schedule, shardings=self.shardings, ema=self.ema
        )

    @cached_property
    def eval_step(self) -> jax.stages.Wrapped:
        """See :func:`capibara.train.step.make_eval_step`."""
        return make_eval_step(self.model)

    def compiled(self, state: TrainState, batch: dict[str, jax.Array]) -> tuple[Any, Any]:
        """The step and the validation, compiled for a state and a batch on the devices, so that the first step
        compiles nothing."""
        options = self.placement.compiler_options or None
        step, evaluate = self.train_step.lower(state, batch).compile(options), self.eval_step
        if not self.validation:
            return step, evaluate
        first = self.placement.put_batch(self.validation[0])
        return step, evaluate.lower(self.validated(state), state.model_state, first).compile(options)

    def put_batch(self, step: int) -> dict[str, jax.Array]:
        """The batch of one step on the devices: arrays ``[microbatches, rows, length + 1]``."""
        parts = self.config.train.gradient_accumulation_steps
        return self.placement.put_batch(microbatch(self.batches.batch(step), parts))

    def initial_state(self, params: Any = None) -> TrainState:
        """The state before the first step, on the devices; without parameters these are drawn from the seed."""
        return self.placement.make_state(
            self.model,
            self.optimizer,
            seed=self.config.train.seed,
            params=params,
            ema=self.ema is not None,
        )

    @property
    def source(self) -> DataSource:
        """Its data.

        Raises:
          ConfigError: there is none.
        """
        if self.data is None:
            raise ConfigError("this run has no data: it was built to compile its step. Give data=")
        return self.data


def _compiled_for(model: Model, placement: Placement) -> Model:
    """A model that can be compiled for the mesh runs its kernels on each device's part."""
    check_pipeline(model, placement.mesh)
    on_mesh: Callable[..., Model] | None = getattr(model, "on_mesh", None)
    if placement.mesh is None or on_mesh is None:
        return model
    return on_mesh(placement.mesh, placement.rules)


def _check_vocabulary(config: ModularModelConfig, data: DataSource) -> None:
    highest = data.highest
    if highest >= config.model.vocab_size:
        needed = max(256, data.tokenizer.vocab_size)
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is too small for this text: it has the {data.unit} "
            f"{highest}. Use model.vocab_size={needed}, which holds every {data.unit}."
        )
