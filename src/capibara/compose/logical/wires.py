"""Wires: the values of a model before it is compiled.

A :class:`Wire` is one value that flows through a model: an input, a parameter, a state, or the result of an
operation. A block's port and the connection it is connected to in the model around it are two wires until they are
joined; joining merges them (a union-find), so one value that is seen at five depths of nesting is one wire.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from capibara.compose.errors import KindError, ShapeError, WiringError
from capibara.compose.logical.shapes import Shape, unify
from capibara.compose.logical.trail import put, root_of

__all__ = ["KINDS", "Declaration", "Kind", "Wire", "join"]


class Producer(Protocol):
    """What a wire needs to know of the block that it comes from."""

    @property
    def label(self) -> str: ...


KINDS = ("float", "int", "bool")


class Kind:
    """Float, int or bool, or not yet known; kinds that must be equal are merged (a union-find).

    ``numeric``: it may not be bool, because arithmetic is done with it.
    """

    __slots__ = ("numeric", "parent", "value")

    def __init__(self, value: str | None = None, numeric: bool = False) -> None:
        self.value = value
        self.numeric = numeric
        self.parent: Kind | None = None

    def find(self) -> Kind:
        return root_of(self)


def _remedy(a: str, b: str) -> str:
    """What makes two kinds one: nothing is converted without being asked for."""
    if {a, b} == {"int", "float"}:
        return ": make the int a float with Cast('float32'), or, of a connection, .cast('float32')"
    if "bool" in (a, b):
        other = a if b == "bool" else b
        return f": make the bool a number with Cast('{'float32' if other == 'float' else 'int32'}')"
    return ""


def _unify_kinds(a: Kind, b: Kind) -> None:
    a, b = a.find(), b.find()
    if a is b:
        return
    if a.value is not None and b.value is not None and a.value != b.value:
        raise KindError(f"{a.value} is not {b.value}{_remedy(a.value, b.value)}")
    if (a.numeric or b.numeric) and "bool" in (a.value, b.value):
        raise KindError("bool does not support arithmetic; cast to int or float first, as with Cast('int32')")
    put(b, "parent", a)
    if a.value is None:
        put(a, "value", b.value)
    if b.numeric and not a.numeric:
        put(a, "numeric", True)


class Declaration:
    """What a parameter or a state is made from: its initialiser and how its dtype is chosen.

    Args:
        init: ``init(key, shape, dtype) -> array`` (see :mod:`capibara.compose.initializers`).
        dtype: a fixed dtype, or None for the precision policy's parameter dtype (compute dtype for states).
        keep_dtype: do not cast to the compute dtype at the point of use (norm scales, decay rates).
        axes: logical axis names, one a dimension.
    """

    __slots__ = ("axes", "dtype", "init", "keep_dtype", "key")

    def __init__(
        self,
        key: str,
        init: Callable[..., Any],
        dtype: str | None = None,
        keep_dtype: bool = False,
        axes: tuple[str | None, ...] = (),
    ) -> None:
        self.key = key
        self.init = init
        self.dtype = dtype
        self.keep_dtype = keep_dtype
        self.axes = axes


class Wire:
    """One value: its shape, its kind, where it comes from and what role it has in the compiled function.

    ``value``: of integers that are sizes, the dimensions that they are the sizes of.
    """

    __slots__ = (
        "constant",
        "consumed",
        "declaration",
        "kind",
        "parent",
        "producer",
        "role",
        "shape",
        "value",
    )

    def __init__(self, shape: Shape, kind: Kind | str | None = None, role: str | None = None) -> None:
        self.shape = shape
        self.kind = kind if isinstance(kind, Kind) else Kind(kind)
        self.role = role  # None (data), "param", "state", "constant"
        self.declaration: Declaration | None = None
        self.constant: Any = None
        self.value: Shape | None = None
        self.producer: tuple[Producer, str] | None = None
        self.consumed = False
        self.parent: Wire | None = None

    def find(self) -> Wire:
        return root_of(self)

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        """The logical axis name of each dimension, or None while the rank is unknown."""
        root = self.find()
        if root.declaration is not None and root.declaration.axes:
            return root.declaration.axes
        dims = root.shape.dims()
        return None if dims is None else tuple(d.axis for d in dims)


def join(a: Wire, b: Wire, where: Callable[[ShapeError], ShapeError] | None = None) -> Wire:
    """Make two wires one.

    Raises:
        ShapeError, KindError: when they cannot be the same value.
        WiringError: when both are produced, or are different parameters, states or constants.
    """
    a, b = a.find(), b.find()
    if a is b:
        return a
    if a.producer is not None and b.producer is not None:
        raise WiringError("both are results of operations; one value can come from one place only")
    roles = {a.role, b.role} - {None}
    if len(roles) > 1 or (roles and (a.role == b.role) and roles != {"param"}):
        raise WiringError(f"one is a {a.role}, the other a {b.role}; they cannot be one value")
    if roles and (a.producer or b.producer):
        # A computed value takes the place of a declared parameter: a hypernetwork, or a shared projection.
        roles -= {"param"}
        if roles:
            raise WiringError(f"a {roles.pop()} cannot also be the result of an operation")
    _unify_kinds(a.kind, b.kind)
    unify(a.shape, b.shape, where)
    if a.value is not None and b.value is not None:
        unify(a.value, b.value, where)
    put(b, "parent", a)
    if a.value is None:
        put(a, "value", b.value)
    if a.producer is None and b.producer is not None:
        put(a, "producer", b.producer)
    if a.declaration is None:
        put(a, "declaration", b.declaration)
    if a.role is None:
        put(a, "role", b.role)
    if a.role == "param" and a.producer is not None:
        put(a, "role", None)
        put(a, "declaration", None)
    if b.constant is not None:
        put(a, "constant", b.constant)
    if b.consumed:
        put(a, "consumed", True)
    return a
