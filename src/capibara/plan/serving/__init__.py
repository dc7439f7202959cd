"""Serving: a slice's concurrent requests, latency, and price per million tokens.

:func:`plan_serving` compiles the model's prefill and decoding steps for slices that need not be present. The memory
of a step is affine in its rows, so a few compilations find the largest batch that fits and the largest that meets the
latency target; all reported points were compiled.
"""

from __future__ import annotations

from capibara.plan.serving.planning import plan_serving
from capibara.plan.serving.result import ServingOption, ServingPlan, ServingPoint, UnreachableTargetError

__all__ = ["ServingOption", "ServingPlan", "ServingPoint", "UnreachableTargetError", "plan_serving"]
