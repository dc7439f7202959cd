"""The operations at their documented names: thin faces of ``capibara.ops``."""

from __future__ import annotations

from capibara.jax.tpu_v4.backend.attention import TpuV4AttentionOps
from capibara.jax.tpu_v4.backend.collective import TpuV4CollectiveOps
from capibara.jax.tpu_v4.backend.conv import TpuV4ConvOps
from capibara.jax.tpu_v4.backend.fft import TpuV4FFTOps
from capibara.jax.tpu_v4.backend.linalg import TpuV4LinalgOps
from capibara.jax.tpu_v4.backend.loss import TpuV4LossOps
from capibara.jax.tpu_v4.backend.rotary import TpuV4RotaryOps
from capibara.jax.tpu_v4.backend.scan import TpuV4ScanOps
from capibara.jax.tpu_v4.backend.tropical import TpuV4TropicalOps
from capibara.jax.tpu_v4.backend.vq import TpuV4VQOps

__all__ = [
    "TpuV4AttentionOps",
    "TpuV4CollectiveOps",
    "TpuV4ConvOps",
    "TpuV4FFTOps",
    "TpuV4LinalgOps",
    "TpuV4LossOps",
    "TpuV4RotaryOps",
    "TpuV4ScanOps",
    "TpuV4TropicalOps",
    "TpuV4VQOps",
]
