"""The roofline: what an operation takes at least (Williams et al., doi:10.1145/1498765.1498785)."""

from __future__ import annotations

__all__ = ["roofline"]


def roofline(flops: float, moved: float, peak: float, bandwidth: float | None) -> float:
    """Seconds of an operation at the rates of a device: its arithmetic or its memory traffic, whichever is longer.

    Args:
      flops: floating-point operations.
      moved: bytes read and written.
      peak: floating-point operations a second.
      bandwidth: bytes a second of the device's memory; None: its traffic takes no time.
    """
    return max(flops / peak, moved / bandwidth if bandwidth else 0.0)
