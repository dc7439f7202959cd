"""``TpuDistributedTrainer``: train a model of any kind over a mesh, a batch, an epoch or a run at a time.

It is a face of the same parts as ``capibara train``: :class:`~capibara.train.placement.Placement` shards the state,
:func:`~capibara.train.step.make_train_step` is the step, :class:`~capibara.train.checkpoint.CheckpointStore` holds it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from capibara.compose.errors import ComposeError
from capibara.errors import ConfigError
from capibara.sharding import Layout, resized
from capibara.train import extras
from capibara.train.errors import DataError
from capibara.train.feed import Feeder, batches_of, rows_of, to_arrays
from capibara.train.fitting import FitReport, first_save, run_batches, sizes_for
from capibara.train.frameworks import WithLoss, as_model, unwrapped
from capibara.train.keeping import Keeper
from capibara.train.losses import parts_of
from capibara.train.options import (
    asynchronous_options,
    check_axes,
    chosen_optimizer,
    offload_policy,
    training_mesh,
    with_recomputing,
)
from capibara.train.placement import Placement, device_counts
from capibara.train.saved import items_of, restore_state
from capibara.train.scaling.moves import move_trainer
from capibara.train.state import TrainState
from capibara.train.step import make_train_step

__all__ = ["FitReport", "TpuDistributedTrainer"]


class TpuDistributedTrainer:
    """Trains a model over a mesh of devices: TPUs, GPUs, or a laptop's processor.

    Equivalent JAX: ``jax.jit(step, donate_argnums=0, out_shardings=…)`` around ``jax.value_and_grad`` and an optax
    update, with a ``NamedSharding`` for each array.

    Args:
      model: a ``ModularCapibaraModel``; a composed model, compiled or not; a module of Flax (Linen or NNX) or Equinox;
        a pair of functions ``(init, apply)``; or any :class:`capibara.train.protocols.Model`.
      mesh: a ``jax.sharding.Mesh``, such as from ``create_training_mesh``; by default all devices along ``data``. The
        axes ``data``, ``fsdp`` and ``expert`` shard the batch, ``fsdp`` parameters too, ``model`` (or ``tensor``)
        heads, feed-forward and vocabulary, ``expert`` experts, ``context`` the positions of each sequence; ``pipeline``
        divides the blocks into stages.
      gradient_accumulation_steps: parts that each batch is split into, processed one after the other; the update is
        that of the whole batch. They are the microbatches of a pipeline: with many it idles less (``layout.bubble``).
      use_gradient_checkpointing: compute activations again in the backward pass instead of keeping them: block by block
        (:mod:`capibara.train.rematerialise`).
      async_gradient_communication: let collectives run while the device computes, by options of the compiler.
      activation_offloading: keep the results of matrix products in the host's memory until the backward pass, and
        compute the rest again. On a CPU, whose memory is the host's, the program only says so.
      optimizer_sharding: shard the optimizer's state over the data axes, although the parameters are not (ZeRO, stage
        1).
      optimizer: an ``optax.GradientTransformation``, or ``"adamw"``, ``"lion"``, ``"adafactor"``, ``"muon"`` or
        ``"sgd"``; by default that of the model's configuration, otherwise AdamW.
      learning_rate: of a named optimizer: a number, or a function of the step; by default 1e-3.
      weight_decay, max_grad_norm: of a named optimizer; by default 0.0 and no clipping.
      loss: ``(outputs, targets) ->`` one loss for each target, or their mean; by default the model's own, otherwise the
        cross-entropy.
      ema_decay: also keep an exponential moving average of the parameters, with this decay (``0.999``).
      shard_parameters: shard parameters over the data axes (FSDP); by default if the mesh has an axis ``fsdp``.
      param_axes: logical names of the parameters' dimensions, nested like them, for models that have none. Without,
        only the largest dimension of each is sharded, over data axes.
      params: the parameters to begin with; by default drawn from ``seed``, or those of a module that has some.
      seed: of new parameters, dropout and the order of arrays in memory.

    Raises:
      ConfigError: a model that is not known, a mesh axis along which nothing would be sharded, or an option that the
        devices do not support; the message says which and why.
    """

    def __init__(
        self,
        model: Any,
        mesh: Any = None,
        gradient_accumulation_steps: int = 1,
        use_gradient_checkpointing: bool = False,
        async_gradient_communication: bool = False,
        activation_offloading: bool = False,
        optimizer_sharding: bool = False,
        *,
        optimizer: Any = None,
        learning_rate: float | Callable[[Any], Any] | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
        loss: Callable[[Any, Any], Any] | None = None,
        ema_decay: float | None = None,
        shard_parameters: bool | None = None,
        param_axes: Any = None,
        params: Any = None,
        seed: int = 0,
    ) -> None:
        extras.optax()
        flags = {
            "use_gradient_checkpointing": use_gradient_checkpointing,
            "async_gradient_communication": async_gradient_communication,
            "activation_offloading": activation_offloading,
            "optimizer_sharding": optimizer_sharding,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ConfigError(f"{name}: got {flag!r}, expected True or False")
        if loss is not None and not callable(loss):
            raise ConfigError(f"loss: got {loss!r}, expected a function of (outputs, targets)")
        if ema_decay is not None and not (isinstance(ema_decay, float) and 0 < ema_decay < 1):
            raise ConfigError(f"ema_decay: got {ema_decay!r}, expected a number between 0 and 1, as 0.999")
        self.mesh = training_mesh(mesh)
        sizes = tuple(zip(self.mesh.axis_names, self.mesh.devices.shape, strict=True))
        if shard_parameters is None:
            shard_parameters = dict(sizes).get("fsdp", 1) > 1
        self.layout = Layout(
            mesh=sizes,
            parameters="sharded" if shard_parameters else "replicated",
            optimizer="sharded" if optimizer_sharding else "as parameters",
            remat="full" if use_gradient_checkpointing else "none",
            microbatches=gradient_accumulation_steps,
        )
        self._first_layout = self.layout
        device = self.mesh.devices.flat[0]
        self._options = asynchronous_options(device) if async_gradient_communication else {}
        self._policy = offload_policy(device) if activation_offloading else None
        self._flags, self._loss, self._axes, self._given = flags, loss, param_axes, model
        self._named = {
            "optimizer": optimizer,
            "learning_rate": learning_rate,
            "weight_decay": weight_decay,
            "max_grad_norm": max_grad_norm,
        }
        self.seed, self.ema_decay = seed, ema_decay
        self._first_params = params
        self._state: TrainState | None = None
        self._example: Any = None
        self._waiting: Exception | None = None
        self._taken = 0
        self._keeper = Keeper()
        self._place(self.mesh, self.layout, alone=self.mesh.size == 1)

    # ---- the model and its state --------------------------------------------------------------------------

    def _place(self, mesh: Any, layout: Layout, *, alone: bool = False) -> None:
        """Use these devices from now on; ``alone``: one, without a mesh."""
        self.mesh, self.layout = mesh, layout
        self.placement = Placement((mesh.devices.flat[0],), None) if alone else Placement.over(mesh, layout)
        self._feeder = Feeder(self.placement, layout)
        self._programs: dict[Any, Any] = {}
        self._evaluations: dict[str, Any] = {}
        self._build(self._example)

    def _build(self, example: Any) -> None:
        """Make the model and its optimizer, if the shapes of the inputs are known as far as it needs them."""
        model: Any = as_model(self._given, loss=self._loss, axes=self._axes, example=example)
        check_axes(model, self.mesh, named=self._axes is not None)
        if self._policy is not None and self.layout.stages > 1:
            raise ConfigError(
                "activation_offloading=True: a stage of a pipeline keeps only its inputs, and computes the rest again. "
                "Leave it out"
            )
        try:
            jax.eval_shape(lambda: model.init(0))
        except (ConfigError, ComposeError) as error:
            if example is not None:
                raise
            self._waiting = error  # until there are inputs
            return
        self._waiting, self._example = None, example
        # Blocks that Capibara's own model computes again itself.
        inner = unwrapped(model)
        config: Any = getattr(inner, "config", None)
        own_blocks = hasattr(inner, "backend") and hasattr(config, "with_overrides")
        if own_blocks:
            remat = config.model.remat
            if self._policy is not None:
                remat = "none"
            elif self._flags["use_gradient_checkpointing"] and remat == "none":
                remat = "full"
            if remat != config.model.remat:
                changed = config.with_overrides({"model.remat": remat})
                inner = type(inner)(changed, mesh=inner.mesh, rules=inner.backend.rules)
                model = inner if self._loss is None else WithLoss(inner, self._loss)
        if self.placement.mesh is not None and (on_mesh := getattr(model, "on_mesh", None)) is not None:
            model = on_mesh(self.placement.mesh, self.placement.rules)
        self.model: Any = model
        again = self._policy is not None or (self._flags["use_gradient_checkpointing"] and not own_blocks)
        self._trained: Any = with_recomputing(model, self._policy) if again else model
        self.optimizer, self.schedule = chosen_optimizer(self._given, model, **self._named)
        shardings = None
        self._described = self.placement.describe_state(model, self.optimizer, ema=self.ema_decay is not None)
        if self.placement.layout is not None:
            shardings = jax.tree.map(lambda leaf: leaf.sharding, self._described)
        self._step = make_train_step(
            self._trained, self.optimizer, schedule=self.schedule, shardings=shardings, ema=self.ema_decay
        )

    def init(self, batch: Any) -> TpuDistributedTrainer:
        """Make parameters from the shapes of a batch, for models whose parameters depend on them."""
        if self._waiting is not None:
            batch = self.arrays(batch)
            rows = rows_of(batch) // self.layout.microbatches
            inputs = parts_of(batch).inputs if "tokens" not in batch else batch
            self._build(
                jax.tree.map(lambda x: jax.ShapeDtypeStruct((max(1, rows), *x.shape[1:]), _dtype(x)), inputs)
            )
        if self._state is None:
            self._state = self._first_state()
        return self

    def _first_state(self) -> TrainState:
        params = self._first_params
        if params is None:
            # Of a module that has its own; a model for a mesh is another object than the one that was given.
            params = getattr(self._given, "given", getattr(self.model, "given", None))
        if params is not None:
            params = jax.tree.map(jnp.copy, params)  # the step donates them
        return self.placement.make_state(
            self.model, self.optimizer, seed=self.seed, params=params, ema=self.ema_decay is not None
        )

    @property
    def state(self) -> TrainState:
        """All that the step reads and writes, on the devices. The next step donates it: copy what you keep.

        Raises:
          ConfigError: the model's parameters depend on its inputs, and there was no batch yet.
        """
        if self._state is None:
            if self._waiting is not None:
                raise ConfigError(
                    f"the parameters depend on the inputs: call trainer.init(batch) first ({self._waiting})"
                )
            self.init({})
        assert self._state is not None
        return self._state

    @property
    def params(self) -> Any:
        """The parameters as they are now."""
        return self.state.params

    @property
    def step_count(self) -> int:
        """Optimizer steps taken so far."""
        return self._taken

    def trained(self, *, ema: bool = False) -> Any:
        """The model with the parameters as they are now: in the form in which it was given.

        Args:
          ema: with the averaged ones.

        Returns:
          A ``ModularCapibaraModel`` or a module of Equinox or NNX with parameters; for other models the parameters.
        """
        params = jax.tree.map(jnp.copy, self._evaluated(ema))
        state = jax.tree.map(jnp.copy, self.state.model_state)
        if hasattr(self.model, "finish"):
            return self.model.finish(params, state)
        inner = unwrapped(self.model)
        if hasattr(type(inner), "params") and hasattr(inner, "on_mesh") and hasattr(inner, "backend"):
            model = type(inner)(inner.config, mesh=inner.mesh, rules=inner.backend.rules)
            model.params, model.state = params, state
            model.pretrained, model.tokenizer_files = self._given.pretrained, self._given.tokenizer_files
            return model
        return params

    def _evaluated(self, ema: bool) -> Any:
        if not ema:
            return self.state.params
        if self.ema_decay is None:
            raise ConfigError(
                "ema=True: this trainer keeps no average. Pass ema_decay=0.999 when you make it"
            )
        from capibara.train.trainable import joined

        return joined(self.state.ema, self.state.params)

    # ---- other devices ------------------------------------------------------------------------------------

    def device_counts(self, rows: int, devices: Sequence[Any]) -> tuple[int, ...]:
        """How many of these devices :meth:`move` could use for batches of so many rows, in ascending order."""
        return device_counts(self._first_layout, rows // self.layout.microbatches, devices)

    def move(self, devices: Sequence[Any], *, rows: int) -> TpuDistributedTrainer:
        """Go on on exactly these devices: more, fewer or others. The next step is compiled for them.

        The axes ``data`` and ``fsdp`` of the mesh change their sizes, the others only if there are too few devices
        (:func:`capibara.sharding.resized`). Losses are those of the old mesh, up to the order of sums.

        Args:
          devices: as many as :meth:`device_counts` allows.
          rows: of the batches that follow.

        Raises:
          ConfigError: another number of devices. ScalingError: the state cannot be read from its devices any more; the
            trainer is as it was. :meth:`restore` reads a checkpoint on a trainer that is made for other devices.
        """
        move_trainer(
            self, devices, resized(self._first_layout, rows // self.layout.microbatches, len(devices))
        )
        return self

    # ---- steps --------------------------------------------------------------------------------------------

    def step(self, batch: Any) -> dict[str, jax.Array]:
        """One optimizer step.

        Args:
          batch: tokens ``int [rows, length + 1]`` or a dict with them for language models; ``(inputs, targets)``,
            ``(inputs, targets, weights)`` or a dict with these keys for others. Of all processes together; each of
            them is given the same.

        Returns:
          Float32 scalars: ``loss``, ``grad_norm`` before clipping, and what the model reports. They may still be in
          computation: ``float(…)`` waits.

        Raises:
          DataError: the rows are not a multiple of microbatches × devices along the data axes, or the batch does not
            fit the model.
        """
        arrays = self.arrays(batch)
        self.init(arrays)
        placed = self._feeder.put(arrays)
        self._state, metrics = self._compiled(placed)(self._state, placed)
        self._taken += 1
        return metrics

    train_step = step

    def divides(self, rows: int) -> bool:
        """Whether a batch of so many rows can be trained on."""
        return self._feeder.divides(rows)

    def arrays(self, batch: Any) -> dict[str, Any]:
        """A batch as nested dicts of arrays by the names that the model's loss knows."""
        arrays = to_arrays(batch)
        if isinstance(arrays, dict):
            return arrays
        return {"tokens" if hasattr(self._given, "flops_per_token") else "inputs": arrays}

    def _compiled(self, placed: Any) -> Any:
        leaves, tree = jax.tree.flatten(placed)
        key = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._programs:
            lowered = self._step.lower(self._state, placed)
            try:
                self._programs[key] = lowered.compile(self._options or None)
            except jax.errors.JaxRuntimeError as error:
                if "No such compile option" not in str(error):
                    raise
                raise ConfigError(
                    f"async_gradient_communication=True: the compiler of {self.mesh.devices.flat[0].platform} devices "
                    f"here does not take {', '.join(self._options)}: {error}"
                ) from None
        return self._programs[key]

    def lower(self, batch: Any) -> jax.stages.Lowered:
        """The step for such a batch, lowered: ``.as_text()``, ``.compile().memory_analysis()`` …"""
        arrays = self.arrays(batch)
        self.init(arrays)
        return self._step.lower(self._state, self._feeder.put(arrays))

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What the compiler of the step is told."""
        return dict(self._options)

    # ---- runs ---------------------------------------------------------------------------------------------

    def train(
        self,
        dataset: Any,
        epochs: int = 1,
        *,
        steps: int | None = None,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        validation: Any = None,
        on_step: Callable[[int, Mapping[str, float]], None] | None = None,
        directory: str | os.PathLike[str] | None = None,
        save_every: int | None = None,
    ) -> FitReport:
        """Train on a data set.

        Args:
          dataset: an iterable of batches (see :meth:`step`); arrays in memory with ``batch_size``; or a data source
            such as ``load_corpus([...])``.
          epochs: passes over it.
          steps: optimizer steps, instead of epochs.
          batch_size: rows of a batch, for arrays and data sources; by default that of the model's configuration.
          sequence_length: tokens of a row, for data sources; by default that of the model's configuration.
          validation: a data set to evaluate after training.
          on_step: called with the number of each step and its metrics, up to two steps late.
          directory: where :meth:`save` writes after training, and after every ``save_every`` steps while training goes
            on.

        Raises:
          DataError: the data cannot be used. DivergedError: the loss, the gradients or the state are not finite any
            more; nothing later than that is saved. ConfigError: the folder has checkpoints of later steps.
        """
        begun = time.perf_counter()
        settings = getattr(
            getattr(self.model if self._waiting is None else None, "config", None), "train", None
        )
        if callable(getattr(dataset, "batches", None)) and settings is not None:
            batch_size = settings.batch_size if batch_size is None else batch_size
            sequence_length = settings.sequence_length if sequence_length is None else sequence_length
        given = {"batch_size": batch_size, "sequence_length": sequence_length, "seed": self.seed}
        batches = batches_of(dataset, epochs=epochs, steps=steps, first=self._taken, **given)
        if directory is not None and (saved := first_save(self._taken, steps, save_every)) is not None:
            self._keeper.store(directory, saved)
        saving = None if directory is None else (directory, save_every)
        try:
            losses, last, dropped = run_batches(
                self, batches, steps=steps, on_step=on_step, save=saving, look=self._keeper.look
            )
        except BaseException as error:
            self._keeper.leave(error)
            raise
        if directory is not None and not self._keeper.has(directory, self._taken):
            self.save(directory)
        self._keeper.settle()
        found = None if validation is None else self.evaluate(validation, **sizes_for(given, validation))
        return FitReport(
            len(losses), self._taken, tuple(losses), last, found, dropped, time.perf_counter() - begun
        )

    fit = train

    def evaluate(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        sequence_length: int | None = None,
        max_batches: int = 64,
        ema: bool = False,
        seed: int = 0,
    ) -> dict[str, float]:
        """The mean loss and metrics over a data set, weighted by rows, without training.

        Args:
          dataset, batch_size, sequence_length: as for :meth:`train`; of a data source what it holds out, of arrays
            every row.
          max_batches: of a data source, at most so many.
          ema: with the averaged parameters.
        """
        if callable(getattr(dataset, "validation_batches", None)):
            settings = self.model.config.train if hasattr(self.model, "config") else None
            sizes = {
                "batch_size": batch_size or (settings and settings.batch_size),
                "sequence_length": sequence_length or (settings and settings.sequence_length),
            }
            batches: Any = dataset.validation_batches(**sizes, max_batches=max_batches)
        else:
            batches = batches_of(dataset, batch_size=batch_size, seed=seed, shuffle=False)
        sums: dict[str, float] = {}
        count = 0
        for batch in batches:
            arrays = self.arrays(batch)
            self.init(arrays)
            rows = rows_of(arrays)
            placed = jax.tree.map(lambda x: x[0], self._feeder.put(arrays, 1))
            for name, value in jax.device_get(self._evaluation(ema)(placed)).items():
                sums[name] = sums.get(name, 0.0) + rows * float(value)
            count += rows
        if not count:
            raise DataError("data: there is nothing to evaluate.")
        return {name: value / count for name, value in sums.items()}

    def _evaluation(self, ema: bool) -> Callable[[Any], Any]:
        if "evaluate" not in self._evaluations:

            def run(params: Any, state: Any, batch: Any) -> dict[str, jax.Array]:
                loss, (_, metrics) = self.model.loss(params, batch, state=state, key=None, train=False)
                scalars = {name: value for name, value in metrics.items() if not jnp.ndim(value)}
                return {**scalars, "loss": loss}

            self._evaluations["evaluate"] = jax.jit(run)
        run = self._evaluations["evaluate"]
        return lambda batch: run(self._evaluated(ema), self.state.model_state, batch)

    def predict(self, inputs: Any, *, ema: bool = False) -> Any:
        """The model's outputs for inputs, as in a batch."""
        arrays = to_arrays(inputs)
        self.init({"inputs": arrays})
        if "predict" not in self._evaluations:

            def run(params: Any, state: Any, inputs: Any) -> Any:
                found = self.model.apply(params, inputs, state=state, train=False)
                return found if hasattr(self.model, "finish") else found[0]

            self._evaluations["predict"] = jax.jit(run)
        placed = jax.tree.map(lambda x: x[0], self._feeder.put({"inputs": arrays}, 1)["inputs"])
        return self._evaluations["predict"](self._evaluated(ema), self.state.model_state, placed)

    # ---- checkpoints --------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str], *, wait: bool = True) -> Path:
        """Write a checkpoint of the state, whole or not at all; the newest two stay.

        Args:
          directory: of the run; the checkpoint goes into its folder ``checkpoints``.
          wait: return when it is complete; False: write a copy of the state while steps go on. The next save,
            :meth:`restore` and the end of :meth:`train` wait for it and raise its error; the end of the program waits
            and prints it.

        Raises:
          ConfigError: the folder has checkpoints of later steps.
          DivergedError: something in the state became infinite or not a number.
          CheckpointWriteError: the disk is full, …; earlier checkpoints are unchanged.
        """
        config: Any = getattr(self.model, "config", None)
        return self._keeper.save(
            directory,
            self._taken,
            items_of(self.state),
            initial=lambda: items_of(self._first_state()),
            config_toml=config.to_toml() if hasattr(config, "to_toml") else "",
            wait=wait,
        )

    def restore(self, directory: str | os.PathLike[str]) -> TpuDistributedTrainer:
        """Continue from the newest checkpoint in a folder, whatever mesh it was written from.

        Raises:
          CheckpointNotFoundError: there is none. CheckpointDamagedError: every one is damaged.
          ResumeMismatchError: it is of another model or optimizer.
          ConfigError: the model's parameters depend on its inputs: call :meth:`init` with a batch first.
        """
        if self._waiting is not None:
            raise ConfigError(
                f"the parameters depend on the inputs: call trainer.init(batch) first ({self._waiting})"
            )
        checkpoint = self._keeper.newest(directory)
        self._state = restore_state(checkpoint, self._described)
        self._taken = checkpoint.step
        return self

    # ---- what it does -------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        on = [name for name, flag in self._flags.items() if flag]
        said = [str(self.layout), *on]
        if self.ema_decay is not None:
            said.append(f"ema_decay {self.ema_decay}")
        return f"TpuDistributedTrainer({type(self._given).__name__}, {', '.join(said)})"


def _dtype(x: Any) -> Any:
    return jax.dtypes.canonicalize_dtype(x.dtype)
