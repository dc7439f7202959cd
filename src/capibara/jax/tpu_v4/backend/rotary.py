"""``TpuV4RotaryOps``: :mod:`capibara.ops.rotary` under its documented name."""

from __future__ import annotations

from capibara.ops import rotary

__all__ = ["TpuV4RotaryOps"]


class TpuV4RotaryOps:
    """Rotary positions, each method a function of :mod:`capibara.ops.rotary` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    rotary = staticmethod(rotary.rotary)
