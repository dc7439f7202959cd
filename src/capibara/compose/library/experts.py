"""Mixtures of experts: feed-forward layers of which each token uses a few."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from capibara.compose import primitives as p
from capibara.compose.errors import WiringError
from capibara.compose.initializers import Scaled, zeros
from capibara.compose.library.adapters import Adapter, part_adapters
from capibara.compose.library.layers import GatedMLP
from capibara.compose.logical.arguments import flag, whole
from capibara.compose.logical.model import Model
from capibara.compose.primitives.experts import EXPERT_MATRICES

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
        top: experts a token. router, normalise, scale, groups, top_groups, group_score: see
            :class:`~capibara.compose.primitives.ChooseExperts`.
        choice_bias: a parameter ``router_bias`` (float32, never trained) is added to the scores that experts are
            chosen by.
        shared: inner size of a feed-forward layer that every token uses besides; None: there is none.
        activation, limit, alpha: see :class:`~capibara.compose.primitives.ExpertMLP`.
        use_bias: of the experts' matrices, and of the shared layer's. logit_bias: of the router's scores before the
            softmax or sigmoid.
        adapters: those of ``"gate"``, ``"up"`` and ``"down"``, of one rank and scale, without dropout or a quantized
            base: each expert has ``gate_lora_a [dimension, rank]`` and ``gate_lora_b [rank, hidden]`` of its own beside
            ``gate``, and so on. The shared layer has them too.
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
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        choice_bias: bool = False,
        shared: int | None = None,
        activation: str = "silu",
        limit: float = 7.0,
        alpha: float = 1.702,
        use_bias: bool = False,
        logit_bias: bool = False,
        adapters: Mapping[str, Adapter] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        for key, value in (("dimension", dimension), ("hidden", hidden), ("count", count)):
            whole(key, value)
        low = {part: one for part, one in part_adapters(adapters, EXPERT_MATRICES).items() if one is not None}
        _check_adapters(low)
        whole("shared", shared, optional=True)
        flag("use_bias", use_bias)
        flag("logit_bias", logit_bias)
        choose = p.ChooseExperts(
            top,
            router,
            normalise,
            scale,
            groups=groups,
            top_groups=top_groups,
            group_score=group_score,
            use_bias=choice_bias,
        )
        self.add_input("input", ("*b", dimension), "float")
        self.add_parameter("router", (dimension, count), Scaled(), axes=("embed", None), keep_dtype=True)
        bias = {}
        if choice_bias:
            # It changes by thousandths: as float32 whatever the other parameters are.
            own: dict[str, Any] = {"axes": (None,), "dtype": "float32", "keep_dtype": True}
            self.add_parameter("router_bias", (count,), zeros, **own)
            bias = {"bias": "router_bias"}
        inner, outer = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.add_parameter("gate", (count, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("up", (count, dimension, hidden), Scaled(skip=1), axes=inner)
        self.add_parameter("down", (count, hidden, dimension), Scaled(skip=1), axes=outer)
        self.add(p.Rows(), "rows", input="input", output="tokens")
        self.add(p.Cast("accumulate"), "wide", input="tokens", output="wide_tokens")
        scores = "products" if logit_bias else "logits"
        self.add(p.Dense(), "scores", input="wide_tokens", weight="router", output=scores)
        if logit_bias:
            self.add_parameter("logit_bias", (count,), zeros, axes=(None,), keep_dtype=True)
            self.add(p.Add(), "biased", left=scores, right="logit_bias", output="logits")
        biases = {}
        if use_bias:
            self.add_parameter("gate_bias", (count, hidden), zeros, axes=("experts", "mlp"))
            self.add_parameter("up_bias", (count, hidden), zeros, axes=("experts", "mlp"))
            self.add_parameter("down_bias", (count, dimension), zeros, axes=("experts", "embed"))
            biases = {key: key for key in ("gate_bias", "up_bias", "down_bias")}
        pairs = {}
        for part, adapter in low.items():
            ins, outs = (hidden, dimension) if part == "down" else (dimension, hidden)
            axes = outer if part == "down" else inner
            names = f"{part}_lora_a", f"{part}_lora_b"
            drawn, rank = Scaled(1.0, skip=1), adapter.rank
            self.add_parameter(names[0], (count, ins, rank), drawn, axes=(*axes[:2], None))
            self.add_parameter(names[1], (count, rank, outs), zeros, axes=("experts", None, axes[2]))
            pairs |= {f"{part}_a": names[0], f"{part}_b": names[1]}
        scales = {one.scale for one in low.values()} or {1.0}
        self.add(choose, "choose", input="logits", **bias, weights="weights", experts="experts")
        self.add(
            p.ExpertMLP(
                activation,
                limit=limit,
                alpha=alpha,
                use_bias=use_bias,
                adapters=tuple(low),
                adapter_scale=scales.pop(),
            ),
            "mixture",
            input="tokens",
            weights="weights",
            experts="experts",
            gate="gate",
            up="up",
            down="down",
            **biases,
            **pairs,
            output="mixed",
        )
        output = "output" if shared is None else "routed"
        self.add(p.Unflatten(), "restore", input="mixed", like="input", output=output)
        if shared is not None:
            between = _ACTIVATIONS.get(activation) or partial(p.ClampedSwiGLU, limit, alpha)
            always = GatedMLP(shared, dimension, activation=between, use_bias=use_bias, adapters=low)
            self.add(always, "shared", input="input", output="shared_out")
            self.add(p.Add(), "total", left="routed", right="shared_out", output="output")
        self.set_shapes(output=("*b", dimension))
        self.expose("output")


def _check_adapters(given: Mapping[str, Adapter]) -> None:
    if any(one.dropout or one.base is not None for one in given.values()):
        raise WiringError("adapters: those of experts have neither dropout nor a quantized base")
    if len({(one.rank, one.scale) for one in given.values()}) > 1:
        raise WiringError("adapters: those of experts need one rank and one scale")


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
