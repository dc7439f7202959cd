"""The train step of a configuration, lowered for devices that need not be here.

:mod:`capibara.plan` compiles it for slices that are only described. The function is the trainer's own
(:func:`capibara.train.step.train_step`), its shardings are the layout's: :func:`capibara.train.train` keeps parameters
whole on every device and cuts only the batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from capibara.compose.physical.specs import nest
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.errors import ConfigError
from capibara.plan.layout import Layout
from capibara.plan.workloads import Workload
from capibara.train import extras
from capibara.train.optimizer import build_optimizer, learning_rate_schedule
from capibara.train.state import TrainState
from capibara.train.step import train_step

__all__ = ["lower_train_step"]


def lower_train_step(mesh: Mesh, *, config: Mapping[str, Any], layout: Mapping[str, Any]) -> Workload:
    """Lower one optimizer step.

    Args:
      mesh: devices, real or described.
      config: as ``ModularModelConfig.to_dict()``.
      layout: as ``Layout.to_json()``; its rematerialisation and microbatches replace the configuration's.

    Raises:
      ConfigError: the batch does not divide into the microbatches, or their rows not over the ``data`` axis.
    """
    how = Layout.from_json(layout)
    settings = ModularModelConfig.from_dict(config)
    settings = settings.replace(model=settings.model.replace(remat=how.remat))
    rows, left = divmod(settings.train.batch_size, how.microbatches)
    data = how.axis_sizes.get("data", 1) * how.axis_sizes.get("fsdp", 1)
    if left or rows % data:
        raise ConfigError(
            f"train.batch_size={settings.train.batch_size} must be a multiple of {how.microbatches} microbatches × "
            f"{data} devices along the data axes = {how.microbatches * data}"
        )
    model = ModularCapibaraModel(settings, mesh=mesh, rules=how.rules)
    optimizer = build_optimizer(settings, param_axes=model.param_axes)
    step = train_step(model, optimizer, schedule=learning_rate_schedule(settings))

    def described(spec: Any, rules: Any) -> jax.ShapeDtypeStruct:
        where = NamedSharding(mesh, rules.spec(spec.axes or (None,) * len(spec.shape), mesh, spec.shape))
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=where)

    compiled = model.compiled
    params = nest({path: described(spec, how.rules) for path, spec in compiled.params.items()})
    moments = nest({path: described(spec, how.optimizer_rules) for path, spec in compiled.params.items()})
    whole = NamedSharding(mesh, PartitionSpec())
    on_host = how.offload == "optimizer"

    def placed(leaf: Any, where: NamedSharding) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    empty = jax.eval_shape(optimizer.init, params)
    opt_state = extras.optax().tree_utils.tree_map_params(
        optimizer,
        lambda leaf, like: placed(leaf, like.sharding),
        empty,
        moments,
        transform_non_params=lambda leaf: placed(leaf, whole),
    )
    in_hbm = jax.tree.map(lambda leaf: leaf.sharding, opt_state)
    if on_host:
        opt_state = jax.tree.map(_in_host_memory, opt_state)
        step = _fetching(step, in_hbm, jax.tree.map(lambda leaf: leaf.sharding, opt_state))
    state = TrainState(
        step=placed(jnp.int32(0), whole),
        params=params,
        opt_state=opt_state,
        model_state=nest({path: described(spec, how.rules) for path, spec in compiled.states.items()}),
        key=placed(jax.eval_shape(lambda: jax.random.key(0)), whole),
    )
    shape = (how.microbatches, rows, settings.train.sequence_length + 1)
    spec = how.rules.spec(("batch",), mesh, (rows,), kind="activations")
    batch = {
        "tokens": jax.ShapeDtypeStruct(
            shape, "int32", sharding=NamedSharding(mesh, PartitionSpec(None, *spec, None))
        )
    }
    after = jax.tree.map(lambda leaf: leaf.sharding, state)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(after, None))
    kinds = {"parameters": params, "optimizer": opt_state, "batch": batch, "model state": state.model_state}
    return Workload(jitted.lower(state, batch), kinds)


def _in_host_memory(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The same array in the hosts' memory; scalars stay, moving them saves nothing."""
    if not leaf.shape or leaf.sharding is None:
        return leaf
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding.with_memory_kind("pinned_host")
    )


def _fetching(step: Any, in_hbm: Any, on_host: Any) -> Any:
    """A step whose optimizer state lives in the hosts' memory: fetched before, sent back after."""

    def fetched(state: TrainState, batch: dict[str, jax.Array]) -> Any:
        here = dataclasses.replace(state, opt_state=jax.device_put(state.opt_state, in_hbm))
        after, metrics = step(here, batch)
        return dataclasses.replace(after, opt_state=jax.device_put(after.opt_state, on_host)), metrics

    return fetched
