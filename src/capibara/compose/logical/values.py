"""Constant values in a model: scalars, arrays, lists of numbers, and the marker for "not set yet"."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from capibara.compose.errors import InputError, KindError, WiringError
from capibara.compose.logical.shapes import MAX_SIZE, Dim, Shape
from capibara.compose.logical.trail import put
from capibara.compose.logical.wires import Wire

__all__ = [
    "TBD",
    "Numbers",
    "Tensor",
    "TensorType",
    "ToBeDetermined",
    "as_constant",
    "check_constant",
    "settle_numbers",
]

MOST = 1_000_000
"""Elements of the longest list that is taken for numbers: longer ones should be arrays."""
DEEPEST = 32
_MOST_SIZES = 64


class ToBeDetermined:
    """The type of :data:`TBD`."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "TBD"


TBD = ToBeDetermined()
"""The value is not set yet: it is an input, or comes from another block."""


class TensorType:
    """``Tensor[float]``: the type of arrays of one kind."""

    __slots__ = ("kind",)

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"Tensor[{self.kind or 'any'}]"


class Tensor:
    """``Tensor([[1.0, 2.0]])`` is a value, ``Tensor[float]`` the type of arrays of floats.

    Args:
        value: an array, or a (nested) list of numbers, which gets the compute dtype of the model.
        dtype: the dtype of the array.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any, dtype: Any = None) -> None:
        self.value = value
        if dtype is not None:
            from capibara.compose.dtypes import DTYPES, dtype_name

            made = value if hasattr(value, "dtype") else np.asarray(_checked(value, [0], 0)[0])
            self.value = np.asarray(made).astype(DTYPES[dtype_name(dtype)].dtype)

    def __class_getitem__(cls, kind: Any) -> TensorType:
        from capibara.compose.logical.connections import as_type

        return TensorType(as_type(kind)[0])

    def __repr__(self) -> str:
        return f"Tensor({self.value!r})"


class Numbers:
    """A (nested) list of numbers. As for a Python scalar, its dtype follows from the other operands."""

    __slots__ = ("_whole", "shape", "values")

    def __init__(self, values: Any) -> None:
        self.values, kinds = _checked(values, [0], 0)
        self.shape = np.shape(self.values)
        if len(kinds) > 1 and "bool" in kinds:
            raise WiringError(f"{values!r:.200} mixes numbers with True or False")
        self._whole = kinds == {"int"}

    @property
    def kind(self) -> str | None:
        """Its kind; None if integers may become floats."""
        if self._whole:
            return None
        return "bool" if math.prod(self.shape) and isinstance(self._first(), bool) else "float"

    def _first(self) -> Any:
        value = self.values
        while isinstance(value, tuple):
            value = value[0]
        return value

    def array(self, kind: str | None, compute: str) -> np.ndarray[Any, Any]:
        """The array: floats in the dtype ``compute``, integers as int32."""
        if kind == "bool" or self.kind == "bool":
            return np.asarray(self.values, bool)
        if kind == "int" or (kind is None and self._whole):
            return _as_int32(np.asarray(self.values), repr(self))
        return np.asarray(self.values, "float64").astype(_numpy(compute))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.values, dtype)

    def __repr__(self) -> str:
        return repr(self.values)


def _checked(values: Any, count: list[int], depth: int) -> tuple[Any, set[str]]:
    """Nested tuples of Python numbers, all rows of one shape, and the kinds that are in them."""
    if isinstance(values, bool | int | float):
        count[0] += 1
        if count[0] > MOST:
            raise WiringError(f"a list of more than {MOST} numbers: pass an array")
        kind = "bool" if isinstance(values, bool) else "float" if isinstance(values, float) else "int"
        return (float(values) if kind == "float" else values), {kind}
    if not isinstance(values, list | tuple):
        raise WiringError(
            f"{values!r} ({type(values).__name__}) in a list is not a number; a list of numbers and connections may "
            "hold ports, IOKeys and expressions, too"
        )
    if depth >= DEEPEST:
        raise WiringError(f"lists nested more than {DEEPEST} deep are not an array")
    rows = [_checked(v, count, depth + 1) for v in values]
    if len({np.shape(row) for row, _ in rows}) > 1:
        raise WiringError(f"the rows of {values!r:.200} differ in shape")
    return tuple(row for row, _ in rows), set().union(*(kinds for _, kinds in rows))


_LETTERS = {"f": "float", "i": "int", "u": "int", "b": "bool"}


def as_constant(value: Any) -> Wire:
    """A wire with a constant value.

    Raises:
        WiringError: it is not a number, an array or a list of numbers.
    """
    if isinstance(value, Tensor):
        value = value.value
    if isinstance(value, list | tuple):
        value = Numbers(value)
        kind = value.kind
    elif isinstance(value, bool | int | float) and not isinstance(value, np.generic):
        # A Python int takes the kind of what it meets, as in NumPy and JAX.
        kind = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else None
    else:
        name = str(getattr(value, "dtype", "")).removeprefix("torch.")
        letter = getattr(getattr(value, "dtype", None), "kind", None)
        # ml_dtypes (bfloat16 …) report the kind "V"; PyTorch's dtypes have none.
        kind = "float" if "float" in name else "bool" if name == "bool" else _LETTERS.get(letter or name[:1])
        if kind is None or "complex" in name:
            raise WiringError(
                f"{value!r:.200} ({type(value).__name__}) cannot be connected: give a connection's name, a port of a "
                "block in the model, a number, an array or a list of numbers"
            )
    wire = Wire(Shape(Dim(int(n)) for n in getattr(value, "shape", ())), kind, "constant")
    wire.constant = value
    wire.value = _as_sizes(value)
    return wire


def _as_sizes(value: Any) -> Shape | None:
    """The sizes that an integer, or a row of a few, may stand for; None if it is something else."""
    if isinstance(value, Numbers):
        value = value.values
    elif (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "iu" and value.size <= _MOST_SIZES
    ):
        value = value.tolist()
    row = tuple(value) if isinstance(value, list | tuple) else (value,)
    if len(row) > _MOST_SIZES:
        return None
    sizes = [n for n in row if isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_SIZE]
    return Shape(Dim(n) for n in sizes) if len(sizes) == len(row) else None


def check_constant(wire: Wire) -> None:
    """Refuse an integer constant where booleans are needed: it is not converted.

    Raises:
        KindError: the wire has such a value.
    """
    root = wire.find()
    value = root.constant
    if value is None or root.kind.find().value != "bool":
        return
    whole = value.kind is None if isinstance(value, Numbers) else type(value) is int
    if whole:
        raise KindError(f"the number {value!r} is not a boolean: write True or False")


def settle_numbers(wires: Iterable[Wire], compute: str) -> None:
    """Convert lists of numbers to arrays: of the kind of their operands, floats in the dtype ``compute``.

    The same for NumPy's 64-bit arrays, NumPy's default for Python numbers.

    Raises:
        KindError: integers are used where booleans are needed. InputError: they do not fit into int32.
    """
    for wire in wires:
        if wire.role != "constant":
            continue
        check_constant(wire)
        value = wire.constant
        if isinstance(value, Numbers):
            put(wire, "constant", value.array(wire.kind.find().value, compute))
        elif isinstance(value, np.ndarray | np.generic) and value.dtype.itemsize == 8:
            if value.dtype.kind == "f" and compute != "float64":
                put(wire, "constant", np.asarray(value).astype(_numpy(compute)))
            elif value.dtype.kind in "iu":
                put(wire, "constant", _as_int32(np.asarray(value), repr(value)))


def _as_int32(data: np.ndarray[Any, Any], shown: str) -> np.ndarray[Any, Any]:
    if data.size and (data.min() < -(2**31) or data.max() >= 2**31):
        raise InputError(f"{shown:.200} has numbers that do not fit an int32")
    return data.astype("int32")


def _numpy(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)
