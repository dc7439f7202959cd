"""``TpuV4ConvOps``: :mod:`capibara.ops.conv` under its documented name."""

from __future__ import annotations

from capibara.ops import conv

__all__ = ["TpuV4ConvOps"]


class TpuV4ConvOps:
    """Convolutions, each method a function of :mod:`capibara.ops.conv` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    winograd_conv2d = staticmethod(conv.winograd_conv2d)
    causal_conv1d = staticmethod(conv.causal_conv1d)
    conv1d = staticmethod(conv.conv1d)
    conv2d = staticmethod(conv.conv2d)
    conv3d = staticmethod(conv.conv3d)
    conv_transpose1d = staticmethod(conv.conv_transpose1d)
    conv_transpose2d = staticmethod(conv.conv_transpose2d)
    conv_transpose3d = staticmethod(conv.conv_transpose3d)
