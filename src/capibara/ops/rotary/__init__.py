"""Rotary positions: pairs of a head's features, turned by an angle that grows with the position."""

from __future__ import annotations

from capibara.ops.rotary.api import rotary

__all__ = ["rotary"]
