"""Layers in Mithril's layout: weights of products ``[out, in]``, scales and biases of images ``[1, c, 1, 1]``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from capibara import compose
from capibara.compose import TBD
from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import ones, zeros
from capibara.compose.logical.block import Block
from mithril.model import Model
from mithril.models.stored import stored

__all__ = [
    "MLP",
    "BatchNorm2D",
    "Convolution1D",
    "Convolution2D",
    "ElementWiseAffine",
    "Embedding",
    "GroupNorm",
    "Layer",
    "LayerNorm",
    "Linear",
]


class Linear(Model):
    """``output = input @ weight.T + bias``: ``input [*b, in]``, ``weight [out, in]``, ``bias [out]``.

    Args:
        dimension: the size of the output; None leaves it to what the output is connected to.
        use_bias: add a bias. input, weight, bias: values that the ports have.
    """

    places = "input weight output bias"

    def __init__(
        self,
        dimension: int | None = None,
        use_bias: bool = True,
        input: Any = TBD,
        weight: Any = TBD,
        bias: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, compose.Linear(dimension, use_bias), turned=("weight",))


class Layer(Model):
    """A :class:`Linear` and an activation, a block or its class."""

    places = "input weight bias output"

    def __init__(
        self,
        activation: Any,
        dimension: int | None = None,
        input: Any = TBD,
        weight: Any = TBD,
        bias: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, compose.Layer(_fresh(activation), dimension), turned=("weight",))


class MLP(Model):
    """Layers one after the other, with ``weight0 [out, in]``, ``bias0 [out]``, ``weight1`` …

    Two forms: ``MLP(activations=[Relu(), Buffer()], dimensions=[64, 10])``, Mithril's, and
    ``MLP(input_size=784, hidden_sizes=[256, 128], output_size=10)``, with ``activation`` after each hidden layer.

    Args:
        input_name_templates: other names than ``{"weight": "weight", "bias": "bias"}``.
        weights_biases: values of parameters, by name.
    """

    places = "input output"

    def __init__(
        self,
        activations: Iterable[Any] | None = None,
        dimensions: Sequence[int | None] | None = None,
        input_name_templates: dict[str, str] | None = None,
        input: Any = TBD,
        *,
        input_size: int | None = None,
        hidden_sizes: Sequence[int] | None = None,
        output_size: int | None = None,
        activation: Any = p.Relu,
        name: str | None = None,
        **weights_biases: Any,
    ) -> None:
        super().__init__(name=name, input=input, **weights_biases)
        guide = (hidden_sizes, output_size) != (None, None)
        if guide == (dimensions is not None):
            raise WiringError(
                "MLP: got neither or both of its forms, expected activations and dimensions, or input_size, "
                "hidden_sizes and output_size"
            )
        if dimensions is None:
            dimensions = [*(hidden_sizes or ()), output_size]
            activations = [*(_fresh(activation) for _ in hidden_sizes or ()), None]
        after = [None] * len(dimensions) if activations is None else [_fresh(a) for a in activations]
        if len(after) != len(dimensions) or not after:
            raise WiringError(
                f"activations: got {len(after)}, expected one for each of the {len(dimensions)} dimensions"
            )
        names = {"weight": "weight", "bias": "bias"} | (input_name_templates or {})
        self.add_input("input", ("*b", input_size or "in"), "float")
        at: Any = "input"
        for i, (size, block) in enumerate(zip(dimensions, after, strict=True)):
            layer = Linear(size) if block is None else Layer(block, size)
            keys = {key: f"{names[key]}{i}" for key in ("weight", "bias")}
            last = {"output": "output"} if i == len(after) - 1 else {}
            self.add(layer, f"layer_{i}", input=at, **keys, **last)
            at = layer.output
        self.expose("output")


def _fresh(activation: Any) -> Any:
    """A block of a class; a block, or None, as it is."""
    return activation if isinstance(activation, Block) or activation is None else activation()


class Embedding(Model):
    """Rows of a table by index: ``input int [*b]`` → ``output [*b, dim]``; ``weight [num_embeddings, dim]``."""

    places = "input weight output"

    def __init__(
        self,
        num_embeddings: int,
        dim: int,
        input: Any = TBD,
        weight: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight)
        stored(self, compose.Embedding(num_embeddings, dim))


class LayerNorm(Model):
    """Normalisation over the last dimension; ``weight [d]`` (with ``use_scale``), ``bias [d]`` (with ``use_bias``)."""

    places = "input output eps weight bias"

    def __init__(
        self,
        use_scale: bool = True,
        use_bias: bool = True,
        eps: float = 1e-5,
        input: Any = TBD,
        weight: Any = TBD,
        bias: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, compose.LayerNorm(eps, use_scale, use_bias), renamed={"scale": "weight"})


class GroupNorm(Model):
    """Group normalisation: ``input [n, c, h, w]``; ``weight``, ``bias [1, c, 1, 1]``."""

    places = "input output eps weight bias"

    def __init__(
        self,
        num_groups: int = 32,
        use_scale: bool = True,
        use_bias: bool = True,
        eps: float = 1e-5,
        input: Any = TBD,
        *,
        weight: Any = TBD,
        bias: Any = TBD,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        stored(self, compose.GroupNorm(num_groups, use_scale, use_bias, eps), spread=2)
        self.set_shapes(input=(None, None, None, None))


class ElementWiseAffine(Model):
    """``input * weight + bias``, broadcast; in Mithril both are inputs, not parameters."""

    places = "input weight bias output"

    def __init__(
        self, input: Any = TBD, weight: Any = TBD, bias: Any = TBD, *, name: str | None = None
    ) -> None:
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        self.add(p.Multiply(), left="input", right="weight", output="scaled")
        self.add(p.Add(), left="scaled", right="bias", output="output")
        self.expose("output")


class BatchNorm2D(Model):
    """Batch normalisation with given statistics: ``input [n, c, h, w]``, ``running_mean``, ``running_var [c]``.

    Parameters: ``weight``, ``bias [1, c, 1, 1]``. For training, where the statistics are the batch's and the running
    ones are kept, use :class:`capibara.compose.BatchNorm2D` with ``state=`` and ``train=True``.
    """

    places = "input output"

    def __init__(
        self,
        num_features: int | None = None,
        use_scale: bool = True,
        use_bias: bool = True,
        eps: float = 1e-5,
        momentum: Any = 0.1,
        inference: bool = True,
        *,
        input: Any = TBD,
        weight: Any = TBD,
        bias: Any = TBD,
        name: str | None = None,
    ) -> None:
        if not inference:
            raise WiringError(
                "inference: got False, expected True. Use capibara.compose.BatchNorm2D(), which keeps its running "
                "statistics in state= and normalises by the batch when train=True"
            )
        super().__init__(name=name, input=input, weight=weight, bias=bias)
        channels = "channels" if num_features is None else num_features
        self.add_input("input", ("batch", channels, "height", "width"), "float")
        self.add_input("running_mean", (channels,), "float")
        self.add_input("running_var", (channels,), "float")
        self.add(p.Negate(), input="running_mean", output="below")
        self.add(p.ChannelAdd(), input="input", values="below", output="centred")
        self.add(p.Add(), left="running_var", right=float(eps), output="variance")
        self.add(p.Sqrt(), input="variance", output="deviation")
        self.add(p.Reciprocal(), input="deviation", output="factor")
        last = "normed" if use_scale or use_bias else "output"
        self.add(p.ChannelMultiply(), input="centred", values="factor", output=last)
        if use_scale:
            self.add_parameter("weight", (1, channels, 1, 1), ones)
            after = "scaled" if use_bias else "output"
            self.add(p.Multiply(), left=last, right="weight", output=after)
            last = after
        if use_bias:
            self.add_parameter("bias", (1, channels, 1, 1), zeros)
            self.add(p.Add(), left=last, right="bias", output="output")
        self.expose("output")


class _Convolution(Model):
    def _store(self, block: Block, dimensions: int) -> None:
        stored(self, block, spread=dimensions, whole=("weight",))


class Convolution1D(_Convolution):
    """``input [n, in, s]`` → ``output [n, out, t]``; ``weight [out, in, k]``, ``bias [1, out, 1]``."""

    places = "input weight stride padding dilation output"

    def __init__(
        self,
        kernel_size: int,
        out_channels: int | None = None,
        stride: int = 1,
        padding: Any = 0,
        dilation: int = 1,
        use_bias: bool = True,
        input: Any = TBD,
        weight: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight)
        self._store(compose.Convolution1D(kernel_size, out_channels, stride, padding, dilation, use_bias), 1)


class Convolution2D(_Convolution):
    """``input [n, in, h, w]`` → ``output [n, out, h', w']``; ``weight [out, in / groups, kh, kw]``, ``bias [1, out, 1,
    1]``."""

    places = "input weight stride padding dilation groups output"

    def __init__(
        self,
        kernel_size: Any,
        out_channels: int | None = None,
        stride: Any = (1, 1),
        padding: Any = (0, 0),
        dilation: Any = (1, 1),
        groups: int = 1,
        use_bias: bool = True,
        input: Any = TBD,
        weight: Any = TBD,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, input=input, weight=weight)
        self._store(
            compose.Convolution2D(kernel_size, out_channels, stride, padding, dilation, use_bias, groups), 2
        )
