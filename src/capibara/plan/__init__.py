"""Plan a program on a TPU slice or a host of GPUs before you rent it: memory, time and price.

:func:`plan` takes a configuration, or any step function through :func:`step_work`, and a slice or host; it searches
layouts, compiles the best of them with the real TPU or GPU compiler on this machine, and returns a ranked
:class:`Plan`. The names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.jax_versions import require_supported_jax
from capibara.lazy import on_demand

require_supported_jax()

if TYPE_CHECKING:
    from capibara.plan.candidate import Candidate
    from capibara.plan.comparison import SlicesPlan, plan_slices
    from capibara.plan.cost import TpuCostOptimizer, estimate_operation_cost
    from capibara.plan.errors import CompilationError, CompilerMissingError, DoesNotFitError, PlanError
    from capibara.plan.fingerprints import (
        Fingerprint,
        FingerprintCheck,
        check_fingerprints,
        fingerprint,
        record_fingerprints,
    )
    from capibara.plan.gpus import GpuHost
    from capibara.plan.hbm import HBMChoice, HBMOptimizer
    from capibara.plan.memory import estimate_memory
    from capibara.plan.planning import plan
    from capibara.plan.result import Plan
    from capibara.plan.serving import ServingPlan, UnreachableTargetError, plan_serving
    from capibara.plan.sharding import create_mesh_sharding, create_training_mesh, optimize_sharding_strategy
    from capibara.plan.slices import Slice, parse_slice
    from capibara.plan.step import step_work
    from capibara.plan.targets import Target, parse_target
    from capibara.plan.workloads import Workload
    from capibara.sharding import Layout

__all__ = [
    "Candidate",
    "CompilationError",
    "CompilerMissingError",
    "DoesNotFitError",
    "Fingerprint",
    "FingerprintCheck",
    "GpuHost",
    "HBMChoice",
    "HBMOptimizer",
    "Layout",
    "Plan",
    "PlanError",
    "ServingPlan",
    "Slice",
    "SlicesPlan",
    "Target",
    "TpuCostOptimizer",
    "UnreachableTargetError",
    "Workload",
    "check_fingerprints",
    "create_mesh_sharding",
    "create_training_mesh",
    "estimate_memory",
    "estimate_operation_cost",
    "fingerprint",
    "optimize_sharding_strategy",
    "parse_slice",
    "parse_target",
    "plan",
    "plan_serving",
    "plan_slices",
    "record_fingerprints",
    "step_work",
]

_HOMES = {
    "candidate": ("Candidate",),
    "comparison": ("SlicesPlan", "plan_slices"),
    "cost": ("TpuCostOptimizer", "estimate_operation_cost"),
    "errors": ("CompilationError", "CompilerMissingError", "DoesNotFitError", "PlanError"),
    "fingerprints": (
        "Fingerprint",
        "FingerprintCheck",
        "check_fingerprints",
        "fingerprint",
        "record_fingerprints",
    ),
    "gpus": ("GpuHost",),
    "hbm": ("HBMChoice", "HBMOptimizer"),
    "memory": ("estimate_memory",),
    "planning": ("Layout", "plan"),
    "result": ("Plan",),
    "serving": ("ServingPlan", "UnreachableTargetError", "plan_serving"),
    "sharding": ("create_mesh_sharding", "create_training_mesh", "optimize_sharding_strategy"),
    "slices": ("Slice", "parse_slice"),
    "step": ("step_work",),
    "targets": ("Target", "parse_target"),
    "workloads": ("Workload",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
