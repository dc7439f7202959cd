"""Cost, at its documented names: thin faces of :mod:`capibara.plan.cost`."""

from __future__ import annotations

from capibara.plan.cost import TpuCostOptimizer, estimate_operation_cost

__all__ = ["TpuCostOptimizer", "estimate_operation_cost"]
