"""Distributed training, at its documented names: a face of :mod:`capibara.train` and :mod:`capibara.plan.sharding`."""

from __future__ import annotations

from capibara.plan.sharding import create_training_mesh
from capibara.train.distributed import TpuDistributedTrainer

__all__ = ["TpuDistributedTrainer", "create_training_mesh"]
