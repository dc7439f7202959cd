"""``TpuV4ScanOps``: :mod:`capibara.ops.scan` under its documented name."""

from __future__ import annotations

from capibara.ops import scan

__all__ = ["TpuV4ScanOps"]


class TpuV4ScanOps:
    """Recurrences along a sequence, each method a function of :mod:`capibara.ops.scan` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    parallel_scan = staticmethod(scan.parallel_scan)
    linear_recurrence = staticmethod(scan.linear_recurrence)
    matrix_linear_recurrence = staticmethod(scan.matrix_linear_recurrence)
    selective_scan = staticmethod(scan.selective_scan)
    semiring_scan = staticmethod(scan.semiring_scan)
    lif = staticmethod(scan.lif)
