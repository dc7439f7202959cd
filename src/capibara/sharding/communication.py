"""Compiler options by which collectives run beside computation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["ASYNCHRONOUS"]

ASYNCHRONOUS: Mapping[str, Mapping[str, str | bool]] = MappingProxyType(
    {
        # Gathers of parameters run while the layer before computes. On v4 the compiler refuses the wider
        # xla_tpu_enable_async_collective_fusion, and its all-reduce always waits.
        "tpu": MappingProxyType(
            {"xla_enable_async_all_gather": "true", "xla_tpu_enable_latency_hiding_scheduler": "true"}
        ),
        "gpu": MappingProxyType({"xla_gpu_enable_latency_hiding_scheduler": True}),
        # Orders a program so that what does not depend on one another can run at once, collectives among it.
        "cpu": MappingProxyType({"xla_cpu_enable_concurrency_optimized_scheduler": True}),
    }
)
"""Options for ``jax.stages.Lowered.compile``, by platform."""
