"""Scaling at its documented name: a thin face of :mod:`capibara.train.scaling`."""

from __future__ import annotations

from capibara.train.scaling.autoscaler import TpuAutoScaler
from capibara.train.scaling.rules import Load, ScalingDecision

__all__ = ["Load", "ScalingDecision", "TpuAutoScaler"]
