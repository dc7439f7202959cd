"""Serving: how many requests a slice holds at once, how fast it answers them, and what a million tokens cost.

:func:`plan_serving` compiles the model's prefill and decoding steps for slices that need not be here. The memory of a
step is affine in its rows, so a few compilations find the largest batch that fits and the largest whose tokens come
fast enough; what is reported was compiled itself.
"""

from __future__ import annotations

from capibara.plan.serving.planning import plan_serving
from capibara.plan.serving.result import ServingOption, ServingPlan, ServingPoint, UnreachableTargetError

__all__ = ["ServingOption", "ServingPlan", "ServingPoint", "UnreachableTargetError", "plan_serving"]
