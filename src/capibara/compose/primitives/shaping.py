"""Reductions, joins and regroupings: operations that change a shape."""

from __future__ import annotations

from typing import Any

from capibara.compose.arguments import whole
from capibara.compose.block import Primitive
from capibara.compose.errors import ShapeError
from capibara.compose.shapes import Dim, Shape, set_size, unify

__all__ = ["Concat", "GroupMerge", "Mean", "Sum"]


def _reduced(axis: int | None) -> Any:
    def rule(full: Shape, reduced: Shape) -> bool:
        dims = full.dims()
        if dims is None:
            return False
        if axis is None:
            unify(reduced, Shape())
            return True
        if not -len(dims) <= axis < len(dims):
            raise ShapeError(f"axis={axis} is outside an array of {len(dims)} dimensions")
        unify(reduced, Shape([d for i, d in enumerate(dims) if i != axis % len(dims)]))
        return True

    return rule


class _Reduce(Primitive):
    def __init__(self, axis: int | None = None, *, name: str | None = None) -> None:
        whole("axis", axis, None, optional=True)
        op = type(self).__name__.lower()
        super().__init__(
            op,
            {"input": ("*b", "T")},
            {"output": ("*o", "T")},
            {"axis": axis},
            constraints=[(_reduced(axis), ("input", "output"))],
            name=name,
        )


class Sum(_Reduce):
    """Sum over one dimension, or over all (``axis=None``)."""


class Mean(_Reduce):
    """Mean over one dimension, or over all (``axis=None``)."""


class Concat(Primitive):
    """Join arrays along one dimension: ports ``input_0``, ``input_1`` … → ``output``."""

    def __init__(self, count: int, axis: int = 0, *, name: str | None = None) -> None:
        whole("count", count)
        whole("axis", axis, None)

        def rule(*shapes: Shape) -> bool:
            rows = [s.dims() for s in shapes[:-1]]
            rank = next((len(r) for r in [*rows, shapes[-1].dims()] if r is not None), None)
            if rank is None:
                return False
            if not -rank <= axis < rank:
                raise ShapeError(f"axis={axis} is outside an array of {rank} dimensions")
            at = axis % rank
            shared = [Dim() for _ in range(rank)]
            own = [Dim() for _ in shapes]
            for shape, dim in zip(shapes, own, strict=True):
                unify(shape, Shape([*shared[:at], dim, *shared[at + 1 :]]))
            sizes = [d.find().size for d in own[:-1]]
            if any(s is None for s in sizes):
                return False
            set_size(own[-1], sum(s for s in sizes if s is not None))
            return True

        keys = tuple(f"input_{i}" for i in range(count))
        super().__init__(
            "concat",
            {k: (f"*b{i}", "T") for i, k in enumerate(keys)},
            {"output": ("*o", "T")},
            {"axis": int(axis)},
            constraints=[(rule, (*keys, "output"))],
            name=name,
        )


class GroupMerge(Primitive):
    """Make the last two dimensions one: ``[*b, heads, dim]`` → ``[*b, heads · dim]``."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(pair: Shape, merged: Shape) -> bool:
            a, b = pair.dims(), merged.dims()
            if a is None or b is None or a[-1].size is None or a[-2].size is None:
                return False
            set_size(b[-1], a[-1].size * a[-2].size)
            return True

        super().__init__(
            "group_merge",
            {"input": ("*b heads dim", "T")},
            {"output": ("*b merged", "T")},
            constraints=[(rule, ("input", "output"))],
            name=name,
        )
