"""Compiler options by which collectives run beside computation."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "ASYNCHRONOUS",
    "DOUBLE_BUFFERED",
    "FUSED",
    "WHOLE_PRODUCTS",
    "flags_of",
    "options_for",
    "whole_products",
]

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

WHOLE_PRODUCTS: Mapping[str, str] = MappingProxyType(
    {
        **{name: str(value) for name, value in ASYNCHRONOUS["tpu"].items()},
        "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
    }
)
"""The TPU's options, by which products stay whole, too.

XLA cuts a product with a gathered operand into a loop over its parts, to send one while it multiplies by another.
Gathers of parameters are hidden better behind whole products: the shipped decoder of 1.2 billion parameters, fully
sharded over 32 chips of a v4, is predicted at 1.18 s a step with these options and at 2.62 s without (jax 0.10.2,
libtpu 0.0.42.1).
"""

FUSED = "xla_tpu_enable_async_collective_fusion_fuse_"
"""How options begin by which collectives run inside of fusions, beside what these compute."""
_GATHERS = {f"{FUSED}all_gather": "true"}
# Either option alone changes nothing.
_SUMS = {"xla_enable_async_all_reduce": "true", f"{FUSED}all_reduce": "true"}
# A v4's compiler fuses sums, too, but then needs more of its scratch memory than there is in wide layers.
_FURTHER: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"v5e": _SUMS, "v5p": {**_GATHERS, **_SUMS}, "v6e": {**_GATHERS, **_SUMS}}
)


def whole_products(generation: str | None) -> dict[str, str]:
    """:data:`WHOLE_PRODUCTS`, with what else a generation's compiler needs so that gathers and sums do not wait.

    On v5p and v6e it gathers beside computation only where it may do so inside of fusions, and from v5e on it sums
    gradients beside computation where that is allowed. Of Llama 3.1 8B, fully sharded over 16 chips, a step of
    16 × 8192 tokens is predicted at 1.37 s on v6e instead of 1.60, and at 4.11 on v5e instead of 4.50 (libtpu
    0.0.42.1). What is on its way takes memory, as much as is free.

    Args:
      generation: ``"v4"``, ``"v5e"`` …; None if it is not known.
    """
    return {**WHOLE_PRODUCTS, **_FURTHER.get(generation or "", {})}


DOUBLE_BUFFERED: Mapping[str, str | bool] = MappingProxyType(
    {**ASYNCHRONOUS["gpu"], "xla_gpu_enable_while_loop_double_buffering": True}
)
"""The GPU's options, by which two turns of a loop are one: what the second gathers comes while the first computes."""

_VALUES = {"true": True, "false": False}


def flags_of(options: Mapping[str, str | bool]) -> tuple[tuple[str, str], ...]:
    """Options as the ``(name, value)`` pairs of a layout."""
    return tuple((name, str(value).lower()) for name, value in options.items())


def options_for(platform: str, flags: Mapping[str, str]) -> dict[str, str | bool]:
    """Those of a layout's flags that a platform's compiler has, as ``jax.stages.Lowered.compile`` takes them.

    Flags whose name begins with ``xla_gpu_`` are the GPU compiler's, which takes booleans; all others a TPU's.

    Args:
      platform: of the devices: ``"tpu"``, ``"gpu"`` (or ``"cuda"``) or another one, which has none.
    """
    if platform == "tpu":
        return {name: value for name, value in flags.items() if not name.startswith("xla_gpu_")}
    if platform in ("gpu", "cuda"):
        own = {name: value for name, value in flags.items() if name.startswith("xla_gpu_")}
        return {name: _VALUES.get(value, value) for name, value in own.items()}
    return {}
