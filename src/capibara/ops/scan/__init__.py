"""Recurrences along a sequence: :func:`selective_scan`, the core of a selective state-space model."""

from __future__ import annotations

from capibara.ops.scan.api import selective_scan

__all__ = ["selective_scan"]
