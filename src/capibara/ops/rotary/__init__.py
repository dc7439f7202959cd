"""Rotary positions: pairs of a head's features, turned by an angle that grows with the position."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.ops.rotary.api import rotary

__all__ = ["rotary"]

_HOMES = {"api": ("rotary",)}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
