"""Mixtures of experts: feed-forward layers of which each token uses a few."""

from __future__ import annotations

from capibara.compose import primitives as p
from capibara.compose.initializers import Scaled
from capibara.compose.library.layers import GatedMLP
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.model import Model

__all__ = ["Experts", "MixtureOfExperts"]


_ACTIVATIONS = {
    "silu": p.Silu,
    "gelu": lambda: p.Gelu(approximate=False),
    "gelu_tanh": p.Gelu,
    "relu": p.Relu,
}


class Experts(Model):
    """Each token goes to the ``top`` experts that a router chooses; none is dropped (Gale et al., 2022).

    ``input [*b, dimension]`` → ``output`` of the same shape: the sum of the experts' outputs, with the router's
    weights. Each expert is a gated feed-forward layer. The router computes in the accumulation dtype.

    Args:
        dimension, hidden: sizes of the input and of the inner layer.
        count: experts; their weights have the logical axis "experts", to be spread over a mesh.
        top: experts a token. router, normalise, scale: see :class:`~capibara.compose.primitives.ChooseExperts`.
        shared: inner size of a feed-forward layer that every token uses besides; None: there is none.
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``.
    """

    def __init__(
        self,
        dimension: int,
        hidden: int,
        count: int,
        top: int = 2,
        *,
        router: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        shared: int | None = None,
        activation: str = "silu",
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for key, value in (("dimension", dimension), ("hidden", hidden), ("count", count)):
            whole(key, value)
        whole("shared", shared, optional=True)
        choose = p.ChooseExperts(top, router, normalise, scale)
        self.add_input("input", ("*b", dimension), "float")
        self.add_parameter("router", (dimension, count), Scaled(), axes=("embed", None), keep_dtype=True)
        inner, outer = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.add_parameter("gate", (count, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("up", (count, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("down", (count, hidden, dimension), Scaled(skip=1), axes=outer)
        self.add(p.Rows(), "rows", input="input", output="tokens")
        self.add(p.Cast("accumulate"), "wide", input="tokens", output="wide_tokens")
        self.add(p.Dense(), "scores", input="wide_tokens", weight="router", output="logits")
        self.add(choose, "choose", input="logits", weights="weights", experts="experts")
        self.add(
            p.ExpertMLP(activation),
            "mixture",
            input="tokens",
            weights="weights",
            experts="experts",
            gate="gate",
            up="up",
            down="down",
            output="mixed",
        )
        output = "output" if shared is None else "routed"
        self.add(p.Unflatten(), "restore", input="mixed", like="input", output=output)
        if shared is not None:
            always = GatedMLP(shared, dimension, activation=_ACTIVATIONS[activation])
            self.add(always, "shared", input="input", output="shared_out")
            self.add(p.Add(), "total", left="routed", right="shared_out", output="output")
        self.set_shapes(output=("*b", dimension))
        self.expose("output")


class MixtureOfExperts(Model):
    """Each token goes to the ``top`` experts that a router chooses (Shazeer et al., 2017; Fedus et al., 2022).

    ``input [*b, dimension]`` → ``output`` of the same shape, and ``balance []``, the load-balancing loss to
    add with a small
    weight. Each expert is a SwiGLU layer. Tokens that find no place get 0: add the input around the layer.

    Args:
        dimension, hidden: sizes of the input and of the inner layer.
        num_experts: their weights have the logical axis "experts", to be spread over a mesh.
        top: experts a token. capacity_factor, normalise: see :class:`~capibara.compose.primitives.Route`.
    """

    def __init__(
        self,
        dimension: int,
        hidden: int,
        num_experts: int,
        top: int = 2,
        capacity_factor: float = 1.25,
        normalise: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for key, value in (("dimension", dimension), ("hidden", hidden), ("num_experts", num_experts)):
            whole(key, value)
        self.add_input("input", ("*b", dimension), "float")
        self.add_parameter("router", (dimension, num_experts), Scaled(), axes=("embed", None))
        inner, outer = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.add_parameter("gate", (num_experts, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("up", (num_experts, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("down", (num_experts, hidden, dimension), Scaled(skip=1), axes=outer)
        self.add(p.Rows(), "rows", input="input", output="tokens")
        self.add(p.Dense(), "scores", input="tokens", weight="router", output="logits")
        self.add(
            p.Route(top, capacity_factor, normalise),
            "route",
            input="logits",
            dispatch="dispatch",
            combine="combine",
            balance="balance",
        )
        self.add(p.Dispatch(), "there", input="tokens", dispatch="dispatch", output="seated")
        self.add(p.ExpertDense(), "gated", input="seated", weight="gate", output="gates")
        self.add(p.Silu(), "active", input="gates", output="opened")
        self.add(p.ExpertDense(), "raised", input="seated", weight="up", output="ups")
        self.add(p.Multiply(), "product", left="opened", right="ups", output="inner")
        self.add(p.ExpertDense(), "lowered", input="inner", weight="down", output="downs")
        self.add(p.ExpertCombine(), "back", input="downs", combine="combine", output="mixed")
        self.add(p.Unflatten(), "restore", input="mixed", like="input", output="output")
        self.expose("balance", "output")
