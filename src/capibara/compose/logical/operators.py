"""Arithmetic with connections: ``(x - x.mean(-1, keepdim=True)) / scale``.

Each operator is a block of :mod:`capibara.compose.primitives`, created when the expression is evaluated and added to
a model when the expression is connected. Scalars, arrays and (nested) lists of numbers are allowed on either side.

``==`` and ``!=`` stay Python's own, so that connections can be keys of dicts and members of sets: ``a.eq(b)`` and
``a.ne(b)`` compare values. For the same reason, a connection has no truth value and cannot be iterated over.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import WiringError

if TYPE_CHECKING:
    from capibara.compose.logical.connections import Connection

__all__ = ["Operators"]

Axis = int | tuple[int, ...] | None


def _operand(value: Any) -> Any:
    if isinstance(value, Operators | bool | int | float | list | tuple) or hasattr(value, "dtype"):
        return value
    hint = f"; for the connection of that name write IOKey({value!r})" if isinstance(value, str) else ""
    raise WiringError(
        f"{value!r} ({type(value).__name__}) cannot be used in an expression of connections: pass a connection, a "
        f"number or an array{hint}"
    )


class Operators:
    """The operators of connections, ports and keys: each method returns a new connection, without adding a block yet.

    Shapes and kinds are those of the primitive named; errors in arguments (``axis``, an index) are raised at once,
    those of shapes when the expression is connected in a model, naming the line where it was written.
    """

    __slots__ = ()
    __array_ufunc__ = None  # NumPy arrays on the left leave the operation to the connection on the right
    __iter__: Any = None  # or Python would try [0], [1], … without end

    def _apply(self, op: str, inputs: Mapping[str, Any], *args: Any, **options: Any) -> Connection:
        from capibara.compose import primitives
        from capibara.compose.logical.connections import called

        made = getattr(primitives, op)
        return called(lambda: made(*args, **options), {k: _operand(v) for k, v in inputs.items()})

    def _one(self, op: str, *args: Any, **options: Any) -> Connection:
        return self._apply(op, {"input": self}, *args, **options)

    def _two(self, op: str, other: Any, *, swap: bool = False) -> Connection:
        left, right = (other, self) if swap else (self, other)
        return self._apply(op, {"left": left, "right": right})

    def __bool__(self) -> bool:
        raise WiringError(
            f"{self!r} has no value while a model is composed, so it is neither true nor false: choose with Where(), "
            "join conditions with & and |, and compare with None by 'is'"
        )

    # ---- arithmetic ---------------------------------------------------------------------------------------

    def __add__(self, other: Any) -> Connection:
        return self._two("Add", other)

    def __radd__(self, other: Any) -> Connection:
        return self._two("Add", other, swap=True)

    def __sub__(self, other: Any) -> Connection:
        return self._two("Subtract", other)

    def __rsub__(self, other: Any) -> Connection:
        return self._two("Subtract", other, swap=True)

    def __mul__(self, other: Any) -> Connection:
        return self._two("Multiply", other)

    def __rmul__(self, other: Any) -> Connection:
        return self._two("Multiply", other, swap=True)

    def __truediv__(self, other: Any) -> Connection:
        return self._two("Divide", other)

    def __rtruediv__(self, other: Any) -> Connection:
        return self._two("Divide", other, swap=True)

    def __floordiv__(self, other: Any) -> Connection:
        return self._two("FloorDivide", other)

    def __rfloordiv__(self, other: Any) -> Connection:
        return self._two("FloorDivide", other, swap=True)

    def __mod__(self, other: Any) -> Connection:
        return self._two("Modulo", other)

    def __rmod__(self, other: Any) -> Connection:
        return self._two("Modulo", other, swap=True)

    def __pow__(self, other: Any) -> Connection:
        return self._two("Power", other)

    def __rpow__(self, other: Any) -> Connection:
        return self._two("Power", other, swap=True)

    def __matmul__(self, other: Any) -> Connection:
        return self._two("MatrixMultiply", other)

    def __rmatmul__(self, other: Any) -> Connection:
        return self._two("MatrixMultiply", other, swap=True)

    def __lshift__(self, other: Any) -> Connection:
        return self._two("ShiftLeft", other)

    def __rlshift__(self, other: Any) -> Connection:
        return self._two("ShiftLeft", other, swap=True)

    def __rshift__(self, other: Any) -> Connection:
        return self._two("ShiftRight", other)

    def __rrshift__(self, other: Any) -> Connection:
        return self._two("ShiftRight", other, swap=True)

    def __neg__(self) -> Connection:
        return self._one("Negate")

    def __pos__(self) -> Connection:
        return self._one("Buffer")

    def __abs__(self) -> Connection:
        return self._one("Absolute")

    # ---- comparison and logic -----------------------------------------------------------------------------

    def __lt__(self, other: Any) -> Connection:
        return self._two("Less", other)

    def __le__(self, other: Any) -> Connection:
        return self._two("LessEqual", other)

    def __gt__(self, other: Any) -> Connection:
        return self._two("Greater", other)

    def __ge__(self, other: Any) -> Connection:
        return self._two("GreaterEqual", other)

    def eq(self, other: Any) -> Connection:
        """Whether elements are equal (``==`` compares the connections themselves)."""
        return self._two("Equal", other)

    def ne(self, other: Any) -> Connection:
        """Whether elements differ (``!=`` compares the connections themselves)."""
        return self._two("NotEqual", other)

    def __and__(self, other: Any) -> Connection:
        return self._two("LogicalAnd", other)

    def __rand__(self, other: Any) -> Connection:
        return self._two("LogicalAnd", other, swap=True)

    def __or__(self, other: Any) -> Connection:
        return self._two("LogicalOr", other)

    def __ror__(self, other: Any) -> Connection:
        return self._two("LogicalOr", other, swap=True)

    def __xor__(self, other: Any) -> Connection:
        return self._two("LogicalXor", other)

    def __rxor__(self, other: Any) -> Connection:
        return self._two("LogicalXor", other, swap=True)

    def __invert__(self) -> Connection:
        return self._one("LogicalNot")

    # ---- elements -----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Connection:
        """NumPy's basic indexing; one place may be an array of integers (:class:`~.Take`, which clips).

        Bounds of a slice may be connections that follow from shapes: ``x[: y.shape[0]]``.

        With an array in one place the others are ``:`` or one ``...``.
        """
        places = [_whole(i) for i in (index if isinstance(index, tuple) else (index,))]
        bounds: dict[str, Any] = {}
        places = [_bounded(i, bounds) if isinstance(i, slice) else i for i in places]
        if bounds:
            return self._apply("Indexer", {"input": self, **bounds}, tuple(places))
        picked = [i for i, entry in enumerate(places) if isinstance(entry, Operators) or _is_array(entry)]
        if not picked:
            return self._one("Indexer", tuple(places))
        others = [entry for i, entry in enumerate(places) if i != picked[0]]
        dots = [i for i, entry in enumerate(places) if entry is ...]
        if (
            len(picked) > 1
            or len(dots) > 1
            or any(e is not ... and (not isinstance(e, slice) or e != slice(None)) for e in others)
        ):
            raise WiringError(
                f"index={index!r}: with an array or a connection in one place the others must be ':' or one "
                "'...'; index twice, as in x[rows][:, 0]"
            )
        at = picked[0] - len(places) if dots and dots[0] < picked[0] else picked[0]
        return self._apply("Take", {"input": self, "indices": places[picked[0]]}, at)

    @property
    def shape(self) -> Connection:
        """Its sizes, int ``[rank]``."""
        return self._one("ShapeOf")

    def size(self, dim: Axis = None) -> Connection:
        """The number of elements, or the product of the sizes in ``dim``."""
        return self._one("Size", dim)

    def len(self) -> Connection:
        """The size of the first dimension."""
        return self._one("Length")

    def item(self) -> Connection:
        """The one element, as a scalar."""
        return self._one("Item")

    # ---- reductions ---------------------------------------------------------------------------------------

    def sum(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Sum", axis, keepdim)

    def mean(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Mean", axis, keepdim)

    def max(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Max", axis, keepdim)

    def min(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Min", axis, keepdim)

    def prod(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Prod", axis, keepdim)

    def var(self, axis: Axis = None, keepdim: bool = False, correction: int = 0) -> Connection:
        return self._one("Variance", axis, correction, keepdim)

    def any(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("Any", axis, keepdim)

    def all(self, axis: Axis = None, keepdim: bool = False) -> Connection:
        return self._one("All", axis, keepdim)

    def argmax(self, axis: int | None = None, keepdim: bool = False) -> Connection:
        return self._one("ArgMax", axis, keepdim)

    def argmin(self, axis: int | None = None, keepdim: bool = False) -> Connection:
        return self._one("ArgMin", axis, keepdim)

    # ---- shapes -------------------------------------------------------------------------------------------

    @property
    def T(self) -> Connection:
        """The transpose: all dimensions in reverse order."""
        return self._one("Transpose")

    def transpose(self, *axes: Any) -> Connection:
        """``x.transpose()``, ``x.transpose(1, 0, 2)`` or ``x.transpose((1, 0, 2))``."""
        return self._one("Transpose", None if not axes or axes[0] is None else _row(axes))

    def reshape(self, *shape: Any) -> Connection:
        """``x.reshape(2, -1)`` or ``x.reshape((x.shape[0], -1))``: integers, or sizes.

        ``x.reshape(y.shape)`` takes all of them from a connection.
        """
        return self._shaped("Reshape", shape)

    def _shaped(self, op: str, shape: Any) -> Connection:
        if len(shape) == 1 and not isinstance(shape[0], int):
            if isinstance(shape[0], Operators) and _is_row(shape[0]):
                return self._apply(op, {"input": self, "shape": shape[0]}, None)
            shape = (shape[0],) if isinstance(shape[0], Operators) else shape[0]
        if not isinstance(shape, list | tuple):
            raise WiringError(
                f"{shape!r} must be integers or connections, one a dimension, or a tuple of them"
            )
        row = [_whole(n) for n in shape]
        sizes = {f"size_{i}": n for i, n in enumerate(row) if isinstance(n, Operators)}
        if None in row:
            raise WiringError(
                f"{shape!r}: None is not a size; give integers, or connections that follow from shapes"
            )
        given = tuple(None if isinstance(n, Operators) else n for n in row)
        return self._apply(op, {"input": self, **sizes}, given)

    def flatten(self, start: int = 0, end: int = -1) -> Connection:
        return self._one("Flatten", start, end)

    def squeeze(self, axis: Axis = None) -> Connection:
        return self._one("Squeeze", axis)

    def expand_dims(self, axis: int | tuple[int, ...]) -> Connection:
        return self._one("ExpandDims", axis)

    def swapaxes(self, axis1: int, axis2: int) -> Connection:
        return self._one("SwapAxes", axis1, axis2)

    def broadcast_to(self, *shape: Any) -> Connection:
        """NumPy's broadcasting up to a shape, with sizes as in :meth:`reshape`."""
        return self._shaped("BroadcastTo", shape)

    def split(self, count: int, axis: int = 0) -> tuple[Connection, ...]:
        """``count`` equal parts along one dimension."""
        first = self._one("Split", count, axis)
        return tuple(first.output(f"output_{i}") for i in range(count))

    # ---- one by one ---------------------------------------------------------------------------------------

    def cast(self, dtype: Any) -> Connection:
        return self._one("Cast", dtype)

    def abs(self) -> Connection:
        return self._one("Absolute")

    def sqrt(self) -> Connection:
        return self._one("Sqrt")

    def exp(self) -> Connection:
        return self._one("Exp")

    def log(self) -> Connection:
        return self._one("Log")

    def sin(self) -> Connection:
        return self._one("Sine")

    def cos(self) -> Connection:
        return self._one("Cosine")

    def floor(self) -> Connection:
        return self._one("Floor")

    def atleast_1d(self) -> Connection:
        return self._one("AtLeast1D")

    def clamp(self, low: float | None = None, high: float | None = None) -> Connection:
        """:meth:`clip`."""
        return self.clip(low, high)

    def clip(self, low: float | None = None, high: float | None = None) -> Connection:
        return self._one("Clip", low, high)

    def tensor(self) -> Connection:
        """A scalar as an array."""
        return self._one("ToTensor")

    def stop_gradient(self) -> Connection:
        return self._one("StopGradient")


def _is_row(value: Any) -> bool:
    """Whether a connection is a row of sizes, such as ``x.shape``, as far as that is known yet."""
    from capibara.compose.logical.connections import Connection, Port

    if isinstance(value, Connection):
        block, source = value.call.first, value.call.connections.get("input")
        index = (
            getattr(block, "attributes", {}).get("index") if getattr(block, "op", "") == "indexer" else None
        )
        if index is not None and len(index) == 1 and isinstance(index[0], tuple):
            return isinstance(source, Operators) and _is_row(source)  # x.shape[:2]: a slice of a row is one
        value = Port(block, value.key)
    dims = value.wire.shape.dims() if isinstance(value, Port) else None
    return dims is not None and len(dims) == 1


def _bounded(entry: slice, ports: dict[str, Any]) -> slice:
    """A slice with the names of ports for bounds that are connections, which are put into ``ports``."""

    def bound(part: str) -> Any:
        value = _whole(getattr(entry, part))
        if not isinstance(value, Operators):
            return value
        key = part if part not in ports else f"{part}_{len(ports)}"
        ports[key] = value
        return key

    return slice(bound("start"), bound("stop"), _whole(entry.step))


def _row(values: tuple[Any, ...]) -> Any:
    """``f(1, 2)`` and ``f((1, 2))`` alike."""
    if len(values) == 1 and not isinstance(values[0], int):
        values = values[0]
    if isinstance(values, Operators) or (
        isinstance(values, list | tuple) and any(isinstance(v, Operators) for v in values)
    ):
        raise WiringError(f"{values!r}: an order of dimensions is integers, and cannot be a connection")
    if not isinstance(values, int | list | tuple):
        raise WiringError(f"{values!r} must be integers, one a dimension, or a tuple of them")
    return values


def _whole(entry: Any) -> Any:
    """NumPy's integers as Python's."""
    if isinstance(entry, Operators):
        return entry
    if getattr(entry, "shape", None) == () and hasattr(entry, "__index__") and not isinstance(entry, bool):
        try:
            return entry.__index__()
        except TypeError:
            return entry
    return entry


def _is_array(entry: Any) -> bool:
    return isinstance(entry, list) or (hasattr(entry, "dtype") and hasattr(entry, "shape"))
