"""Fourier transforms: mixed radices as matrix products, of real and complex signals, also over devices."""

from __future__ import annotations

from capibara.ops.fft.api import radix_optimized_fft

__all__ = ["radix_optimized_fft"]
