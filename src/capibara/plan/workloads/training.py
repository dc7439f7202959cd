"""The training step of a configuration, lowered for devices that need not be present.

Function and shardings are those of :func:`capibara.train.train`: both are made by :class:`capibara.train.run.Run`, so
that the plan matches the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.data.packed import PACKED
from capibara.plan.workloads import Workload
from capibara.sharding import Layout
from capibara.train.placement import Placement
from capibara.train.run import Run

__all__ = ["batch_arrays", "lower_train_step"]


def lower_train_step(
    mesh: Mesh, *, config: Mapping[str, Any], layout: Mapping[str, Any], packed: bool = False
) -> Workload:
    """Lower one optimizer step.

    Args:
      mesh: devices, real or abstract.
      config: as ``ModularModelConfig.to_dict()``.
      layout: as ``Layout.to_json()``; its rematerialisation and microbatches replace the configuration's.
      packed: whether rows hold several documents (:func:`capibara.data.is_packed`).

    Raises:
      ConfigError: the batch is not divisible into the microbatches, or their rows over the ``data`` axis.
    """
    how = Layout.from_json(layout)
    settings = ModularModelConfig.from_dict(config)
    settings = settings.replace(model=settings.model.replace(remat=how.remat))
    placement = Placement.over(mesh, how)
    placement.check_rows(settings.train.batch_size)
    model = ModularCapibaraModel(settings, mesh=mesh, rules=placement.rules)
    run = Run(settings, placement, model)
    state = run.state
    batch = batch_arrays(settings, placement, how.microbatches, packed=packed)
    kinds = {
        "parameters": state.params,
        "optimizer": (state.opt_state, state.ema),
        "batch": batch,
        "model state": state.model_state,
    }
    return Workload(run.train_step.lower(state, batch), kinds)


def batch_arrays(
    config: ModularModelConfig, placement: Placement, microbatches: int, *, packed: bool
) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that one step takes, ``[microbatches, rows, length + 1]``, with their shardings.

    Args:
      packed: whether rows hold several documents.
    """
    rows = config.train.batch_size // microbatches
    shape = (microbatches, rows, config.train.sequence_length + 1)
    where = placement.batch_sharding(shape)
    return {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
        for name, dtype in (PACKED if packed else {"tokens": "int32"}).items()
    }
