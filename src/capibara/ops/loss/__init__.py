"""Losses that are computed without their largest intermediate array."""

from __future__ import annotations

from capibara.ops.loss.api import cross_entropy

__all__ = ["cross_entropy"]
