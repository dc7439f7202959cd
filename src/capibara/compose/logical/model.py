"""Logical models: blocks connected by named connections, nested to any depth.

A :class:`Block` has ports, each a wire. A :class:`Primitive` is one operation. A :class:`Model` contains other blocks
and connects their ports by name::

    model = Model()
    model |= Linear(64)(input="x", output="hidden")     # joins by name; new names become the model's own
    model += Relu()                                      # += also joins input to the previous output
    model += Linear(10)(output="logits")

Nothing is computed here. Shapes and kinds are inferred as blocks are added, so that an invalid connection is refused
on the line that makes it, and the model is then unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.compose.errors import KindError, ShapeError, Site, WiringError, user_site
from capibara.compose.logical.arguments import choice, identifier
from capibara.compose.logical.block import Block, Child, IOKey, Placement, Port, Primitive
from capibara.compose.logical.canonical import Canonical
from capibara.compose.logical.connections import Call, Connection
from capibara.compose.logical.expressions import as_placement, expanded, gather, origin_of
from capibara.compose.logical.settings import check_key
from capibara.compose.logical.shapes import settle
from capibara.compose.logical.trail import on_undo, put, transaction
from capibara.compose.logical.values import check_constant
from capibara.compose.logical.wires import KINDS, Declaration, Wire, join

__all__ = ["Block", "IOKey", "Model", "Placement", "Port", "Primitive"]


class Model(Canonical):
    """Blocks connected by named connections.

    ``model |= block(port="name", …)`` adds a block; ``model += block`` also connects its input to the model's latest
    output. Subclass it to write your own block: declare inputs, parameters and states, add blocks.

    The outputs are the names marked by :meth:`expose` (or ``IOKey(expose=True)``); otherwise every named value that
    no block uses; otherwise the last block's output, under the name ``output``.
    """

    def __init__(self, *, name: str | None = None) -> None:
        super().__init__(name=name)
        self.children: list[Child] = []
        self.state_updates: dict[str, Wire] = {}
        self._names: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._exposed: list[str] = []
        self._last: Port | None = None
        self._hidden: set[str] = set()
        self._cins: list[str] | None = None
        self._couts: list[str] | None = None
        self._built: dict[int, tuple[Call, Block]] = {}
        self._keys: dict[int, tuple[IOKey, Wire, str]] = {}
        self._reserved: frozenset[str] = frozenset()
        self._frozen: tuple[list[str], list[str]] | None = None

    # ---- declaring ----------------------------------------------------------------------------------------

    def add_input(
        self, key: str, shape: Any = (...,), kind: str | None = None, axes: Iterable[str | None] = ()
    ) -> Port:
        """Declare a data input and its known properties. Sizes with equal names are equal within the model."""
        choice("kind", kind, KINDS, optional=True)
        with transaction():
            self._declare(key, Wire(self._shape(shape, axes), kind))
        return Port(self, key)

    def add_parameter(
        self,
        key: str,
        shape: Any,
        init: Callable[..., Any],
        *,
        axes: Iterable[str | None] = (),
        dtype: str | None = None,
        keep_dtype: bool = False,
    ) -> Port:
        """Declare an array of the model that is trained, or, if its dtype is an integer's, only stored.

        Args:
            key: its name; in the compiled model's parameters it is under the path of the enclosing blocks.
            shape: sizes or symbolic sizes, all of which must be known when parameters are created.
            init: an initialiser, ``init(key, shape, dtype)``.
            axes: logical axis names, one per dimension (``("embed", "mlp")``).
            dtype: overrides the precision policy. keep_dtype: used as it is stored, without a cast.
        """
        _check_init(init)
        axes = tuple(axes)
        with transaction():
            kind = "int" if dtype is not None and dtype.lstrip("u").startswith("int") else "float"
            wire = Wire(self._shape(shape, axes), kind, "param")
            wire.declaration = Declaration(key, init, dtype, keep_dtype, axes)
            self._declare(key, wire)
        return Port(self, key)

    def add_state(
        self,
        key: str,
        shape: Any,
        init: Callable[..., Any],
        *,
        axes: Iterable[str | None] = (),
        kind: str = "float",
        dtype: str | None = None,
    ) -> Port:
        """Declare an array that is passed in and returned updated: a cache, a running statistic.

        Set its next value with :meth:`update_state`; otherwise it does not change.
        """
        choice("kind", kind, KINDS)
        _check_init(init)
        axes = tuple(axes)
        with transaction():
            wire = Wire(self._shape(shape, axes), kind, "state")
            wire.declaration = Declaration(key, init, dtype, True, axes)
            self._declare(key, wire)
        return Port(self, key)

    def update_state(self, key: str, value: str | Port) -> None:
        """Set the value of a state after the model has run."""
        self._check_port(key)
        if self.wires[key].find().role != "state":
            raise WiringError(f"{key!r} of {self.label} is not a state; declare it with add_state(…)")
        if key in self.state_updates:
            raise WiringError(f"state {key!r} of {self.label} already has a next value")
        wire = value.wire if isinstance(value, Port) else self._wire(value)
        wire.find().consumed = True
        self.state_updates[key] = wire

    def _declare(self, key: str, wire: Wire) -> None:
        if key in self.wires:
            raise WiringError(f"{self.label} already has a connection {key!r}")
        check_key(key)
        self.wires[key] = wire

    # ---- adding blocks ------------------------------------------------------------------------------------

    @classmethod
    def create(cls, *, name: str | None = None, **outputs: Any) -> Model:
        """Create a model of everything that the outputs are computed from::

            x = IOKey("x")
            model = Model.create(y=Relu()(Linear(4)(x) + 1))

        Args:
            name: of the model.
            outputs: connections by output name.

        Raises:
            WiringError: there are no outputs, an output has the name of an input, or a block is part of another model.
            ShapeError, KindError: connected values do not match.
        """
        return gather(cls(name=name), outputs)

    def __ior__(self, other: Placement | Connection | Block) -> Model:
        block, connections, name = as_placement(other)
        self._add(block, connections, name, origin_of(other))
        return self

    def __iadd__(self, other: Placement | Connection | Block) -> Model:
        block, connections, name = as_placement(other)
        main = block._chosen_input(connections)
        if main is not None and main not in connections:
            source: Any = None
            if self._last is not None:
                source = self._last
            elif self.input_keys:
                source = self._main_input()
            else:
                source = "input"
            connections = {main: source, **connections}
        self._add(block, connections, name, origin_of(other))
        return self

    def __add__(self, other: Placement | Connection | Block) -> Model:
        """``model += other``, in an expression: the model itself, so that ``Model() + Linear(4) + Relu()`` is one."""
        return self.__iadd__(other)

    def __or__(self, other: Placement | Connection | Block) -> Model:
        """``model |= other``, in an expression: the model itself."""
        return self.__ior__(other)

    def add(self, block: Block | Placement | Connection, name: str | None = None, **connections: Any) -> Any:
        """Add a block under a name and connect its ports; returns the block, whose ports are its attributes."""
        origin = origin_of(block)
        block, given, own = as_placement(block)
        for key in connections:
            block._check_port(key)
        self._add(block, {**given, **connections}, name or own, origin)
        return block

    def _add(
        self, block: Block, connections: Mapping[str, Any], name: str | None, origin: Any = None
    ) -> None:
        site = user_site()
        with transaction():
            connections = expanded(self, connections)
            self._put(block, connections, name, site)
            put(block, "placed_by", origin)

    def _put(
        self,
        block: Block,
        connections: Mapping[str, Any],
        name: str | None,
        site: Site | None,
        *,
        last: bool = True,
    ) -> None:
        """Add a block whose connections hold no expression that is not in the model yet; in a transaction.

        ``last``: ``+=`` goes on from it.
        """
        if block is self:
            raise WiringError(f"{self.label} cannot be added to itself")
        if block.parent is not None:
            raise WiringError(
                f"this {type(block).__name__} is already part of {block.parent.label} (as {block.child_name!r}): "
                "make another one; to use the same parameters twice, connect the parameter, as in "
                "Linear(8)(weight=first.weight)"
            )
        if self.parent is not None:
            raise WiringError(f"{self.label} is already part of {self.parent.label}: add to it before that")
        name = self._child_name(name or block.name, block)
        if isinstance(block, Model):
            block._finish()
            block._frozen = (block.input_keys, block.output_keys)
        inputs, main = block.input_keys, block._main_output()
        block.parent, block.child_name = self, name

        def back() -> None:
            block.parent = block.child_name = None
            if isinstance(block, Model):
                block._frozen = None

        on_undo(back)
        for key, value in connections.items():
            if value is not None:
                self._connect(block, key, value, site)
        settle()
        self.children.append(Child(name, block, site))
        on_undo(self.children.pop)
        self._names[name] = 1
        on_undo(lambda: self._names.pop(name))
        for key in inputs:
            put(block.wires[key].find(), "consumed", True)
        if main is not None and last:
            put(self, "_last", Port(block, main))

    def _child_name(self, wanted: str | None, block: Block) -> str:
        if wanted is not None:
            identifier(wanted, f"name={wanted!r} is not a name for a block")
            if wanted in self._names:
                raise WiringError(f"{self.label} already has a block named {wanted!r}; choose another name")
            return wanted
        # RMSNorm is rms_norm, and Convolution2D convolution2d.
        base = re.sub(
            r"(?<=[a-z])(?=[A-Z])|(?<=[a-zA-Z0-9])(?=[A-Z][a-z])", "_", type(block).__name__
        ).lower()
        if isinstance(block, Primitive):
            base = block.op
        # Goes on from the number given out last, or n blocks of a kind would take n² steps to name.
        i = self._numbers.get(base, 0)
        while (name := f"{base}_{i}" if i else base) in self._names:
            i += 1
        self._numbers[base] = i
        return name

    def _connect(self, block: Block, key: str, value: Any, site: Site | None) -> None:
        block._check_port(key)
        outer, shown = self._resolve(value, produced=key in block.output_keys)
        self._join(outer, block.wires[key], shown, f"{block.label}.{key}", site)

    def _join(self, outer: Wire, inner: Wire, shown: str, place: str, site: Site | None) -> None:
        """Join two values; an error says what each is, what it has, and the line that connected them."""
        before = (repr(outer.find().shape), repr(inner.find().shape))

        def explain(error: Exception, kind: type[Exception] = ShapeError) -> Exception:
            source = outer.find().producer
            origin = (
                f"\n  {shown} is {source[0].label}.{source[1]}"
                if source and shown != f"{source[0].label}.{source[1]}"
                else ""
            )
            line = f"\n  connected at {site}" if site else ""
            left, right = before
            if kind is KindError:
                left, right = (w.kind.find().value or "unknown" for w in (outer.find(), inner.find()))
            what = "has" if kind is not KindError else "is"
            return kind(
                f"cannot connect {shown} to {place}: {error}\n  {shown} {what} {_said(left, kind)}, "
                f"{place} {what} {_said(right, kind)}{origin}{line}"
            )

        try:
            join(outer, inner, lambda e: explain(e))  # type: ignore[arg-type,return-value]
            check_constant(outer)
        except ShapeError as error:
            raise (error if str(error).startswith("cannot connect") else explain(error)) from None
        except KindError as error:
            raise explain(error, KindError) from None
        except WiringError as error:
            raise explain(error, WiringError) from None
        try:
            settle()
        except ShapeError as error:
            raise ShapeError(
                f"{error}\n  while connecting {shown} to {place}" + (f" at {site}" if site else "")
            ) from None

    # ---- what the model is --------------------------------------------------------------------------------

    @property
    def input_keys(self) -> list[str]:
        if (
            self._frozen is not None
        ):  # connected to the model around it: its ports are what they were before that
            return self._frozen[0]
        # Two names of one value are one input.
        found: dict[int, str] = {}
        for key, wire in self.wires.items():
            root = wire.find()
            if root.producer is None and root.role is None and key not in self._hidden:
                found.setdefault(id(root), key)
        return list(found.values())

    @property
    def output_keys(self) -> list[str]:
        if self._frozen is not None:
            return self._frozen[1]
        if self._exposed:
            return list(self._exposed)
        # A block that writes a value marks it as produced; one that another block reads is not an output.
        keys = [
            k
            for k, w in self.wires.items()
            if (r := w.find()).producer is not None and not r.consumed and k not in self._hidden
        ]
        if not keys and "output" in self.wires and self.wires["output"].find().producer is not None:
            return ["output"]
        return keys

    def __getattr__(self, key: str) -> Any:
        for child in self.__dict__.get("children", ()):
            if child.name == key and key not in self.wires:
                return child.block
        return super().__getattr__(key)

    def _check_port(self, key: str) -> None:
        if key == "output":
            self._finish()
        super()._check_port(key)

    def _finish(self) -> None:
        """Name the last value ``output`` where the author named none."""
        if not self.output_keys and self._last is not None and "output" not in self.wires:
            self.wires["output"] = self._last.wire

    def __repr__(self) -> str:
        def port(k: str) -> str:
            return f"{k}: {self.wires[k].find().shape}"

        ins = ", ".join(port(k) for k in self.input_keys)
        outs = ", ".join(port(k) for k in self.output_keys)
        return f"{type(self).__name__}({ins}) -> ({outs}) with {len(self.children)} blocks"


def _said(value: str, kind: type[Exception]) -> str:
    return value if kind is KindError else f"shape {value}"


def _check_init(init: Any) -> None:
    if not callable(init):
        raise WiringError(f"init={init!r} must be a function of (key, shape, dtype)")
