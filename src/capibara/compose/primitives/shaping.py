"""Join, split and reshape: operations that change shapes but not values."""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import items, several, whole
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Dim, Shape, product_of, quotient, set_size, unify
from capibara.compose.primitives.rules import axes_of, axis_of, broadcast_rule, fix, placed, product, sizes
from capibara.compose.primitives.size_rules import PASSED_ON, SizeRow, joined_sizes, product_dim

__all__ = [
    "AtLeast1D",
    "BroadcastTo",
    "Concat",
    "ExpandDims",
    "Flatten",
    "GroupMerge",
    "Item",
    "Length",
    "Pad",
    "Reshape",
    "ShapeOf",
    "Size",
    "Split",
    "Squeeze",
    "Stack",
    "SwapAxes",
    "ToTensor",
    "Transpose",
    "Unstack",
]


class _Move(Primitive):
    """``input`` of any kind → ``output`` of the same, with a rule between the two shapes."""

    def __init__(
        self,
        op: str,
        attributes: dict[str, Any],
        rule: Any,
        *,
        output: Any = "*o",
        more: tuple[Any, ...] = (),
        name: str | None = None,
    ) -> None:
        super().__init__(
            op,
            {"input": ("*b", "T")},
            {"output": (output, "T")},
            attributes,
            constraints=[*([(rule, ("input", "output"))] if rule is not None else []), *more],
            name=name,
        )


class Concat(Primitive):
    """Join arrays along one dimension: ports ``input_0``, ``input_1`` … → ``output``.

    With ``axis=None`` every array is first made one row.
    """

    def __init__(self, count: int, axis: int | None = 0, *, name: str | None = None) -> None:
        several("count", count)
        whole("axis", axis, None, optional=True)

        def rule(*shapes: Shape) -> bool:
            rows = [s.dims() for s in shapes[:-1]]
            if axis is None:
                total = Dim()
                unify(shapes[-1], Shape([total]))
                counts = [None if r is None else product(r) for r in rows]
                if any(c is None for c in counts):
                    return False
                return fix(total, sum(c for c in counts if c is not None))
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
            {"axis": axis},
            constraints=[
                (rule, (*keys, "output")),
                (joined_sizes, (*(f"#{k}" for k in keys), "#output")),
            ],
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


class Stack(Primitive):
    """Join arrays of one shape along a new dimension: ports ``input_0``, ``input_1`` … → ``output``."""

    def __init__(self, count: int, axis: int = 0, *, name: str | None = None) -> None:
        several("count", count)
        whole("axis", axis, None)

        def rule(one: Shape, output: Shape) -> bool:
            dims = one.dims()
            if dims is None:
                return False
            at = axis_of(axis, len(dims) + 1)
            unify(output, Shape([*dims[:at], Dim(count), *dims[at:]]))
            return True

        super().__init__(
            "stack",
            {f"input_{i}": ("*b", "T") for i in range(count)},
            {"output": ("*o", "T")},
            {"axis": int(axis)},
            constraints=[
                (rule, ("input_0", "output")),
                (joined_sizes, (*(f"#input_{i}" for i in range(count)), "#output")),
            ],
            name=name,
        )


class Split(Primitive):
    """Cut one dimension into ``count`` equal parts: ``input`` → ``output_0``, ``output_1`` … of one shape."""

    def __init__(self, count: int, axis: int = 0, *, name: str | None = None) -> None:
        several("count", count)
        whole("axis", axis, None)

        def rule(whole_: Shape, part: Shape) -> bool:
            dims = whole_.dims()
            if dims is None:
                return False
            at = axis_of(axis, len(dims))
            one = Dim()
            unify(part, Shape([*dims[:at], one, *dims[at + 1 :]]))
            size, piece = dims[at].find().size, one.find().size
            if size is not None:
                if size % count:
                    raise ShapeError(f"{size} elements cannot be split into {count} equal parts")
                return fix(one, size // count)
            return piece is not None and fix(dims[at], piece * count)

        super().__init__(
            "split",
            {"input": ("*b", "T")},
            {f"output_{i}": ("*o", "T") for i in range(count)},
            {"count": int(count), "axis": int(axis)},
            constraints=[(rule, ("input", "output_0"))],
            name=name,
        )


class Unstack(Primitive):
    """The ``count`` arrays along one dimension, one by one: ``input`` → ``output_0``, ``output_1`` …."""

    def __init__(self, count: int, axis: int = 0, *, name: str | None = None) -> None:
        several("count", count)
        whole("axis", axis, None)

        def rule(whole_: Shape, part: Shape) -> bool:
            dims = whole_.dims()
            if dims is None:
                return False
            at = axis_of(axis, len(dims))
            set_size(dims[at], count)
            unify(part, Shape([*dims[:at], *dims[at + 1 :]]))
            return True

        super().__init__(
            "unstack",
            {"input": ("*b", "T")},
            {f"output_{i}": ("*o", "T") for i in range(count)},
            {"count": int(count), "axis": int(axis)},
            constraints=[(rule, ("input", "output_0"))],
            name=name,
        )


class _Sized(Primitive):
    """``input`` of any kind → ``output`` of the same, in a shape with sizes that may be connections."""

    def __init__(self, op: str, shape: SizeRow, rule: Any, name: str | None) -> None:
        super().__init__(
            op,
            {"input": ("*b", "T"), **shape.ports},
            {"output": ("*o", "T")},
            {"shape": shape.row},
            constraints=[(rule, ("input", "output", *shape.values))],
            sizes=shape.keys,
            name=name,
        )


class Reshape(_Sized):
    """The same elements, row by row, in another shape; at most one size is -1 and follows from the others.

    A size that is None comes from a port, ``size_0`` for the first dimension: ``Reshape((None, 8))(input=x,
    size_0=y.shape[0])``, which is ``x.reshape((y.shape[0], 8))``. With ``shape=None`` all of them come from the port
    ``shape``, int ``[rank]``.
    """

    def __init__(self, shape: tuple[int | None, ...] | None, *, name: str | None = None) -> None:
        row = SizeRow("shape", shape, -1)
        free = [i for i, size in enumerate(row.given or ()) if size == -1]
        if len(free) > 1:
            raise WiringError(
                f"shape={shape!r} has more than one -1: only one size can follow from the others"
            )

        def rule(before: Shape, after: Shape, *values: Shape) -> bool:
            shape = row.shape(values)
            unify(after, shape)
            out, dims = shape.dims(), before.dims()
            if out is None or dims is None:
                return False
            total, fixed = product(dims), product(d for i, d in enumerate(out) if i not in free)
            if not free:
                if total is not None and fixed is not None and total != fixed:
                    raise ShapeError(f"{total} elements do not fill the shape {shape}")
                return (total is not None and fixed is not None) or _balanced(dims, out)
            if total is not None and fixed is not None and (not fixed or total % fixed):
                raise ShapeError(f"{total} elements cannot be put in the shape {row.given}")
            if (size := out[free[0]].find()).size is not None and _balanced(dims, out):
                return True
            found = quotient(dims, [d for i, d in enumerate(out) if i not in free])
            if found is None:
                return False
            unify(Shape([size]), Shape([found]))
            return size.find().size is not None

        super().__init__("reshape", row, rule, name)


def _balanced(dims: list[Dim], out: list[Dim]) -> bool:
    """Learn the one size that is unknown, of two shapes with as many elements; whether nothing is left to learn."""
    have, left = product_of(dims)
    want, right = product_of(out)
    for dim in right[:]:
        if dim in left:
            left.remove(dim)
            right.remove(dim)
    if not left and not right:
        if have != want:
            raise ShapeError(f"{have} elements do not fill the shape {Shape(out)}")
        return True
    if not have or not want:
        return False
    if len(left) == 1 and not right and want % have == 0:
        return fix(left[0], want // have)
    if len(right) == 1 and not left and have % want == 0:
        return fix(right[0], have // want)
    if len(left) == len(right) == 1 and have == want:
        unify(Shape(left), Shape(right))
        return True
    return False


class Flatten(_Move):
    """Make the dimensions from ``start`` to ``end`` (both included) one; a scalar becomes ``(1,)``."""

    def __init__(self, start: int = 0, end: int = -1, *, name: str | None = None) -> None:
        whole("start", start, None)
        whole("end", end, None)

        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            if not dims:
                unify(after, Shape([Dim(1)]))
                return True
            first, last = axis_of(start, len(dims)), axis_of(end, len(dims))
            if first > last:
                raise ShapeError(f"start={start} comes after end={end} in {len(dims)} dimensions")
            one = dims[first] if first == last else product_dim(dims[first : last + 1])
            unify(after, Shape([*dims[:first], one, *dims[last + 1 :]]))
            return first == last or fix(one, product(dims[first : last + 1]))

        super().__init__("flatten", {"start": int(start), "end": int(end)}, rule, name=name)


class Transpose(_Move):
    """Another order of the dimensions: ``axes``, or all of them back to front (None)."""

    def __init__(self, axes: tuple[int, ...] | None = None, *, name: str | None = None) -> None:
        order = None if axes is None else axes_of(items("axes", axes), optional=False)

        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                back = after.dims()
                if back is None:
                    return False
                dims = [Dim() for _ in back]
                unify(before, Shape(dims))
            if order is None:
                unify(after, Shape(dims[::-1]))
                return True
            assert isinstance(order, tuple)
            if len(order) != len(dims):
                raise ShapeError(f"axes={order} names {len(order)} of {len(dims)} dimensions")
            placed(order, len(dims))
            unify(after, Shape([dims[i] for i in order]))
            return True

        super().__init__("transpose", {"axes": order}, rule, name=name)


class SwapAxes(_Move):
    """Exchange two dimensions."""

    def __init__(self, axis1: int, axis2: int, *, name: str | None = None) -> None:
        whole("axis1", axis1, None)
        whole("axis2", axis2, None)

        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            a, b = axis_of(axis1, len(dims)), axis_of(axis2, len(dims))
            dims[a], dims[b] = dims[b], dims[a]
            unify(after, Shape(dims))
            return True

        super().__init__("swap_axes", {"first": int(axis1), "second": int(axis2)}, rule, name=name)


class Squeeze(_Move):
    """Drop the dimensions in ``axis``, each of size 1, or (None) every dimension of size 1."""

    def __init__(self, axis: int | tuple[int, ...] | None = None, *, name: str | None = None) -> None:
        axis = axes_of(axis)

        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            if axis is None:
                if any(d.find().size is None for d in dims):
                    return False
                unify(after, Shape([d for d in dims if d.find().size != 1]))
                return True
            gone = placed(axis, len(dims))
            for i in gone:
                size = dims[i].find().size
                if size not in (None, 1):
                    raise ShapeError(f"dimension {i} has size {size}: only a size of 1 can be squeezed away")
                set_size(dims[i], 1)
            unify(after, Shape([d for i, d in enumerate(dims) if i not in gone]))
            return True

        super().__init__("squeeze", {"axis": axis}, rule, name=name)


class ExpandDims(_Move):
    """Add dimensions of size 1, at the places ``axis`` of the result."""

    def __init__(self, axis: int | tuple[int, ...], *, name: str | None = None) -> None:
        places = axes_of(axis, optional=False)
        count = len(places) if isinstance(places, tuple) else 1

        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            new = placed(places, len(dims) + count)
            rest = iter(dims)
            unify(after, Shape([Dim(1) if i in new else next(rest) for i in range(len(dims) + count)]))
            return True

        super().__init__("expand_dims", {"axis": places}, rule, name=name)


class BroadcastTo(_Sized):
    """Repeat along missing dimensions and those of size 1, as NumPy's broadcasting does, up to ``shape``.

    Sizes that are None, or ``shape=None``, are connections as for :class:`Reshape`.
    """

    def __init__(self, shape: tuple[int | None, ...] | None, *, name: str | None = None) -> None:
        row = SizeRow("shape", shape)

        def rule(before: Shape, after: Shape, *values: Shape) -> bool:
            unify(after, row.shape(values))
            return broadcast_rule(before, after, after)

        super().__init__("broadcast_to", row, rule, name)


class Pad(_Move):
    """Add elements of ``value`` around: ``widths`` has ``(before, after)`` for each dimension."""

    def __init__(
        self, widths: tuple[tuple[int, int], ...], value: float = 0.0, *, name: str | None = None
    ) -> None:
        row = tuple(sizes("widths", pair) for pair in items("widths", widths))
        for pair in row:
            if len(pair) != 2:
                raise WiringError(f"widths={widths!r}: each dimension needs two numbers, before and after")

        def rule(before: Shape, after: Shape) -> bool:
            out = [Dim() for _ in row]
            dims = [Dim() for _ in row]
            unify(before, Shape(dims))
            unify(after, Shape(out))
            done = True
            for d, o, (first, last) in zip(dims, out, row, strict=True):
                d, o = d.find(), o.find()
                if d.size is not None:
                    set_size(o, d.size + first + last)
                elif o.size is not None:
                    if o.size < first + last:
                        raise ShapeError(f"{o.size} is less than the padding of {first + last}")
                    set_size(d, o.size - first - last)
                else:
                    done = False
            return done

        super().__init__("pad", {"widths": row, "value": value}, rule, name=name)


class Item(_Move):
    """The one element of an array as a scalar."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            for d in dims:
                if d.find().size not in (None, 1):
                    raise ShapeError(f"an array of shape {before} has more than one element")
                set_size(d, 1)
            return True

        super().__init__("item", {}, rule, output=(), more=(PASSED_ON,), name=name)


class AtLeast1D(_Move):
    """A scalar becomes an array of one element; anything else stays as it is."""

    def __init__(self, *, name: str | None = None) -> None:
        def rule(before: Shape, after: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            unify(after, Shape(dims or [Dim(1)]))
            return True

        super().__init__("at_least_1d", {}, rule, more=(PASSED_ON,), name=name)


class ToTensor(_Move):
    """A number as an array (an array stays as it is)."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__("to_tensor", {}, None, output="*b", more=(PASSED_ON,), name=name)


class ShapeOf(Primitive):
    """The sizes of an array: ``input`` → ``output int [rank]``. They are constants of the compiled program.

    Values computed from them by indexing and integer arithmetic can be used as sizes: ``x.reshape((x.shape[0],
    -1))``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        def rule(array: Shape, row: Shape) -> bool:
            dims = array.dims()
            if dims is None:
                return False
            unify(row, Shape([Dim(len(dims))]))
            return True

        super().__init__(
            "shape_of",
            {"input": ("*b", None)},
            {"output": (("rank",), "int")},
            constraints=[(rule, ("input", "output")), (_are_sizes, ("input", "#output"))],
            name=name,
        )


def _are_sizes(array: Shape, value: Shape) -> bool:
    unify(value, array)
    return True


class Size(Primitive):
    """The number of elements, or the product of the sizes in ``dim``: ``input`` → ``output int []``."""

    def __init__(self, dim: int | tuple[int, ...] | None = None, *, name: str | None = None) -> None:
        axis = axes_of(dim)

        def rule(array: Shape, value: Shape) -> bool:
            dims = array.dims()
            if dims is None:
                return False
            taken = placed(axis, len(dims))
            count = product_dim([d for i, d in enumerate(dims) if i in taken])
            unify(value, Shape([count]))
            return count.find().size is not None or len(taken) == 1

        super().__init__(
            "size_of",
            {"input": ("*b", None)},
            {"output": ((), "int")},
            {"axis": axis},
            constraints=[(rule, ("input", "#output"))],
            name=name,
        )


class Length(Size):
    """The size of the first dimension: ``input`` → ``output int []``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(0, name=name)
