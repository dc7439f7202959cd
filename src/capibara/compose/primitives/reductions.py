"""Reductions over one dimension, several, or all."""

from __future__ import annotations

from typing import ClassVar

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Shape
from capibara.compose.primitives.rules import Rule, axes_of, placed, reduced

__all__ = ["All", "Any", "ArgMax", "ArgMin", "Max", "Mean", "Min", "Prod", "Sum", "Variance"]


class _Reduce(Primitive):
    """``input`` → ``output``, without the dimensions in ``axis`` (None: all), or with size 1 there (``keepdim``)."""

    op_name: ClassVar[str | None] = None
    kinds: ClassVar[tuple[str, str]] = ("N", "N")

    def __init__(
        self, axis: int | tuple[int, ...] | None = None, keepdim: bool = False, *, name: str | None = None
    ) -> None:
        self._build(axes_of(axis), keepdim, {}, name)

    def _build(
        self, axis: int | tuple[int, ...] | None, keepdim: bool, more: dict[str, object], name: str | None
    ) -> None:
        if not isinstance(keepdim, bool):
            raise WiringError(f"keepdim={keepdim!r} must be True or False")
        into, out = self.kinds
        super().__init__(
            self.op_name or type(self).__name__.lower(),
            {"input": ("*b", into)},
            {"output": ("*o", out)},
            {"axis": axis, **more, **({"keepdims": True} if keepdim else {})},
            constraints=[(reduced(axis, keepdim), ("input", "output")), *self._more(axis)],  # type: ignore[arg-type]
            name=name,
        )

    def _more(self, axis: int | tuple[int, ...] | None) -> list[tuple[Rule, tuple[str, ...]]]:
        """Further rules between the shapes."""
        return []


class _Picked(_Reduce):
    """A reduction that picks one of the elements, so that there must be one."""

    def _more(self, axis: int | tuple[int, ...] | None) -> list[tuple[Rule, tuple[str, ...]]]:
        what = type(self).__name__

        def some(full: Shape) -> bool:
            dims = full.dims()
            if dims is None:
                return False
            sizes = [d.find().size for d in dims]
            gone = placed(axis, len(sizes))
            if any(sizes[i] == 0 for i in gone):
                raise ShapeError(
                    f"{what} over axis={axis} of an array of sizes {tuple(sizes)}: of no elements"
                )
            return None not in sizes

        return [(some, ("input",))]


class Sum(_Reduce):
    """Sum over one dimension, several, or all (``axis=None``). Of bools: refused, cast them first."""


class Mean(_Reduce):
    """Mean over one dimension, several, or all (``axis=None``), a float also of integers. NaN over no elements."""

    kinds = ("N", "float")
    takes_dtype = "int"


class Max(_Picked):
    """The largest element. Elements that tie share the gradient equally; over no elements it is an error."""


class Min(_Picked):
    """The smallest element. Elements that tie share the gradient equally; over no elements it is an error."""


class Prod(_Reduce):
    """Product, 1 over no elements. The gradient is right where elements are 0."""


class Any(_Reduce):
    """Whether at least one element is true."""

    kinds = ("bool", "bool")


class All(_Reduce):
    """Whether all elements are true."""

    kinds = ("bool", "bool")


class Variance(_Reduce):
    """Mean square distance from the mean, ``Σ (x - mean)² / (n - correction)``; NaN if that divides by 0."""

    kinds = ("float", "float")

    def __init__(
        self,
        axis: int | tuple[int, ...] | None = None,
        correction: int = 0,
        keepdim: bool = False,
        *,
        name: str | None = None,
    ) -> None:
        whole("correction", correction, 0)
        self._build(axes_of(axis), keepdim, {"correction": correction}, name)


class _Arg(_Picked):
    kinds = ("N", "int")

    def __init__(self, axis: int | None = None, keepdim: bool = False, *, name: str | None = None) -> None:
        whole("axis", axis, None, optional=True)
        self._build(axis, keepdim, {}, name)


class ArgMax(_Arg):
    """Where the largest element is, the first of several; over all (``axis=None``) counted row by row."""


class ArgMin(_Arg):
    """Where the smallest element is, the first of several; over all (``axis=None``) counted row by row."""
