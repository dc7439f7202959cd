"""Tropical arithmetic: the sum is a maximum or minimum, the product a sum. Shortest paths, morphology, schedules."""

from __future__ import annotations

from capibara.ops.tropical.matmul import matmul, matvec
from capibara.ops.tropical.paths import closure, shortest_paths
from capibara.ops.tropical.polynomial import polyval
from capibara.ops.tropical.recurrence import scan
from capibara.ops.tropical.windows import conv1d, conv2d, pool

__all__ = ["closure", "conv1d", "conv2d", "matmul", "matvec", "polyval", "pool", "scan", "shortest_paths"]
