"""The training step of a configuration, lowered for devices that need not be present.

:mod:`capibara.plan` compiles it for slices without hardware. Function and shardings are those of
:func:`capibara.train.train` (:mod:`capibara.train.step`, :mod:`capibara.train.placement`), so that the plan matches
the training run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.plan.layout import Layout
from capibara.plan.workloads import Workload
from capibara.train.optimizer import build_optimizer, learning_rate_schedule
from capibara.train.placement import Placement
from capibara.train.step import make_train_step

__all__ = ["lower_train_step"]


def lower_train_step(mesh: Mesh, *, config: Mapping[str, Any], layout: Mapping[str, Any]) -> Workload:
    """Lower one optimizer step.

    Args:
      mesh: devices, real or abstract.
      config: as ``ModularModelConfig.to_dict()``.
      layout: as ``Layout.to_json()``; its rematerialisation and microbatches replace the configuration's.

    Raises:
      ConfigError: the batch is not divisible into the microbatches, or their rows over the ``data`` axis.
    """
    how = Layout.from_json(layout)
    settings = ModularModelConfig.from_dict(config)
    settings = settings.replace(model=settings.model.replace(remat=how.remat))
    placement = Placement.over(mesh, how)
    placement.check_rows(settings.train.batch_size)
    model = ModularCapibaraModel(settings, mesh=mesh, rules=placement.rules)
    optimizer = build_optimizer(settings, param_axes=model.param_axes)
    state = placement.describe_state(model, optimizer)
    step = make_train_step(
        model,
        optimizer,
        schedule=learning_rate_schedule(settings),
        shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
    )
    rows = settings.train.batch_size // how.microbatches
    shape = (how.microbatches, rows, settings.train.sequence_length + 1)
    batch = {"tokens": jax.ShapeDtypeStruct(shape, "int32", sharding=placement.batch_sharding(shape))}
    kinds = {
        "parameters": state.params,
        "optimizer": state.opt_state,
        "batch": batch,
        "model state": state.model_state,
    }
    return Workload(step.lower(state, batch), kinds)
