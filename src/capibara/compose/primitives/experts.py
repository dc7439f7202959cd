"""Mixtures of experts: routing tokens to experts and back.

With places, ``e`` experts have ``c`` each, and a token that finds none is dropped (``Route`` to ``ExpertDense``).
Without, rows are sorted by expert, and each expert takes all of its own (``ChooseExperts`` to ``SumExperts``).
"""

from __future__ import annotations

import math

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import choice, flag, number, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape, set_size
from capibara.compose.primitives.rules import fix, product

__all__ = [
    "ChooseExperts",
    "Dispatch",
    "ExpertCombine",
    "ExpertDense",
    "GroupedDense",
    "Route",
    "Rows",
    "SortByExpert",
    "SumExperts",
    "Unflatten",
]


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
    """

    def __init__(
        self,
        top: int = 2,
        router: str = "softmax",
        normalise: bool = True,
        scale: float = 1.0,
        *,
        name: str | None = None,
    ) -> None:
        whole("top", top)
        choice("router", router, ("softmax", "sigmoid"))
        flag("normalise", normalise)
        number("scale", scale, above=True)

        def rule(logits: Shape, weights: Shape, experts: Shape) -> bool:
            rows, found, numbers = logits.dims(), weights.dims(), experts.dims()
            assert rows is not None
            assert found is not None
            assert numbers is not None
            count = rows[1].find().size
            if count is not None and count < top:
                raise ShapeError(f"top={top} of {count} experts")
            set_size(found[1], top)
            return fix(numbers[1], top)

        super().__init__(
            "choose_experts",
            {"input": ("n e", "float")},
            {"weights": ("n k", "float"), "experts": ("n k", "int")},
            {"top": top, "router": router, "normalise": normalise, "scale": float(scale)},
            constraints=[(rule, ("input", "weights", "experts"))],
            accumulates=True,
            name=name,
        )


class SortByExpert(Primitive):
    """A row for each token and each of its experts, those of one expert together, in the order of the experts.

    ``input [n, d]``, ``experts int [n, k]`` → ``output [n k, d]``, ``order int [n k]``, which of ``n k`` choices
    (token by token) each row is, and ``sizes int [count]``, the number of rows of each expert.

    Args:
        count: experts that there are.
    """

    def __init__(self, count: int, *, name: str | None = None) -> None:
        whole("count", count)

        def rule(experts: Shape, output: Shape, order: Shape, sizes: Shape) -> bool:
            chosen, rows, places, each = (s.dims() for s in (experts, output, order, sizes))
            assert each is not None
            set_size(each[0], count)
            if chosen is None or rows is None or places is None:
                return False
            total = product(chosen)
            return fix(rows[0], total) and fix(places[0], total)

        super().__init__(
            "sort_by_expert",
            {"input": ("n d", "float"), "experts": ("n k", "int")},
            {"output": ("m d", "float"), "order": ("m", "int"), "sizes": ("e", "int")},
            {"count": count},
            constraints=[(rule, ("experts", "output", "order", "sizes"))],
            name=name,
        )


class GroupedDense(Primitive):
    """Rows sorted by expert, each times the matrix of its own.

    ``input [m, in]``, ``weight [e, in, out]``, ``sizes int [e]`` → ``output [m, out]``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "grouped_dense",
            {"input": ("m in", "float"), "weight": ("e in out", "float"), "sizes": ("e", "int")},
            {"output": ("m out", "float")},
            accumulates=True,
            name=name,
        )


class SumExperts(Primitive):
    """Rows of :class:`SortByExpert` back to tokens: ``input [n k, d]``, ``order``, ``weights [n, k]`` → ``[n, d]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "sum_experts",
            {"input": ("m d", "float"), "order": ("m", "int"), "weights": ("n k", "float")},
            {"output": ("n d", "float")},
            accumulates=True,
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
