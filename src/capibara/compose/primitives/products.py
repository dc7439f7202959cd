"""Matrix products with parameters, and lookups in tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

from capibara.compose.logical.arguments import choice, whole
from capibara.compose.logical.block import Primitive

__all__ = ["Dense", "Lookup", "Merge", "Project", "QuantisedProduct", "Unembed"]


class Dense(Primitive):
    """Matrix product with a weight: ``input [*b, in] @ weight [in, out]`` → ``output [*b, out]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "dense",
            {"input": ("*b in", "float"), "weight": ("in out", "float")},
            {"output": ("*b out", "float")},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Project(Primitive):
    """Product onto several heads at once: ``[*b, in] × [in, heads, dim]`` → ``[*b, heads, dim]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "project",
            {"input": ("*b in", "float"), "weight": ("in heads dim", "float")},
            {"output": ("*b heads dim", "float")},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class Merge(Primitive):
    """The product that joins heads again: ``[*b, heads, dim] × [heads, dim, out]`` → ``[*b, out]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "merge",
            {"input": ("*b heads dim", "float"), "weight": ("heads dim out", "float")},
            {"output": ("*b out", "float")},
            accumulates=True,
            constrain_output=True,
            name=name,
        )


class QuantisedProduct(Primitive):
    """A product with a weight of eight or four bits, which never exists decoded: ``[*b, *ins]`` → ``[*b, *outs]``.

    Through :func:`capibara.ops.linalg.quantised_matmul`; differentiable in ``input``. With ``rows = prod(outs)`` and
    ``inner = prod(ins)``: ``codes`` are int8 ``[rows, inner]``, or for ``"nf4"`` uint8 ``[rows, ceil(inner / 2)]``;
    ``scales`` are ``[rows, ceil(inner / group)]``.

    Args:
        kind: ``"int8"`` or ``"nf4"``. ins, outs: the sizes that are summed over, and those of the result.
        group: elements of a row that share a scale.
    """

    def __init__(
        self, kind: str, ins: Sequence[int], outs: Sequence[int], group: int = 64, *, name: str | None = None
    ) -> None:
        choice("kind", kind, ("int8", "nf4"))
        whole("group", group)
        for at, sizes in (("ins", ins), ("outs", outs)):
            for size in sizes:
                whole(at, size)
        rows, inner = math.prod(outs), math.prod(ins)
        super().__init__(
            "quantised_product",
            {
                "input": (("*b", *ins), "float"),
                "codes": ((rows, inner if kind == "int8" else -(-inner // 2)), "int"),
                "scales": ((rows, -(-inner // group)), "float"),
            },
            {"output": (("*b", *outs), "float")},
            {"kind": kind, "ins": len(ins), "outs": tuple(int(size) for size in outs), "group": int(group)},
            constrain_output=True,
            name=name,
        )


class Lookup(Primitive):
    """Rows of a table: ``table [vocab, d]``, ``indices int [*b]`` → ``output [*b, d]``. Clips indices in range."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "lookup",
            {"table": ("vocab d", "float"), "indices": ("*b", "int")},
            {"output": ("*b d", "float")},
            constrain_output=True,
            name=name,
        )


class Unembed(Primitive):
    """Scores against every row of a table: ``[*b, d] × table [vocab, d]`` → ``[*b, vocab]``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "unembed",
            {"input": ("*b d", "float"), "table": ("vocab d", "float")},
            {"output": ("*b vocab", "float")},
            accumulates=True,
            constrain_output=True,
            name=name,
        )
