"""Layers for signals and images, ``[batch, channels, *space]``: convolutions, pooling, normalisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from capibara.compose import primitives as p
from capibara.compose.initializers import Scaled, ones, zeros
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model
from capibara.compose.primitives.windows import padding_pairs, spread

__all__ = [
    "AvgPool1D",
    "AvgPool2D",
    "BatchNorm1D",
    "BatchNorm2D",
    "Convolution1D",
    "Convolution2D",
    "ElementWiseAffine",
    "GroupNorm",
    "InstanceNorm",
    "MaxPool1D",
    "MaxPool2D",
]


class _Convolution(Model):
    space: ClassVar[int]

    def __init__(
        self,
        kernel_size: Any,
        out_channels: int | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        use_bias: bool = True,
        groups: int = 1,
        *,
        init: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("out_channels", out_channels, optional=True)
        count = self.space
        kernel = spread("kernel_size", kernel_size, count)
        gaps = spread("dilation", dilation, count)
        pads = padding_pairs(padding, kernel, gaps)
        out = "out" if out_channels is None else out_channels
        names = ["height", "width"][-count:]
        self.add_input("input", ["batch", "in", *names], "float")
        self.add_parameter("weight", [out, "group", *kernel], init or Scaled(fan_in=count + 1, skip=1))
        convolve = p.PrimitiveConvolution1D if count == 1 else p.PrimitiveConvolution2D
        result = "product" if use_bias else "output"
        self.add(
            convolve(stride, pads, dilation, groups), "product", input="input", weight="weight", output=result
        )
        if use_bias:
            self.add_parameter("bias", (out,), zeros)
            self.add(p.ChannelAdd(), "sum", input="product", values="bias", output="output")
        self.expose("output")


class Convolution1D(_Convolution):
    """``input [n, in, s]`` → ``output [n, out, t]``; ``weight [out, in / groups, k]``, ``bias [out]``.

    Args:
        kernel_size, stride, dilation: integers.
        out_channels: None leaves it to what the output is connected to.
        padding: a number, (before, after), "same" or "valid".
        use_bias: add a bias. groups: channels in that many groups, each convolved by itself.
        init: initialiser of the weight; by default variance 1 over an output's inputs.
    """

    space = 1


class Convolution2D(_Convolution):
    """``input [n, in, h, w]`` → ``output [n, out, h', w']``; ``weight [out, in / groups, kh, kw]``, ``bias [out]``.

    Args:
        kernel_size, stride, dilation: a number, or one for each dimension.
        out_channels: None leaves it to what the output is connected to.
        padding: a number, one for each dimension, pairs (before, after), "same" or "valid".
        use_bias: add a bias. groups: channels in that many groups, each convolved by itself.
        init: initialiser of the weight; by default variance 1 over an output's inputs.
    """

    space = 2


class MaxPool1D(p.PrimitiveMaxPool1D):
    """The largest of each window: ``MaxPool1D(kernel_size, stride=kernel_size, padding=0, dilation=1)``."""


class MaxPool2D(p.PrimitiveMaxPool2D):
    """The largest of each window: ``MaxPool2D(kernel_size, stride=kernel_size, padding=0, dilation=1)``."""


class AvgPool1D(p.PrimitiveAvgPool1D):
    """The mean of each window: ``AvgPool1D(kernel_size, stride=kernel_size, padding=0, dilation=1)``."""


class AvgPool2D(p.PrimitiveAvgPool2D):
    """The mean of each window: ``AvgPool2D(kernel_size, stride=kernel_size, padding=0, dilation=1)``."""


class ElementWiseAffine(Model):
    """A scale and a bias for each channel: ``input [n, c, *s]``, ``weight [c]``, ``bias [c]``."""

    def __init__(self, use_scale: bool = True, use_bias: bool = True, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.add_input("input", "batch channels *s", "float")
        _affine(self, "input", use_scale, use_bias)


def _affine(model: Model, at: str, use_scale: bool, use_bias: bool) -> None:
    """Scale and shift the channels of ``at``, and call the result ``output``."""
    last = "output"
    if use_scale:
        model.add_parameter("weight", ("channels",), ones, keep_dtype=False)
        after = "scaled" if use_bias else last
        model.add(p.ChannelMultiply(), "scale", input=at, values="weight", output=after)
        at = after
    if use_bias:
        model.add_parameter("bias", ("channels",), zeros)
        model.add(p.ChannelAdd(), "shift", input=at, values="bias", output=last)
    if not (use_scale or use_bias):
        model.add(p.Buffer(), "same", input=at, output=last)
    model.expose(last)


class GroupNorm(Model):
    """Group normalisation (Wu and He, 2018) with scale and bias: ``input [n, c, *s]``, ``weight [c]``, ``bias
    [c]``."""

    def __init__(
        self,
        num_groups: int = 32,
        use_scale: bool = True,
        use_bias: bool = True,
        epsilon: float = 1e-5,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.add_input("input", "batch channels *s", "float")
        self.add(p.GroupNormalise(num_groups, epsilon), "norm", input="input", output="normed")
        _affine(self, "normed", use_scale, use_bias)


class InstanceNorm(GroupNorm):
    """Normalisation of each channel by itself (Ulyanov et al., 2016): as many groups as ``channels``."""

    def __init__(
        self,
        channels: int,
        use_scale: bool = True,
        use_bias: bool = True,
        epsilon: float = 1e-5,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(channels, use_scale, use_bias, epsilon, name=name)
        self.set_shapes(input=(None, channels, ...))


class BatchNorm2D(Model):
    """Batch normalisation (Ioffe and Szegedy, 2015): ``input [n, c, *s]`` of any dimensions of space.

    In training each channel is normalised over the batch, and the states ``mean`` and ``variance`` ``[c]`` move
    towards the batch's by ``momentum``; otherwise the states are used. They are state, not parameters: pass
    ``state=`` and keep what comes back.
    """

    def __init__(
        self,
        use_scale: bool = True,
        use_bias: bool = True,
        momentum: float = 0.1,
        epsilon: float = 1e-5,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.add_input("input", "batch channels *s", "float")
        self.add_state("mean", ("channels",), zeros)
        self.add_state("variance", ("channels",), ones)
        norm = self.add(
            p.BatchNormalise(momentum, epsilon),
            "norm",
            input="input",
            mean="mean",
            variance="variance",
            output="normed",
        )
        self.update_state("mean", norm.next_mean)
        self.update_state("variance", norm.next_variance)
        _affine(self, "normed", use_scale, use_bias)


class BatchNorm1D(BatchNorm2D):
    __doc__ = BatchNorm2D.__doc__
