"""What a program costs to run: dollars from chips, hours and dated prices, and the choice of slice and plan by them.

:func:`estimate_operation_cost` prices one piece of work; :class:`TpuCostOptimizer` picks among plans
(:meth:`~TpuCostOptimizer.choose`) or slices (:meth:`~TpuCostOptimizer.cheapest_slice`). Prices are those of
:mod:`capibara.hardware.prices`: each has its day, region, term and source, a file of your own overrides them, and an
unknown price is an error.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

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
_MODULE_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
