"""Select elements, and create arrays from shapes."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil
from typing import Any

from capibara.compose.errors import ShapeError, WiringError
from capibara.compose.logical.arguments import flag, identifier, whole
from capibara.compose.logical.block import Primitive, SizeFrom
from capibara.compose.logical.shapes import Dim, Shape, unify
from capibara.compose.primitives.rules import axis_of, scalar, sizes
from capibara.compose.primitives.size_rules import SizeRow, indexed_sizes

__all__ = [
    "Arange",
    "Eye",
    "EyeComplement",
    "Full",
    "FullLike",
    "Indexer",
    "OneHot",
    "Ones",
    "OnesLike",
    "PermuteTensor",
    "PositionalEncoding",
    "RandInt",
    "Randn",
    "RandomUniform",
    "Scatter",
    "ScatterAlongAxis",
    "Slice",
    "Take",
    "TakeAlongAxis",
    "Trapezoid",
    "Unique",
    "Zeros",
    "ZerosLike",
]


def _written(index: Any) -> tuple[Any, ...]:
    """An index as literals that stand in generated source; a bound that is text is the name of a port."""
    entries = index if isinstance(index, tuple) else (index,)
    row: list[Any] = []
    for entry in entries:
        if isinstance(entry, slice):
            bounds = []
            for part in (entry.start, entry.stop):
                if isinstance(part, str):
                    identifier(part, f"index={index!r}: {part!r} is not the name of a port")
                    bounds.append(SizeFrom(part))
                else:
                    whole("index", part, None, optional=True)
                    bounds.append(part)
            whole("index", entry.step, None, optional=True)
            if entry.step == 0:
                raise WiringError(f"index={index!r}: a slice cannot have a step of 0")
            row.append(("slice", *bounds, entry.step))
        elif entry is None or entry is Ellipsis:
            row.append(entry)
        elif isinstance(entry, int) and not isinstance(entry, bool):
            row.append(int(entry))
        else:
            raise WiringError(
                f"index={index!r}: {entry!r} is not an integer, a slice, None or '...'; to pick rows by an "
                "array use Take"
            )
    if sum(entry is Ellipsis for entry in row) > 1:
        raise WiringError(f"index={index!r} has more than one '...'")
    return tuple(row)


def _indexed(dims: list[Dim], index: tuple[Any, ...]) -> tuple[list[Dim], bool]:
    """The dimensions of ``array[index]``, and whether all their sizes are known that can be."""
    taken = sum(i is not None and i is not Ellipsis for i in index)
    if taken > len(dims):
        raise ShapeError(f"an index of {taken} places is too long for {len(dims)} dimensions")
    entries = list(index) if Ellipsis in index else [*index, Ellipsis]
    rest, out, done = iter(dims), [], True
    for entry in entries:
        if entry is None:
            out.append(Dim(1))
        elif entry is Ellipsis:
            out.extend(next(rest) for _ in range(len(dims) - taken))
        else:
            dim = next(rest).find()
            if isinstance(entry, int):
                if dim.size is not None and not -dim.size <= entry < dim.size:
                    raise ShapeError(f"index {entry} is outside a dimension of size {dim.size}")
                done = done and dim.size is not None
            elif entry[1:] in ((None, None, None), (0, None, None), (None, None, 1), (0, None, 1)):
                out.append(dim)
            elif dim.size is None or any(isinstance(part, SizeFrom) for part in entry[1:]):
                out.append(Dim())
                done = False
            else:
                out.append(Dim(len(range(*slice(*entry[1:]).indices(dim.size)))))
    return out, done


class Indexer(Primitive):
    """``input[index]``, NumPy's basic indexing: integers, slices, ``None`` and ``...``, one or a tuple.

    Indices out of range are refused once the size is known. The gradient is that of the selected elements, and 0
    elsewhere.

    A slice bound given as a string is a port for a size: ``Indexer(slice(None, "stop"))(input=x, stop=y.shape[0])``,
    which is ``x[: y.shape[0]]``.
    """

    def __init__(self, index: Any, *, name: str | None = None) -> None:
        entries = _written(index)
        bounds = [b for e in entries if isinstance(e, tuple) for b in e[1:] if isinstance(b, SizeFrom)]
        ports = tuple(dict.fromkeys(b.port for b in bounds))

        def rule(before: Shape, after: Shape, *values: Shape) -> bool:
            dims = before.dims()
            if dims is None:
                return False
            known = {port: value.items[0].find().size for port, value in zip(ports, values, strict=True)}  # type: ignore[union-attr]
            out, done = _indexed(dims, tuple(_filled(entry, known) for entry in entries))
            unify(after, Shape(out))
            return done

        super().__init__(
            "indexer",
            {"input": ("*b", "T")} | dict.fromkeys(ports, ((), "int")),
            {"output": ("*o", "T")},
            {"index": entries},
            constraints=[
                (rule, ("input", "output", *(f"#{port}" for port in ports))),
                (indexed_sizes(entries), ("#input", "#output")),
            ],
            sizes=ports,
            name=name,
        )


def _filled(entry: Any, known: dict[str, int | None]) -> Any:
    """A slice with the bounds that are known."""
    if not isinstance(entry, tuple):
        return entry
    row = ((known[b.port] if isinstance(b, SizeFrom) else b, b) for b in entry[1:])
    return ("slice", *(b if size is None else size for size, b in row))


class Slice(Indexer):
    """``input[start:stop:step]`` along the first dimension."""

    def __init__(
        self,
        start: int | None = None,
        stop: int | None = None,
        step: int | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(slice(start, stop, step), name=name)


class Take(Primitive):
    """Elements along one dimension by an array of indices: ``input``, ``indices int [*i]`` → ``output``.

    Negative indices count from the end, as in NumPy; others out of range are clipped. Equivalent JAX:
    ``jnp.take(input, jnp.where(indices < 0, indices + size, indices), axis, mode="clip")``.
    """

    def __init__(self, axis: int = 0, *, name: str | None = None) -> None:
        whole("axis", axis, None)

        def rule(before: Shape, indices: Shape, after: Shape) -> bool:
            dims, picks = before.dims(), indices.dims()
            if dims is None or picks is None:
                return False
            at = axis_of(axis, len(dims))
            unify(after, Shape([*dims[:at], *picks, *dims[at + 1 :]]))
            return True

        super().__init__(
            "take",
            {"input": ("*b", "T"), "indices": ("*i", "int")},
            {"output": ("*o", "T")},
            {"axis": int(axis)},
            constraints=[(rule, ("input", "indices", "output"))],
            name=name,
        )


class PermuteTensor(Primitive):
    """Rows in another order: ``input [n, *b]``, ``indices int [m]`` → ``output [m, *b]``; indices as for ``Take``."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(
            "permute_tensor",
            {"input": ("n *b", "T"), "indices": (("m",), "int")},
            {"output": ("m *b", "T")},
            name=name,
        )


class TakeAlongAxis(Primitive):
    """One element per index along one dimension, the other dimensions alike: ``numpy.take_along_axis``, clipped."""

    def __init__(self, axis: int = -1, *, name: str | None = None) -> None:
        whole("axis", axis, None)

        def rule(before: Shape, indices: Shape) -> bool:
            dims, picks = before.dims(), indices.dims()
            known = dims or picks
            if known is None:
                return False
            at = axis_of(axis, len(known))
            if dims is None or picks is None:
                other = [Dim() if i == at else d for i, d in enumerate(known)]
                unify(before if dims is None else indices, Shape(other))
                return True
            unify(before, Shape([dims[i] if i == at else d for i, d in enumerate(picks)]))
            return True

        super().__init__(
            "take_along_axis",
            {"input": ("*b", "T"), "indices": ("*i", "int")},
            {"output": ("*i", "T")},
            {"axis": int(axis)},
            constraints=[(rule, ("input", "indices"))],
            name=name,
        )


class Scatter(Primitive):
    """``input`` with other rows at ``indices`` along one dimension: the counterpart of :class:`Take`.

    ``input [*b]``, ``indices int [*i]``, ``updates`` in the shape that ``Take(axis)`` would give → ``output [*b]``.
    ``add=True`` adds to the existing values, repeatedly for repeated indices; otherwise one of the updates of a
    repeated index is kept, and which one, and the gradients of the others, depend on the backend. Indices as for
    ``Take``. Equivalent JAX, for ``axis=0``: ``input.at[indices].add(updates)``, ``input.at[indices].set(updates)``.
    """

    def __init__(self, axis: int = 0, add: bool = False, *, name: str | None = None) -> None:
        whole("axis", axis, None)
        flag("add", add)

        def rule(before: Shape, indices: Shape, updates: Shape) -> bool:
            dims, picks = before.dims(), indices.dims()
            if dims is None or picks is None:
                return False
            at = axis_of(axis, len(dims))
            unify(updates, Shape([*dims[:at], *picks, *dims[at + 1 :]]))
            return True

        super().__init__(
            "scatter",
            {"input": ("*b", "T"), "indices": ("*i", "int"), "updates": ("*u", "T")},
            {"output": ("*b", "T")},
            {"axis": int(axis), "add": add},
            constraints=[(rule, ("input", "indices", "updates"))],
            name=name,
        )


class ScatterAlongAxis(Primitive):
    """``input`` with other elements along one dimension: the counterpart of :class:`TakeAlongAxis`.

    ``input [*b]``, ``indices int [*i]``, ``updates [*i]`` → ``output [*b]``; the dimensions other than ``axis`` are
    alike. ``add`` and indices as for :class:`Scatter`. Equivalent NumPy: ``numpy.put_along_axis`` on a copy.
    """

    def __init__(self, axis: int = -1, add: bool = False, *, name: str | None = None) -> None:
        whole("axis", axis, None)
        flag("add", add)

        def rule(before: Shape, indices: Shape) -> bool:
            dims, picks = before.dims(), indices.dims()
            known = dims or picks
            if known is None:
                return False
            at = axis_of(axis, len(known))
            other = [Dim() if i == at else d for i, d in enumerate(known)]
            unify(indices if dims is not None else before, Shape(other))
            return dims is not None and picks is not None

        super().__init__(
            "scatter_along_axis",
            {"input": ("*b", "T"), "indices": ("*i", "int"), "updates": ("*i", "T")},
            {"output": ("*b", "T")},
            {"axis": int(axis), "add": add},
            constraints=[(rule, ("input", "indices"))],
            name=name,
        )


class _Made(Primitive):
    """An array made from nothing. ``takes_dtype``: the operation takes ``dtype=``, the compute dtype."""

    takes_dtype = True

    def __init__(
        self,
        op: str,
        shape: Any,
        attributes: dict[str, Any],
        kind: str = "float",
        *,
        ports: dict[str, Any] | None = None,
        constraints: Iterable[Any] = (),
        uses_key: bool = False,
        name: str | None = None,
    ) -> None:
        ports = ports or {}
        super().__init__(
            op,
            ports,
            {"output": (shape, kind)},
            attributes,
            constraints,
            sizes=tuple(ports),
            uses_key=uses_key,
            name=name,
        )
        if kind == "int":
            self.takes_dtype = False


class Arange(_Made):
    """``start, start + step, …`` up to but excluding ``stop``: integers if all three are, otherwise floats.

    Without ``stop``, or with ``start=None``, it is a port for a size: ``Arange()(stop=x.shape[0])``.
    """

    def __init__(
        self,
        stop: float | None = None,
        start: float | None = 0,
        step: float = 1,
        *,
        name: str | None = None,
    ) -> None:
        given = {"start": start, "stop": stop}
        for key, value in (*given.items(), ("step", step)):
            scalar(key, value, optional=key != "step")
        if step == 0:
            raise WiringError("step=0: an arange must move")
        ports = {key: ((), "int") for key, value in given.items() if value is None}
        integer = all(isinstance(v, int | None) for v in (start, stop, step))
        attributes: dict[str, Any] = {
            key: SizeFrom(key) if value is None else value for key, value in given.items()
        }
        attributes["step"] = step
        if integer:
            attributes["dtype"] = "int32"

        def rule(output: Shape, *values: Shape) -> bool:
            dims = {key: value.items[0].find() for key, value in zip(ports, values, strict=True)}  # type: ignore[union-attr]
            if ports and step == 1 and start == 0:
                unify(output, Shape([dims["stop"]]))
                return True
            first, last = (dims[key].size if value is None else value for key, value in given.items())
            if first is None or last is None:
                unify(output, Shape([Dim()]))
                return False
            unify(output, Shape([Dim(max(0, ceil((last - first) / step)))]))
            return True

        super().__init__(
            "arange",
            "n",
            attributes,
            "int" if integer else "float",
            ports=ports,
            constraints=[(rule, ("output", *(f"#{key}" for key in ports)))],
            name=name,
        )


class Eye(_Made):
    """Ones on the diagonal, zeros elsewhere: ``output [rows, columns]`` (``columns=None``: square)."""

    def __init__(self, rows: int, columns: int | None = None, *, name: str | None = None) -> None:
        whole("rows", rows, 0)
        whole("columns", columns, 0, optional=True)
        width = rows if columns is None else columns
        op = "eye_complement" if isinstance(self, EyeComplement) else "eye"
        super().__init__(op, (rows, width), {"rows": rows, "columns": width}, name=name)


class EyeComplement(Eye):
    """Zeros on the diagonal, ones elsewhere: ``1 - eye``."""


class Full(_Made):
    """``output`` of a shape, every element ``value`` (a float).

    Sizes that are None, or ``shape=None``, are connections as for :class:`Reshape`.
    """

    def __init__(
        self, shape: tuple[int | None, ...] | None, value: float, *, name: str | None = None
    ) -> None:
        scalar("value", value)
        row = SizeRow("shape", shape)

        def rule(output: Shape, *values: Shape) -> bool:
            unify(output, row.shape(values))
            return True

        super().__init__(
            "full",
            "*o",
            {"shape": row.row, "value": float(value)},
            ports=row.ports,
            constraints=[(rule, ("output", *row.values))],
            name=name,
        )


class Ones(Full):
    """``output`` of a shape, every element 1."""

    def __init__(self, shape: tuple[int | None, ...] | None, *, name: str | None = None) -> None:
        super().__init__(shape, 1.0, name=name)


class Zeros(Full):
    """``output`` of a shape, every element 0."""

    def __init__(self, shape: tuple[int | None, ...] | None, *, name: str | None = None) -> None:
        super().__init__(shape, 0.0, name=name)


class FullLike(Primitive):
    """An array like ``input``, every element ``value``; no gradient flows through it."""

    def __init__(self, value: float, *, name: str | None = None) -> None:
        scalar("value", value)
        super().__init__(
            "full_like", {"input": ("*b", "T")}, {"output": ("*b", "T")}, {"value": value}, name=name
        )


class OnesLike(FullLike):
    """An array like ``input``, every element 1."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(1, name=name)


class ZerosLike(FullLike):
    """An array like ``input``, every element 0."""

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(0, name=name)


class Randn(_Made):
    """Normal random numbers (mean 0, variance 1), drawn anew from the call's ``key=``."""

    def __init__(self, shape: tuple[int, ...], *, name: str | None = None) -> None:
        row = sizes("shape", shape)
        super().__init__("randn", row, {"shape": row}, uses_key=True, name=name)


class RandomUniform(_Made):
    """Random numbers evenly from ``low`` to ``high`` (excluded), drawn anew from the call's ``key=``."""

    def __init__(
        self, shape: tuple[int, ...], low: float = 0.0, high: float = 1.0, *, name: str | None = None
    ) -> None:
        row = sizes("shape", shape)
        scalar("low", low)
        scalar("high", high)
        if not low < high:
            raise WiringError(f"low={low!r} must be below high={high!r}")
        more = {"shape": row, "low": float(low), "high": float(high)}
        super().__init__("random_uniform", row, more, uses_key=True, name=name)


class RandInt(_Made):
    """Random integers from ``low`` to ``high`` (excluded), drawn anew from the call's ``key=``."""

    def __init__(self, shape: tuple[int, ...], low: int, high: int, *, name: str | None = None) -> None:
        row = sizes("shape", shape)
        whole("low", low, None)
        whole("high", high, None)
        if not low < high:
            raise WiringError(f"low={low!r} must be below high={high!r}")
        more = {"shape": row, "low": low, "high": high}
        super().__init__("randint", row, more, "int", uses_key=True, name=name)


class OneHot(Primitive):
    """``input int [*b]`` → ``output [*b, depth]``: 1 at the index, 0 elsewhere; all 0 for an index outside."""

    takes_dtype = True

    def __init__(self, depth: int, *, name: str | None = None) -> None:
        whole("depth", depth)
        super().__init__(
            "one_hot",
            {"input": ("*b", "int")},
            {"output": (("*b", depth), "float")},
            {"depth": depth},
            name=name,
        )


class PositionalEncoding(Primitive):
    """Add sines and cosines of the position (Vaswani et al., 2017): ``input [*b, sequence, d]`` → the same shape.

    Place ``2i`` gets ``sin(t base^(-2i/d))``, place ``2i + 1`` the cosine.
    """

    def __init__(self, base: float = 10000.0, *, name: str | None = None) -> None:
        scalar("base", base)
        if base <= 0:
            raise WiringError(f"base={base!r} must be above 0")
        super().__init__(
            "positional_encoding",
            {"input": ("*b sequence d", "float")},
            {"output": ("*b sequence d", "float")},
            {"base": float(base)},
            name=name,
        )


class Trapezoid(Primitive):
    """Area under a curve by trapezoids: values ``y`` at places ``x`` (of one shape, or a row) over ``axis``."""

    def __init__(self, axis: int = -1, *, name: str | None = None) -> None:
        whole("axis", axis, None)

        def rule(y: Shape, output: Shape) -> bool:
            dims = y.dims()
            if dims is None:
                return False
            at = axis_of(axis, len(dims))
            unify(output, Shape([d for i, d in enumerate(dims) if i != at]))
            return True

        def places(y: Shape, x: Shape) -> bool:
            dims, row = y.dims(), x.dims()
            if dims is None or row is None:
                return False
            at = axis_of(axis, len(dims))
            if len(row) != 1 and len(row) != len(dims):
                raise ShapeError(f"x has {len(row)} dimensions: give 1, or {len(dims)} as y has")
            unify(x, Shape([dims[at]] if len(row) == 1 else dims))
            return True

        super().__init__(
            "trapezoid",
            {"y": ("*b", "float"), "x": ("*x", "float")},
            {"output": ("*o", "float")},
            {"axis": int(axis)},
            constraints=[(rule, ("y", "output")), (places, ("y", "x"))],
            name=name,
        )


class Unique(Primitive):
    """The different values of ``input``: ``values [size]`` rising, ``counts int [size]``, ``count int []``.

    Shapes of compiled programs are fixed, so ``size`` is the maximum number of values: missing ones are ``fill`` with
    a count of 0; beyond ``size`` the largest values are dropped. No gradient.
    """

    def __init__(self, size: int, fill: float = 0, *, name: str | None = None) -> None:
        whole("size", size)
        scalar("fill", fill)
        super().__init__(
            "unique",
            {"input": ("*b", "T")},
            {"output": ((size,), "T"), "counts": ((size,), "int"), "count": ((), "int")},
            {"size": size, "fill": fill},
            name=name,
        )
