"""The price of running a program, from chips, hours and dated prices, and the choice of slices and plans by price.

:func:`estimate_operation_cost` prices one piece of work; :class:`TpuCostOptimizer` picks among plans
(:meth:`~TpuCostOptimizer.choose`) or slices (:meth:`~TpuCostOptimizer.cheapest_slice`). Prices are those of
:mod:`capibara.hardware.prices`: each has a date, region, term and source, your own file overrides them, and an
unknown price is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.plan.cost.choices import Considered, CostChoice, NothingAffordableError
    from capibara.plan.cost.operations import OperationCost, estimate_operation_cost, operation_cost
    from capibara.plan.cost.optimizer import TpuCostOptimizer

__all__ = [
    "Considered",
    "CostChoice",
    "NothingAffordableError",
    "OperationCost",
    "TpuCostOptimizer",
    "estimate_operation_cost",
    "operation_cost",
]

_HOMES = {
    "choices": ("Considered", "CostChoice", "NothingAffordableError"),
    "operations": ("OperationCost", "estimate_operation_cost", "operation_cost"),
    "optimizer": ("TpuCostOptimizer",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
