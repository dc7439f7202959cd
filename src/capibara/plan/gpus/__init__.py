"""A host of NVIDIA GPUs as a target of compilation and prediction.

The GPUs of an HGX or DGX host are joined by NVLink through NVSwitch: each reaches every other at the full bandwidth of
its links, so the host has no grid. What the compiler has to know of a GPU that is not there is in ``*.txtpb`` files
beside this one, in the text form of XLA's ``GpuTargetConfigProto``; the figures are those of XLA's own descriptions
(openxla/xla, ``xla/backends/gpu/target_config/specs``).
"""

from __future__ import annotations

from capibara.plan.gpus.host import COUNTS, FRACTION, GPUS, GpuHost, is_gpu_name, parse_gpus

__all__ = ["COUNTS", "FRACTION", "GPUS", "GpuHost", "is_gpu_name", "parse_gpus"]
