"""One optimizer step and one evaluation as compiled functions; :mod:`capibara.train.placement` determines the
sharding of their arrays.

Gradient accumulation splits the batch of a step into microbatches that are processed one after another, so that
activations of only one of them are live; the mean gradient is that of the whole batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from capibara.errors import ConfigError
from capibara.memory.offload import HOST_MEMORY
from capibara.ops.layers import training_kernels
from capibara.train.protocols import Model, Optimizer
from capibara.train.state import TrainState
from capibara.train.trainable import joined, trained_part

__all__ = ["make_eval_step", "make_train_step", "train_step"]


def microbatch(batch: Any, accumulation_steps: int) -> Any:
    """Split ``[batch, …]`` into ``[accumulation_steps, batch / accumulation_steps, …]``.

    Args:
      batch: tokens, or a batch of several arrays.

    Raises:
      ConfigError: the batch does not divide.
    """

    def split(array: np.ndarray) -> np.ndarray:
        if array.shape[0] % accumulation_steps:
            raise ConfigError(
                f"train.batch_size={array.shape[0]} must be a multiple of "
                f"train.gradient_accumulation_steps={accumulation_steps}."
            )
        return array.reshape(accumulation_steps, array.shape[0] // accumulation_steps, *array.shape[1:])

    return jax.tree.map(split, batch)


def train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    schedule: Callable[[Any], Any] | None = None,
    ema: float | None = None,
) -> Callable[[TrainState, dict[str, jax.Array]], tuple[TrainState, dict[str, jax.Array]]]:
    """The pure function ``(state, batch) -> (state, metrics)`` that :func:`make_train_step` compiles.

    ``batch["tokens"]`` is int32 ``[microbatches, rows, length + 1]``, as are the other arrays of a batch that the
    model's loss takes; of another model's batch each array is ``[microbatches, rows, …]``. With ``weights`` a
    microbatch counts as much as its tokens (or targets) do. Metrics are float32 scalars, means over the microbatches:
    ``loss``, ``cross_entropy`` (nats per token), ``grad_norm`` before clipping, ``learning_rate`` if a schedule is
    given, and whatever else the model's loss reports.

    Args:
      ema: the decay of the moving average of the parameters, ``ema = decay · ema + (1 - decay) · params`` after each
        step (Polyak & Juditsky, 1992); None or 0: there is none.
    """

    # Of stages that microbatches go through, all at once.
    of_all = getattr(model, "loss_of_microbatches", None)

    def loss_and_grad(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
        def loss(part: Any) -> Any:
            whole = joined(part, params)
            return (of_all or model.loss)(whole, batch, state=model_state, key=key, train=True)

        with training_kernels():
            (value, (new_state, metrics)), grads = jax.value_and_grad(loss, has_aux=True)(
                trained_part(model, params)
            )
        return grads, new_state, {**metrics, "loss": value}

    def step(state: TrainState, batch: dict[str, jax.Array]) -> tuple[TrainState, dict[str, jax.Array]]:
        count = jax.tree.leaves(batch)[0].shape[0]
        key = jax.random.fold_in(state.key, state.step)
        trained = trained_part(model, state.params)
        if of_all is not None:
            grads, model_state, metrics = loss_and_grad(state.params, state.model_state, batch, key)
        elif count == 1:
            only = jax.tree.map(lambda array: array[0], batch)
            grads, model_state, metrics = loss_and_grad(state.params, state.model_state, only, key)
        else:
            # Each microbatch's mean, as often as its tokens count.
            shares = _shares(batch)

            def body(carry: Any, inputs: Any) -> Any:
                sums, model_state = carry
                rows, number = inputs
                grads, model_state, metrics = loss_and_grad(
                    state.params, model_state, rows, jax.random.fold_in(key, number)
                )
                if shares is not None:
                    share = shares[number]
                    grads = jax.tree.map(lambda leaf: leaf * share.astype(leaf.dtype), grads)
                return (jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, grads), model_state), metrics

            # Sums of many small numbers: at least float32, whatever the parameters are stored in.
            zeros = jax.tree.map(
                lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), trained
            )
            (sums, model_state), per_microbatch = jax.lax.scan(
                body, (zeros, state.model_state), (batch, jnp.arange(count))
            )
            grads = jax.tree.map(lambda leaf, param: (leaf / count).astype(param.dtype), sums, trained)
            if shares is None:
                metrics = jax.tree.map(lambda leaf: leaf.mean(axis=0), per_microbatch)
            else:
                metrics = jax.tree.map(lambda leaf: (leaf.T * shares).T.mean(axis=0), per_microbatch)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        trained = jax.tree.map(lambda param, update: param + update.astype(param.dtype), trained, updates)
        params = joined(trained, state.params)
        squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(grads)]
        metrics = {**metrics, "grad_norm": jnp.sqrt(sum(squares))}
        if schedule is not None:
            metrics["learning_rate"] = schedule(state.step)
        scalars = {
            name: jnp.asarray(value, jnp.float32) for name, value in metrics.items() if not jnp.ndim(value)
        }
        average = state.ema
        if ema and average is not None:
            part = 1 - ema
            average = jax.tree.map(
                lambda old, new: old + part * (new.astype(old.dtype) - old), average, trained
            )
        return TrainState(state.step + 1, params, opt_state, model_state, state.key, average), scalars

    return step


def _shares(batch: dict[str, jax.Array]) -> jax.Array | None:
    """How much each microbatch counts, 1 on average: as its tokens or targets do. None: all alike."""
    weights, segments = batch.get("weights"), batch.get("segments")
    if "reference" in batch or (weights is None and segments is None):  # of pairs each counts alike
        return None
    if "tokens" not in batch:
        if weights is None:
            return None
        counted = weights
    else:
        counted = jnp.ones(batch["tokens"].shape) if weights is None else weights
        counted = counted[..., 1:]
        if segments is not None:  # no token is predicted from one of another text
            follows = (segments[..., 1:] == segments[..., :-1]) & (segments[..., 1:] != 0)
            counted = jnp.where(follows, counted, 0)
    sums = jnp.sum(counted, axis=tuple(range(1, counted.ndim)))
    return sums * (sums.shape[0] / jnp.maximum(jnp.sum(sums), 1e-9))


def make_train_step(
    model: Model,
    optimizer: Optimizer,
    *,
    schedule: Callable[[Any], Any] | None = None,
    shardings: TrainState | None = None,
    ema: float | None = None,
) -> jax.stages.Wrapped:
    """Compile :func:`train_step`; the input state is donated.

    Args:
      shardings: of the state, on input and output; by default left to the compiler. Optimizer arrays in the hosts'
        memory are fetched before their update and sent back after it.
      ema: as for :func:`train_step`.
    """
    step = train_step(model, optimizer, schedule=schedule, ema=ema)
    if shardings is None:
        return jax.jit(step, donate_argnums=0)
    if any(where.memory_kind == HOST_MEMORY for where in jax.tree.leaves(shardings.opt_state)):
        step = _fetching(step, shardings.opt_state)
    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def _fetching(step: Any, on_host: Any) -> Any:
    """A step whose optimizer state lives in the hosts' memory: fetched before, sent back after."""
    on_device = jax.tree.map(lambda where: NamedSharding(where.mesh, where.spec), on_host)

    def fetched(state: TrainState, batch: dict[str, jax.Array]) -> Any:
        here = dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, on_device))
        after, metrics = step(here, batch)
        return dataclasses.replace(after, opt_state=jax.device_put(after.opt_state, on_host)), metrics

    return fetched


def make_eval_step(model: Model) -> jax.stages.Wrapped:
    """Compile ``(params, model_state, batch) -> cross entropy`` in nats per token, without changing any
    state."""

    def evaluate(params: Any, model_state: Any, batch: dict[str, jax.Array]) -> jax.Array:
        _, (_, metrics) = model.loss(params, batch, state=model_state, key=None, train=False)
        return metrics["cross_entropy"]

    return jax.jit(evaluate)
