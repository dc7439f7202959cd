"""``TpuV4FFTOps``: :mod:`capibara.ops.fft` under its documented name."""

from __future__ import annotations

from capibara.ops import fft

__all__ = ["TpuV4FFTOps"]


class TpuV4FFTOps:
    """Fourier transforms, each method a function of :mod:`capibara.ops.fft` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    radix_optimized_fft = staticmethod(fft.radix_optimized_fft)
