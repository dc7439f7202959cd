"""``TpuV4LossOps``: :mod:`capibara.ops.loss` under its documented name."""

from __future__ import annotations

from capibara.ops import loss

__all__ = ["TpuV4LossOps"]


class TpuV4LossOps:
    """Losses, each method a function of :mod:`capibara.ops.loss` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    cross_entropy = staticmethod(loss.cross_entropy)
