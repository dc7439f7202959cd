"""Matrix products with parameters, and lookups in tables."""

from __future__ import annotations

from capibara.compose.logical.block import Primitive

__all__ = ["Dense", "Lookup", "Merge", "Project", "Unembed"]


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
