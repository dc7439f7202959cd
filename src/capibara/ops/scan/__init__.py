"""Recurrences along a sequence: scans of any step, linear recurrences, the core of a selective state-space model."""

from __future__ import annotations

from capibara.ops.scan.api import selective_scan
from capibara.ops.scan.linear import linear_recurrence, matrix_linear_recurrence
from capibara.ops.scan.parallel import parallel_scan
from capibara.ops.scan.semiring import semiring_scan
from capibara.ops.scan.spiking import lif

__all__ = [
    "lif",
    "linear_recurrence",
    "matrix_linear_recurrence",
    "parallel_scan",
    "selective_scan",
    "semiring_scan",
]
