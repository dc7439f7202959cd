"""What a block's ports can be connected to: names, ports, annotated keys, and expressions.

A :class:`Connection` is the result of a block that is not in a model yet: of an operator (``x + 1``) or of a block
called with positional arguments (``Linear(4)(x)``). It stores the call and its inputs, so that a whole model can be
written as one expression and built from its result (:meth:`Model.create`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin

from capibara.compose.errors import Site, WiringError, user_site
from capibara.compose.logical.operators import Operators
from capibara.compose.logical.values import TBD, Tensor, TensorType
from capibara.compose.logical.wires import KINDS
from capibara.errors import did_you_mean

if TYPE_CHECKING:
    from capibara.compose.logical.block import Block
    from capibara.compose.logical.wires import Wire

__all__ = ["Call", "Connection", "IOKey", "Placement", "Port", "as_type", "called"]


class Port(Operators):
    """An input or output of a block: ``block.output``. Connecting it to another port makes them one value.

    Two ports are equal if they are the same port of the same block.
    """

    __slots__ = ("block", "key")

    def __init__(self, block: Block, key: str) -> None:
        self.block = block
        self.key = key

    @property
    def wire(self) -> Wire:
        wire = self.block.wires.get(self.key)
        if wire is None:
            raise WiringError(f"{self.block.label} has no port {self.key!r} any more: it has been renamed")
        return wire.find()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Port) and self.block is other.block and self.key == other.key

    def __hash__(self) -> int:
        return hash((id(self.block), self.key))

    def __repr__(self) -> str:
        return f"{self.block.label}.{self.key}"


class IOKey(Operators):
    """A named connection with further properties: ``Linear(8)(output=IOKey("y", expose=True))``.

    In functional style, models start with it: ``y = Relu()(IOKey("x") + 1)``.

    Args:
        name: the connection's name. Without one it is ``input`` if a block reads it (``input_1`` … if there are
            several), and an unnamed value if a block writes it.
        value: a fixed value: a scalar, an array or a (nested) list of numbers; :data:`TBD`: none.
        shape: its shape, as in :func:`capibara.compose.logical.shapes.as_shape`.
        type: "float", "int" or "bool"; ``float``, ``int``, ``bool`` for a scalar; ``Tensor[float]`` … or ``Tensor``
            for an array of any shape; ``tuple`` or ``list`` for one with dimensions.
        expose: True makes it an output of the model, even if another block also uses it.
        differentiable: True makes an input a trained parameter, False makes a parameter an input.
        interval: ``[low, high]``: bounds of ``value``, and of the uniform initial distribution of a parameter
            (``differentiable=True``).
        connections: other connections of the model with the same value.
        kind: the same as ``type``, by name. axes: logical axis names, one per dimension.

    Raises:
        WiringError: an invalid value, type or interval, or an empty interval.
    """

    __slots__ = (
        "axes",
        "connections",
        "differentiable",
        "expose",
        "given_shape",
        "interval",
        "kind",
        "name",
        "value",
    )

    def __init__(
        self,
        name: str | None = None,
        value: Any = TBD,
        shape: Iterable[Any] | str | None = None,
        type: Any = None,
        expose: bool | None = None,
        differentiable: bool | None = None,
        interval: Iterable[float] | None = None,
        connections: Iterable[Any] = (),
        *,
        kind: str | None = None,
        axes: tuple[str | None, ...] = (),
    ) -> None:
        if name is not None and not isinstance(name, str):
            raise WiringError(f"name={name!r} must be a string")
        if isinstance(value, tuple | list) and any(isinstance(v, str) for v in value):
            raise WiringError(
                f"value={value!r} is not a value; for a shape write IOKey({name!r}, shape={value!r})"
            )
        for key, flag in (("expose", expose), ("differentiable", differentiable)):
            if flag is not None and not isinstance(flag, bool):
                raise WiringError(f"{key}={flag!r} must be True, False or None")
        self.name = name
        self.value = value
        self.kind, wanted = as_type(kind if type is None else type)
        self.given_shape: Any = wanted if shape is None else shape  # .shape is an expression
        self.expose = expose
        self.differentiable = differentiable
        self.interval = None if interval is None else _interval(interval)
        if self.interval is not None and value is TBD and not differentiable:
            raise WiringError(
                f"interval={list(self.interval)} says nothing of an input, whose values are not looked at: "
                "give a value or differentiable=True with it"
            )
        self.connections = tuple(connections)
        self.axes = tuple(axes)

    def __repr__(self) -> str:
        return f"IOKey({'' if self.name is None else repr(self.name)})"


def _interval(interval: Iterable[float]) -> tuple[float, float]:
    try:
        low, high = (float(n) for n in interval)
    except (TypeError, ValueError):
        raise WiringError(f"interval={interval!r} must be two numbers, [low, high]") from None
    if not low <= high:
        raise WiringError(f"interval={interval!r}: {low} is above {high}")
    return low, high


_SCALARS = {float: "float", int: "int", bool: "bool"}


def as_type(given: Any) -> tuple[str | None, tuple[Any, ...] | None]:
    """``(kind, shape)`` of a type; None where the type leaves it open.

    Raises:
        WiringError: it is not a valid type of a connection.
    """
    if given is None or given is Tensor or given is Any:
        return None, None
    if isinstance(given, TensorType):
        return given.kind, None
    if isinstance(given, str):
        if given not in KINDS:
            raise WiringError(
                f"kind {given!r} must be one of {', '.join(map(repr, KINDS))}.{did_you_mean(given, KINDS)}"
            )
        return given, None
    if isinstance(given, type) and given in _SCALARS:
        return _SCALARS[given], ()
    kind = getattr(given, "kind", None)
    if isinstance(kind, str) and kind in KINDS:  # ml.float32 …
        return kind, None
    origin = get_origin(given)
    parts = [as_type(t) for t in get_args(given) if t is not ...]
    kinds = {k for k, _ in parts}
    kind = kinds.pop() if len(kinds) == 1 else None
    if origin in (Union, types.UnionType):
        return kind, () if all(s == () for _, s in parts) else None
    if given is tuple or given is list or origin is tuple or origin is list:
        return kind, (None, ...)
    raise WiringError(
        f"type={given!r} is not a type of connections: use float, int, bool, Tensor, Tensor[float], Tensor[int], "
        "Tensor[bool], tuple or list"
    )


class Placement(Operators):
    """A block and its declared connections: the result of calling a block with names.

    Add it with ``model |= …`` or ``model += …``; in an expression it is the block's main output.
    """

    __slots__ = ("_connection", "block", "connections", "name")

    def __init__(self, block: Block, connections: Mapping[str, Any], name: str | None = None) -> None:
        self.block = block
        self.connections = connections
        self.name = name
        self._connection: Connection | None = None

    @property
    def connection(self) -> Connection:
        """The main output as an expression."""
        if self._connection is None:
            self._connection = called(None, self.connections, self.block, self.name)
            self._connection.call.origin = self
        return self._connection

    def __repr__(self) -> str:
        return f"{self.block.label}({', '.join(f'{k}={v!r}' for k, v in self.connections.items())})"


class Call:
    """A block to be added to a model, and its inputs.

    Attributes:
        make: another block of the kind, for operators, which have nothing of their own.
        first: the block. connections: by port. name: for the block.
        origin: what a user adds to a model to make this call in it, the call itself by default.
        site: the line where it was written.
    """

    __slots__ = ("connections", "first", "make", "name", "origin", "site")

    def __init__(
        self,
        make: Callable[[], Block] | None,
        first: Block,
        connections: Mapping[str, Any],
        name: str | None,
    ) -> None:
        self.make = make
        self.first = first
        self.connections = connections
        self.name = name
        self.origin: Placement | None = None
        self.site: Site | None = user_site()

    def block(self) -> Block:
        """The block; for an operator a new one, if the first is part of a model."""
        if self.first.parent is not None and self.make is not None:
            return self.make()
        return self.first


class Connection(Operators):
    """The result of a block that is not in a model yet; see :mod:`capibara.compose.logical.connections`.

    Connections are compared by identity: ``a == b`` is ``a is b``.
    """

    __slots__ = ("call", "key")

    def __init__(self, call: Call, key: str) -> None:
        self.call = call
        self.key = key

    def output(self, key: str) -> Connection:
        """Another output of the same block."""
        keys = self.call.first.output_keys
        if key not in keys:
            raise WiringError(
                f"{self.call.first.label} has no output {key!r}; its outputs are {', '.join(keys)}."
                f"{did_you_mean(key, keys)}"
            )
        return Connection(self.call, key)

    def __repr__(self) -> str:
        return f"{self.call.first.label}(…).{self.key}"


def called(
    make: Callable[[], Block] | None,
    connections: Mapping[str, Any],
    block: Block | None = None,
    name: str | None = None,
) -> Connection:
    """The main output of a block that reads ``connections``: of ``block``, or of what ``make`` makes.

    Raises:
        WiringError: the block has no output.
    """
    if block is None:
        assert make is not None
        block = make()
    block._finish()
    key = block._main_output()
    if key is None:
        raise WiringError(f"{block.label} ({type(block).__name__}) has no output that could be used")
    return Connection(Call(make, block, connections, name), key)
