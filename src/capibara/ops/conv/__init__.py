"""Convolutions: by Winograd's algorithm, causal ones for state-space models, and XLA's in one to three dimensions."""

from __future__ import annotations

from capibara.ops.conv.api import causal_conv1d
from capibara.ops.conv.plain import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from capibara.ops.conv.winograd import winograd_conv2d

__all__ = [
    "causal_conv1d",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "winograd_conv2d",
]
