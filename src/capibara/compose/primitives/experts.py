"""Mixtures of experts: routing tokens to experts and back.

With places, ``e`` experts have ``c`` each, and a token that finds none is dropped (``Route`` to ``ExpertDense``).
Without, each expert takes all of its own tokens (``ChooseExperts``, ``ExpertMLP``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import choice, flag, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size
from capibara.compose.primitives.rules import fix, product

__all__ = [
    "EXPERT_MATRICES",
    "ChooseExperts",
    "ClampedSwiGLU",
    "Dispatch",
    "ExpertCombine",
    "ExpertDense",
    "ExpertMLP",
    "Route",
    "Rows",
    "Unflatten",
    "expert_extras",
]

EXPERT_MATRICES = ("gate", "up", "down")
"""The matrices of an expert, in the order in which :class:`ExpertMLP` has them."""


class Route(Primitive):
    """Which token goes to which expert (Shazeer et al., 2017; Lepikhin et al., 2021).

    ``input [tokens, e]``, the router's logits → ``dispatch [tokens, e, c]`` (0 or 1), ``combine [tokens, e,
    c]`` (with
    the gate's weights) and ``balance []``, the load-balancing loss ``e Σ share · probability`` (Fedus et al.,
    2022), which is 1 for an even load.

    Args:
        top: experts a token.
        capacity_factor: places of each expert, ``c = ceil(top tokens capacity_factor / e)``. First choices are
            seated before second ones, then earlier tokens before later ones; who finds no place is dropped.
        normalise: the weights of a token's experts sum to 1 before any of them is dropped.
    """

    def __init__(
        self,
        top: int = 2,
        capacity_factor: float = 1.25,
        normalise: bool = True,
        *,
        name: str | None = None,
    ) -> None:
        whole("top", top)
        number("capacity_factor", capacity_factor, above=True)
        if not isinstance(normalise, bool):
            raise WiringError(f"normalise={normalise!r} must be True or False")

        def rule(logits: Shape, dispatch: Shape) -> bool:
            rows, places = logits.dims(), dispatch.dims()
            assert rows is not None
            assert places is not None
            tokens, experts = (d.find().size for d in rows)
            if experts is not None and experts < top:
                raise ShapeError(f"top={top} of {experts} experts")
            if tokens is None or experts is None:
                return False
            set_size(places[2], max(1, math.ceil(top * tokens * capacity_factor / experts)))
            return True

        super().__init__(
            "moe_route",
            {"input": ("tokens e", "float")},
            {
                "dispatch": ("tokens e c", "float"),
                "combine": ("tokens e c", "float"),
                "balance": ((), "float"),
            },
            {"top": top, "capacity_factor": float(capacity_factor), "normalise": normalise},
            constraints=[(rule, ("input", "dispatch"))],
            accumulates=True,
            name=name,
        )


class Dispatch(Primitive):
    """Tokens to places: ``input [tokens, d]``, ``dispatch [tokens, e, c]`` → ``output [e, c, d]``, empty places 0."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "moe_dispatch",
            {"input": ("tokens d", "float"), "dispatch": ("tokens e c", "float")},
            {"output": ("e c d", "float")},
            constrain_output=True,
            name=name,
        )


class ExpertCombine(Primitive):
    """Places back to tokens: ``input [e, c, d]``, ``combine [tokens, e, c]`` → ``output [tokens, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "moe_combine",
            {"input": ("e c d", "float"), "combine": ("tokens e c", "float")},
            {"output": ("tokens d", "float")},
            name=name,
        )


class ExpertDense(Primitive):
    """A matrix product of each expert's own: ``input [e, c, in]``, ``weight [e, in, out]`` → ``[e, c, out]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "expert_dense",
            {"input": ("e c in", "float"), "weight": ("e in out", "float")},
            {"output": ("e c out", "float")},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class ChooseExperts(Primitive):
    """The experts of each token, and their weights: ``input [n, e]`` → ``weights [n, k]``, ``experts int [n, k]``.

    Args:
        top: ``k``, experts a token: those with the highest scores.
        router: scores are ``"softmax"`` over all experts, or the ``"sigmoid"`` of each.
        normalise: the weights of a token sum to 1.
        scale: factor on the weights, after that.
        groups: parts of equal size that the experts have, in order (DeepSeek-AI, arXiv:2405.04434). top_groups: how
            many of them a token chooses from. group_score: a group's score is its experts' highest, ``"max"``, or the
            sum of its two highest, ``"top2"``.
        use_bias: an input ``bias [e]`` is added to the scores for choosing, and does not count in the weights
            (Wang et al., arXiv:2408.15664). It has no gradient.
    """

    def __init__(
        self,
        top: int = 2,
        router: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        *,
        groups: int = 1,
        top_groups: int = 1,
        group_score: str = "max",
        use_bias: bool = False,
        name: str | None = None,
    ) -> None:
        whole("top", top)
        choice("router", router, ("softmax", "sigmoid"))
        flag("normalise", normalise)
        flag("use_bias", use_bias)
        number("scale", scale, above=True)
        whole("groups", groups)
        whole("top_groups", top_groups)
        choice("group_score", group_score, ("max", "top2"))
        if top_groups > groups:
            raise WiringError(f"top_groups={top_groups} must be at most groups={groups}")

        def rule(logits: Shape, weights: Shape, experts: Shape) -> bool:
            rows, found, numbers = logits.dims(), weights.dims(), experts.dims()
            assert rows is not None
            assert found is not None
            assert numbers is not None
            count = rows[1].find().size
            if count is not None and count % groups:
                raise ShapeError(f"{count} experts in groups={groups} of equal size")
            if count is not None and count // groups * top_groups < top:
                raise ShapeError(
                    f"top={top} of {count} experts"
                    + f" in top_groups={top_groups} of {groups}" * (groups > 1)
                )
            set_size(found[1], top)
            return fix(numbers[1], top)

        super().__init__(
            "choose_experts",
            {"input": ("n e", "float")} | ({"bias": (("e",), "float")} if use_bias else {}),
            {"weights": ("n k", "float"), "experts": ("n k", "int")},
            {"top": top, "router": router, "normalise": normalise, "scale": float(scale)}
            | (
                {}
                if groups == 1
                else {"groups": groups, "top_groups": top_groups, "group_score": group_score}
            ),
            constraints=[(rule, ("input", "weights", "experts"))],
            accumulates=True,
            name=name,
        )


class ExpertMLP(Primitive):
    """Gated feed-forward layers, each for the tokens that chose it; none is dropped (Gale et al., 2022).

    ``input [n, d]``, ``weights [n, k]`` and ``experts int [n, k]`` of :class:`ChooseExperts`, ``gate`` and ``up [e, d,
    h]``, ``down [e, h, d]`` → ``output [n, d]``, the sum over a token's experts of ``weight · (activation(x gate) * (x
    up)) down``.

    Args:
        activation: ``"silu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"relu"``; or ``"swiglu_clamped"``, which replaces the
            product, too: :class:`ClampedSwiGLU`, with ``limit`` and ``alpha``.
        use_bias: inputs ``gate_bias`` and ``up_bias [e, h]`` and ``down_bias [e, d]`` are added to the three products.
        adapters: those of ``"gate"``, ``"up"`` and ``"down"`` that have low-rank adapters, with the inputs ``gate_a
            [e, d, r]`` and ``gate_b [e, r, h]`` (``up`` the same, ``down_a [e, h, r]``, ``down_b [e, r, d]``): to each
            product of ``x`` is added ``adapter_scale · (x a) b``.
        adapter_scale: usually ``alpha / r``.
    """

    def __init__(
        self,
        activation: str = "silu",
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        use_bias: bool = False,
        adapters: Sequence[str] = (),
        adapter_scale: float = 1.0,
        name: str | None = None,
    ) -> None:
        choice("activation", activation, ("silu", "gelu", "gelu_tanh", "relu", "swiglu_clamped"))
        for part in adapters:
            choice("adapters", part, EXPERT_MATRICES)
        number("adapter_scale", adapter_scale)
        adapted = [part for part in EXPERT_MATRICES if part in adapters]
        number("limit", limit, above=True)
        number("alpha", alpha, above=True)
        flag("use_bias", use_bias)
        clamped = activation == "swiglu_clamped"
        biases = {"gate_bias": ("e h", "float"), "up_bias": ("e h", "float"), "down_bias": ("e d", "float")}
        pairs: dict[str, tuple[str, str]] = {}
        for part in adapted:
            ins, outs = ("h", "d") if part == "down" else ("d", "h")
            pairs[f"{part}_a"] = f"e {ins} r", "float"
            pairs[f"{part}_b"] = f"e r {outs}", "float"
        super().__init__(
            "expert_mlp",
            {
                "input": ("n d", "float"),
                "weights": ("n k", "float"),
                "experts": ("n k", "int"),
                "gate": ("e d h", "float"),
                "up": ("e d h", "float"),
                "down": ("e h d", "float"),
            }
            | (biases if use_bias else {})
            | pairs,
            {"output": ("n d", "float")},
            {"activation": activation}
            | ({"limit": float(limit), "alpha": float(alpha)} if clamped else {})
            | ({"adapters": tuple(adapted), "adapter_scale": float(adapter_scale)} if adapted else {}),
            accumulates=True,
            name=name,
        )


def expert_extras(
    arrays: Sequence[Any], adapters: Sequence[str]
) -> tuple[dict[str, Any], dict[str, tuple[Any, Any]]]:
    """The biases and the adapters ``(a, b)`` of an :class:`ExpertMLP`'s matrices, each by the matrix's name.

    Args:
        arrays: its inputs after ``down``, in their order. adapters: those of its options.
    """
    pairs = arrays[len(arrays) - 2 * len(adapters) :]
    biases = arrays[: len(arrays) - len(pairs)]
    return (
        dict(zip(EXPERT_MATRICES, biases, strict=bool(biases))),
        {part: (pairs[2 * n], pairs[2 * n + 1]) for n, part in enumerate(adapters)},
    )


class ClampedSwiGLU(Primitive):
    """``g sigmoid(alpha g) (u + 1)`` with ``g = min(gate, limit)`` and ``u`` = ``up`` between ±``limit``.

    The activation of gpt-oss (arXiv:2508.10925). ``gate`` and ``up [*b]`` → ``output [*b]``.
    """

    def __init__(self, limit: float = 7.0, alpha: float = 1.702, *, name: str | None = None) -> None:
        number("limit", limit, above=True)
        number("alpha", alpha, above=True)
        super().__init__(
            "clamped_swiglu",
            {"gate": ("*b", "float"), "up": ("*b", "float")},
            {"output": ("*b", "float")},
            {"limit": float(limit), "alpha": float(alpha)},
            name=name,
        )


class Rows(Primitive):
    """All leading dimensions made one: ``input [*b, d]`` → ``output [n, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(before: Shape, after: Shape) -> bool:
            dims, out = before.dims(), after.dims()
            if dims is None or out is None:
                return False
            return fix(out[0], product(dims[:-1]))

        super().__init__(
            "rows",
            {"input": ("*b d", "T")},
            {"output": ("n d", "T")},
            constraints=[(rule, ("input", "output"))],
            name=name,
        )


class Unflatten(Primitive):
    """Rows back in the shape they were flattened from: ``input [n, d]``, ``like [*b, e]`` → ``output [*b, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "unflatten",
            {"input": ("n d", "T"), "like": ("*b e", None)},
            {"output": ("*b d", "T")},
            name=name,
        )
