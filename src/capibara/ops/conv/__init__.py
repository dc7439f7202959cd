"""Convolutions: :func:`causal_conv1d`, the short depthwise one in front of a state-space model."""

from __future__ import annotations

from capibara.ops.conv.api import causal_conv1d

__all__ = ["causal_conv1d"]
