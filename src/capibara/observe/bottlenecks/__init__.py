"""What slows a profiled program down: :func:`find_bottlenecks`."""

from __future__ import annotations

from capibara.observe.bottlenecks.analysis import Bottleneck, PerformanceAnalysis, find_bottlenecks

__all__ = ["Bottleneck", "PerformanceAnalysis", "find_bottlenecks"]
