"""Single layers: linear, embedding, normalisation, feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Normal, Scaled, ones, zeros
from capibara.compose.library.adapters import Adapter, part_adapters
from capibara.compose.logical.arguments import flag, whole
from capibara.compose.logical.model import Block, IOKey, Model

__all__ = [
    "MLP",
    "Embedding",
    "FeedForward",
    "GatedMLP",
    "Layer",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "SwiGLU",
]

Axes = tuple[str | None, str | None]


class Linear(Model):
    """``output = input @ weight + bias``: ``input [*b, in]``, ``weight [in, out]``, ``bias [out]``.

    Args:
        dimension: the size of the output; None leaves it to what the output is connected to.
        use_bias: add a bias.
        axes: logical axis names of the weight.
        init: initialiser of the weight; by default variance 1/in.
        adapter: a low-rank product that is added; None for none.
        inputs: the size of the input; None leaves it to what it is connected to.
    """

    def __init__(
        self,
        dimension: int | None = None,
        use_bias: bool = True,
        *,
        axes: Axes = (None, None),
        init: Callable[..., Any] | None = None,
        adapter: Adapter | None = None,
        inputs: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("dimension", dimension, optional=True)
        whole("inputs", inputs, optional=True)
        out, into = "out" if dimension is None else dimension, "in" if inputs is None else inputs
        self.add_input("input", ("*b", into), "float")
        product = "product" if use_bias else "output"
        own = "own_product" if adapter else product
        if adapter and adapter.base:
            adapter.add_base(self, own, ins=(into,), outs=(out,), out_axes=axes[1:])  # type: ignore[arg-type]
        else:
            self.add_parameter("weight", (into, out), init or Scaled(1.0), axes=axes)
            self.add(p.Dense(), "product", input="input", weight="weight", output=own)
        if adapter:
            of = {"ins": (into,), "outs": (out,), "in_axes": axes[:1], "out_axes": axes[1:]}
            adapter.join(self, own, product, **of, down=p.Dense(), up=p.Dense())
        if use_bias:
            self.add_parameter("bias", (out,), zeros, axes=axes[1:])
            self.add(p.Add(), "sum", left="product", right="bias", output="output")
        self.expose("output")


class Embedding(Model):
    """Rows of a table by index: ``input int [*b]`` → ``output [*b, dimension]``; ``weight [vocab, dimension]``."""

    def __init__(
        self,
        vocab_size: int,
        dimension: int,
        *,
        axes: Axes = ("vocab", "embed"),
        init: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        whole("vocab_size", vocab_size)
        whole("dimension", dimension)
        self.add_input("input", "*b", "int")
        self.add_parameter("weight", (vocab_size, dimension), init or Normal(0.02), axes=axes)
        self.add(p.Lookup(), "lookup", table="weight", indices="input", output="output")
        self.expose("output")


class RMSNorm(Model):
    """Root-mean-square normalisation with a scale: ``input [*b, d]`` → ``output [*b, d]``.

    ``offset`` is added to the scale; with 1 (Gemma) the parameter starts at zero, otherwise at one. ``groups``: how
    many parts of ``d`` are normalised, each by itself.
    """

    def __init__(
        self,
        epsilon: float = 1e-5,
        *,
        offset: float = 0.0,
        groups: int = 1,
        axis: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self.add_input("input", "*b d", "float")
        self.add_parameter("scale", ("d",), zeros if offset else ones, axes=(axis,), keep_dtype=True)
        norm = p.Normalise("rms", epsilon, offset=offset, groups=groups)
        self.add(norm, "norm", input="input", scale="scale", output="output")
        self.expose("output")


class LayerNorm(Model):
    """Layer normalisation: ``input [*b, d]`` → ``output [*b, d]``, by default with scale and bias."""

    def __init__(
        self,
        epsilon: float = 1e-5,
        use_scale: bool = True,
        use_bias: bool = True,
        *,
        axis: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        flag("use_bias", use_bias)
        norm = p.Normalise("layer", epsilon, use_scale)
        self.add_input("input", "*b d", "float")
        joined = {"input": "input", "output": "normed" if use_bias else "output"}
        if use_scale:
            self.add_parameter("scale", ("d",), ones, axes=(axis,), keep_dtype=True)
            joined["scale"] = "scale"
        if use_bias:
            self.add_parameter("bias", ("d",), zeros, axes=(axis,))
        self.add(norm, "norm", **joined)
        if use_bias:
            self.add(p.Add(), "sum", left="normed", right="bias", output="output")
        self.expose("output")


class GatedMLP(Model):
    """Gated feed-forward layer: ``(activation(x W_gate) * (x W_up)) W_down`` (Shazeer, 2020).

    ``input [*b, d]`` → ``output [*b, d]``; ``hidden`` is the inner size, ``activation`` a block class such as ``Gelu``
    or a function that makes a block, which may also take both products: ``ClampedSwiGLU``, with the inputs ``gate`` and
    ``up``; ``adapters``: those of ``"gate"``, ``"up"`` and ``"down"``.
    """

    def __init__(
        self,
        hidden: int,
        dimension: int | None = None,
        *,
        activation: Callable[[], Block] = p.Silu,
        use_bias: bool = False,
        adapters: Mapping[str, Adapter] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        low = part_adapters(adapters, ("gate", "up", "down"))
        whole("hidden", hidden)
        whole("dimension", dimension, optional=True)
        flag("use_bias", use_bias)
        self.add_input("input", ("*b", dimension or "d"), "float")
        inner, outer = ("embed", "mlp"), ("mlp", "embed")
        self.add(
            Linear(hidden, use_bias, axes=inner, adapter=low["gate"], inputs=dimension),
            "gate",
            input="input",
            output="gate_out",
        )
        self.add(
            Linear(hidden, use_bias, axes=inner, adapter=low["up"], inputs=dimension),
            "up",
            input="input",
            output="up_out",
        )
        between = _made("activation", activation)
        if "up" in between.input_keys:
            self.add(between, gate="gate_out", up="up_out", output="product")
        else:
            self.add(between, input="gate_out", output="active")
            self.add(p.Multiply(), left="active", right="up_out", output="product")
        down = Linear(dimension, use_bias, axes=outer, adapter=low["down"], inputs=hidden)
        self.add(down, "down", input="product", output="output")
        self.set_shapes(output=("*b", dimension or "d"))
        self.expose("output")


class SwiGLU(GatedMLP):
    """:class:`GatedMLP` with ``silu``: ``(silu(x W_gate) * (x W_up)) W_down``."""

    def __init__(self, hidden: int, dimension: int | None = None, *, name: str | None = None) -> None:
        super().__init__(hidden, dimension, name=name)


class FeedForward(Model):
    """Two linear layers and an activation between them: ``activation(x W_up) W_down``.

    ``input [*b, d]`` → ``output [*b, d]``; ``hidden`` is the inner size, ``activation`` and ``adapters`` as for
    :class:`GatedMLP`.
    """

    def __init__(
        self,
        hidden: int,
        dimension: int | None = None,
        *,
        activation: Callable[[], Block] = p.Gelu,
        use_bias: bool = True,
        adapters: Mapping[str, Adapter] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        low = part_adapters(adapters, ("up", "down"))
        whole("hidden", hidden)
        whole("dimension", dimension, optional=True)
        flag("use_bias", use_bias)
        self.add_input("input", ("*b", dimension or "d"), "float")
        up = Linear(hidden, use_bias, axes=("embed", "mlp"), adapter=low["up"], inputs=dimension)
        self.add(up, "up", input="input", output="up_out")
        self.add(_made("activation", activation), input="up_out", output="active")
        down = Linear(dimension, use_bias, axes=("mlp", "embed"), adapter=low["down"], inputs=hidden)
        self.add(down, "down", input="active", output="output")
        self.set_shapes(output=("*b", dimension or "d"))
        self.expose("output")


class Layer(Model):
    """A linear layer and an activation: ``activation(input @ weight + bias)``.

    Args:
        activation: a block such as ``Relu()``, its class, or a function that makes one.
        dimension: the size of the output; None leaves it to what the output is connected to.
    """

    def __init__(
        self,
        activation: Block | Callable[[], Block],
        dimension: int | None = None,
        *,
        axes: Axes = (None, None),
        init: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        after = activation if isinstance(activation, Block) else _made("activation", activation)
        self.add_input("input", "*b in", "float")
        linear = Linear(dimension, axes=axes, init=init)
        self.add(linear, "linear", input="input", weight="weight", bias="bias", output="raw")
        self.add(after, "activation", input="raw", output="output")
        self.expose("output")


def _listed(name: str, value: Any) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise WiringError(f"{name}={value!r} must be a list, one entry a layer")
    return list(value)


def _made(name: str, make: Any) -> Block:
    """A fresh block from a class or a function; a ready block cannot be used in several layers."""
    made = make() if callable(make) and not isinstance(make, Block) else make
    if not isinstance(made, Block) or made is make:
        raise WiringError(
            f"{name}={make!r} must be a block class such as Relu, or a function that makes a block"
        )
    return made


class MLP(Model):
    """Linear layers with activations between them.

    Two forms: ``MLP(input_size=784, hidden_sizes=[256, 128], output_size=10)`` puts ``activation`` after each
    hidden layer; ``MLP(activations=[Relu(), Tanh()], dimensions=[64, 10])`` names the activation after each layer.
    """

    def __init__(
        self,
        input_size: int | None = None,
        hidden_sizes: Sequence[int] | None = None,
        output_size: int | None = None,
        *,
        activation: Callable[[], Block] = p.Relu,
        activations: Iterable[Block | type[Block] | None] | None = None,
        dimensions: Sequence[int | None] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        guide = (hidden_sizes, output_size) != (None, None)
        if guide == (dimensions is not None):
            raise WiringError(
                "MLP needs either input_size, hidden_sizes and output_size, or activations and dimensions"
            )
        whole("input_size", input_size, optional=True)
        after: list[Block | None]
        if guide:
            hidden = _listed("hidden_sizes", hidden_sizes or ())
            sizes: list[int | None] = [*hidden, output_size]
            after = [*(_made("activation", activation) for _ in hidden), None]
        else:
            sizes = _listed("dimensions", dimensions)
            given = _listed("activations", (None,) * len(sizes) if activations is None else activations)
            after = [a if a is None or isinstance(a, Block) else _made("activations", a) for a in given]
            if len(after) != len(sizes):
                raise WiringError(
                    f"activations has {len(after)} entries, dimensions has {len(sizes)}: give one each"
                )
        if not sizes:
            raise WiringError("an MLP needs at least one layer")
        self.add_input("input", ("*b", input_size or "in"), "float")
        at: Any = "input"
        for i, (size, block) in enumerate(zip(sizes, after, strict=True)):
            whole("size", size, optional=True)
            last = i == len(sizes) - 1
            axes: Axes = ("embed", "mlp") if i % 2 == 0 else ("mlp", "embed")
            linear = Linear(size, axes=axes)
            self.add(
                linear,
                f"layer_{i}",
                input=at,
                output="output" if last and block is None else f"layer_{i}_out",
            )
            at = linear.output
            if block is not None:
                self.add(
                    block, f"activation_{i}", input=at, output="output" if last else IOKey(f"hidden_{i}")
                )
                at = block.output
        self.expose("output")
