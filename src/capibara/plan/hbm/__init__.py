"""Which arguments of a step to donate, and what to recompute or offload, so that it fits a device's memory."""

from __future__ import annotations

from capibara.plan.hbm.choice import Considered, HBMChoice
from capibara.plan.hbm.optimizer import HBMOptimizer

__all__ = ["Considered", "HBMChoice", "HBMOptimizer"]
