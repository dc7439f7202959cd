"""Set properties of existing connections: names, shapes, types, values, trained parameters, states.

A connection is given by its name in the model, as a port of a block, or as an expression of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from capibara.compose.errors import KindError, ShapeError, Site, WiringError, user_site
from capibara.compose.initializers import Constant, Given, Normal, Uniform
from capibara.compose.logical.arguments import identifier
from capibara.compose.logical.block import Block, Child
from capibara.compose.logical.connections import Call, Connection, IOKey, Port, as_type
from capibara.compose.logical.shapes import Dim, Rest, Shape, set_size, settle
from capibara.compose.logical.trail import on_undo, put, transaction
from capibara.compose.logical.values import TBD, Numbers, as_constant
from capibara.compose.logical.wires import Declaration, Wire, join
from capibara.errors import did_you_mean

__all__ = ["Settings", "check_key"]


def check_key(key: Any) -> None:
    identifier(key, f"{key!r} is not a connection name")


class Settings(Block):
    """Base of :class:`~capibara.compose.logical.model.Model`: its connections and their properties."""

    children: list[Child]
    state_updates: dict[str, Wire]
    _exposed: list[str]
    _hidden: set[str]
    _last: Port | None
    _cins: list[str] | None
    _couts: list[str] | None
    _built: dict[int, tuple[Call, Block]]
    _keys: dict[int, tuple[IOKey, Wire, str]]
    _reserved: frozenset[str]
    _join: Callable[[Wire, Wire, str, str, Site | None], None]

    # ---- finding connections ------------------------------------------------------------------------------

    def _unfrozen(self) -> None:
        if self.parent is not None:
            raise WiringError(f"{self.label} is already part of {self.parent.label}: change it before that")

    def _wire(self, key: str) -> Wire:
        if key not in self.wires:
            check_key(key)
            self.wires[key] = Wire(Shape([Rest()]))
            on_undo(lambda: self.wires.pop(key))
        return self.wires[key]

    def _resolve(self, value: Any, *, produced: bool = False) -> tuple[Wire, str]:
        """The value that something to connect to stands for, and how to call it.

        ``produced``: a block writes it. Expressions must be in the model already.
        """
        if isinstance(value, str):
            return self._wire(value), f"{self.label}.{value}"
        if isinstance(value, IOKey):
            return self._keyed(value, produced)
        if isinstance(value, Connection):
            value = Port(self._built[id(value.call)][1], value.key)
        if not isinstance(value, Port):
            wire = as_constant(value)
            return wire, f"the value {value!r:.80}"
        if not _within(value.block, self):
            region = _region_around(value.block)
            if region is not None:
                raise WiringError(
                    f"{value!r} is not part of {self.label}: it is inside of {region.label} "
                    f"({type(region).__name__}) and does not exist outside of it; connect to what "
                    f"{region.label} gives out ({', '.join(region.output_keys)}), or, for a parameter, declare "
                    "it outside and let the block share it (shared=[…])"
                )
            raise WiringError(
                f"{value!r} is not part of {self.label}: add its block to the model first, then connect to it"
            )
        return value.wire, repr(value)

    def _keyed(self, key: IOKey, produced: bool) -> tuple[Wire, str]:
        """The connection of a key, with what the key says of it, said once."""
        if id(key) in self._keys:
            return self._keys[id(key)][1:]
        name = key.name
        if name is None and key.value is TBD and not produced and not key.connections:
            name, i = "input", 0
            while name in self.wires or name in self._reserved:
                i += 1
                name = f"input_{i}"
        outer = Wire(Shape([Rest()])) if name is None else self._wire(name)
        shown = repr(key) if name is None else f"{self.label}.{name}"
        for other in key.connections:
            wire, what = self._resolve(other)
            self._join(wire, outer, what, shown, None)
        shape = (...,) if key.given_shape is None else key.given_shape
        self._say(outer, Wire(self._shape(shape, key.axes), key.kind), shown)
        if key.value is not TBD:
            self._say(outer, _in_interval(key, as_constant(key.value), shown), shown)
        if key.expose:
            if name is None:
                raise WiringError("IOKey(expose=True) needs a name: the output's")
            self._expose(name)
        if key.differentiable is not None:
            if produced and not key.differentiable:
                raise WiringError(
                    f"{shown} is a result, so differentiable=False cannot hold: add StopGradient() after it"
                )
            if not produced:
                init = None if key.interval is None else Uniform(*key.interval)
                self._differentiable(outer, name, key.differentiable, shown, init)
        self._keys[id(key)] = (key, outer, shown)
        on_undo(lambda: self._keys.pop(id(key)))
        return outer, shown

    def _say(self, wire: Wire, more: Wire, shown: str) -> None:
        try:
            join(wire, more)
            settle()
        except (ShapeError, KindError, WiringError) as error:
            raise type(error)(f"{shown}: {error}") from None

    def _found(self, key: Any) -> tuple[Wire, str]:
        """An existing connection, by name, as a port or as an expression."""
        if isinstance(key, str):
            self._check_port(key)
            return self.wires[key], f"{self.label}.{key}"
        if isinstance(key, IOKey) and key.name is not None and id(key) not in self._keys:
            return self._found(key.name)
        if isinstance(key, IOKey) and id(key) not in self._keys:
            raise WiringError(f"{key!r} is not part of {self.label}: connect it first")
        value = self._expanded(key)
        if not isinstance(value, Port | Connection | IOKey):
            raise WiringError(
                f"{key!r} is not a connection of {self.label}: give its name, a port or an expression"
            )
        return self._resolve(value)

    def _expanded(self, value: Any) -> Any:
        from capibara.compose.logical.expressions import expanded

        return expanded(self, {"": value})[""]  # type: ignore[arg-type]

    def _name_of(self, wire: Wire, shown: str) -> str:
        """A name of a value, a new one after its place if it has none."""
        root = wire.find()
        for name, other in self.wires.items():
            if other.find() is root:
                return name
        base = shown.removeprefix(f"{self.label}.").replace(".", "_")
        name, i = base, 0
        while name in self.wires:
            i += 1
            name = f"{base}_{i}"
        self._name(name, root)
        return name

    def _name(self, name: str, wire: Wire) -> None:
        """Give a value a further name."""
        if name in self.wires:
            if self.wires[name].find() is not wire.find():
                raise WiringError(f"{self.label} already has a connection {name!r}")
            return
        check_key(name)
        self.wires[name] = wire
        on_undo(lambda: self.wires.pop(name))

    # ---- names --------------------------------------------------------------------------------------------

    def expose(self, *keys: str) -> None:
        """Make named connections the outputs of the model (all others only if exposed as well)."""
        for key in keys:
            self._check_port(key)
        for key in keys:
            self._expose(key)

    def _expose(self, key: str) -> None:
        if key not in self._exposed:
            self._exposed.append(key)
            on_undo(lambda: self._exposed.remove(key))

    def expose_keys(self, *keys: Any, **named: Any) -> None:
        """Make connections outputs: ``expose_keys("a", b="c", total=first.output + 1)``.

        Args:
            keys: connections that keep their names. named: connections by output name.

        Raises:
            WiringError: there is no such connection, or a name is already taken.
        """
        self._unfrozen()
        with transaction():
            for key in keys:
                wire, shown = self._found(key)
                self._expose(key if isinstance(key, str) else self._name_of(wire, shown))
            for name, key in named.items():
                wire, _ = self._found(key)
                self._name(name, wire)
                self._expose(name)

    def rename_key(self, old: Any, new: str) -> None:
        """Rename a connection; the old name is then free.

        Raises:
            WiringError: there is no such connection, or the name is taken.
        """
        self._unfrozen()
        if isinstance(old, str) and old == new:
            return self._check_port(old)
        with transaction():
            wire, _ = self._found(old)
            root = wire.find()
            if new in self.wires:
                raise WiringError(f"{self.label} already has a connection {new!r}")
            check_key(new)
            names = [old] if isinstance(old, str) else [k for k, w in self.wires.items() if w.find() is root]
            before = dict(self.wires)
            wires = {new if names[:1] == [k] else k: w for k, w in before.items()}
            if not names:
                wires[new] = root
        self.wires.clear()
        self.wires.update(wires)
        for name in names[:1]:
            self._exposed[:] = [new if key == name else key for key in self._exposed]
            for row in (self._cins, self._couts):
                if row is not None:
                    row[:] = [new if key == name else key for key in row]
            if name in self.state_updates:
                self.state_updates[new] = self.state_updates.pop(name)
            self._hidden.discard(name)
        return None

    def connect(self, *connections: Any, key: str | IOKey | None = None) -> None:
        """Merge connections into one value: ``connect("a", relu.input, key="shared")``.

        At most one of them may be the result of a block. If several have names, the value keeps the first, or gets
        that of ``key``; the others still refer to it, but are neither inputs nor outputs.

        Args:
            connections: two or more, or one to be connected with the key.
            key: a name, or an :class:`IOKey` with further properties.

        Raises:
            WiringError, ShapeError, KindError: they cannot be one value; the model is unchanged.
        """
        self._unfrozen()
        if len(connections) + (key is not None) < 2:
            raise WiringError("connect needs at least two connections, or one and a key")
        site = user_site()
        with transaction():
            found = [self._found(c) for c in connections]
            if key is not None:
                found.insert(0, self._resolve(key))
            first, shown = found[0]
            for wire, what in found[1:]:
                self._join(first, wire, shown, what, site)
            names = [c for c in connections if isinstance(c, str)]
            kept = key.name if isinstance(key, IOKey) else key
            if kept is None and names:
                kept = names[0]
            for name in names:
                if name != kept and name not in self._exposed and name not in self._hidden:
                    self._hide(name)

    def _hide(self, name: str) -> None:
        self._hidden.add(name)
        on_undo(lambda: self._hidden.discard(name))

    def merge_connections(self, *connections: Any, name: str | None = None) -> None:
        """:meth:`connect`, with the name of the result."""
        self.connect(*connections, key=name)

    # ---- shapes, types, values ----------------------------------------------------------------------------

    def set_shapes(self, config: Mapping[Any, Any] | None = None, /, **shapes: Any) -> None:
        """Set shapes of connections: ``model.set_shapes(input=(None, 128))``.

        Args:
            config: shapes by name, port or expression. shapes: by name.

        Raises:
            ShapeError: a size contradicts a known one; the model is unchanged.
        """
        with transaction():
            for key, spec in _pairs(config, shapes):
                wire, shown = self._found(key)
                before = repr(wire.find().shape)
                try:
                    join(wire, Wire(self._shape(spec)))
                    settle()
                except ShapeError as error:
                    raise ShapeError(f"{shown} has shape {before}, not {spec!r}: {error}") from None

    def set_sizes(self, **sizes: int) -> None:
        """Fix symbolic sizes by name: ``model.set_sizes(batch=8)``."""
        with transaction():
            for key, size in sizes.items():
                dim = self.symbols.get(key)
                if not isinstance(dim, Dim):
                    names = [k for k, v in self.symbols.items() if isinstance(v, Dim)]
                    raise ShapeError(
                        f"{self.label} has no size named {key!r}; it has {names}.{did_you_mean(key, names)}"
                    )
                set_size(dim, size)
                settle()

    def set_types(self, config: Mapping[Any, Any] | None = None, /, **types: Any) -> None:
        """Set types of connections: ``model.set_types(input=Tensor[int], scale=float)``.

        Args:
            config: types by name, port or expression. types: by name; see :class:`IOKey` for valid types.

        Raises:
            KindError, ShapeError: a type contradicts a known one; the model is unchanged.
            WiringError: it is not a type.
        """
        with transaction():
            for key, given in _pairs(config, types):
                wire, shown = self._found(key)
                kind, shape = as_type(given)
                self._say(wire, Wire(self._shape((...,) if shape is None else shape), kind), shown)

    def set_values(self, config: Mapping[Any, Any] | None = None, /, **values: Any) -> None:
        """Give inputs constant values that are part of the model: ``model.set_values(scale=0.5)``.

        Args:
            config: numbers, arrays or lists of numbers by name, port or expression. values: by name.

        Raises:
            WiringError: the connection is not an input, or the value is invalid.
            KindError, ShapeError: the value does not match; the model is unchanged.
        """
        with transaction():
            for key, value in _pairs(config, values):
                wire, shown = self._found(key)
                if wire.find().producer is not None or wire.find().role is not None:
                    what = wire.find().role or "the result of a block"
                    raise WiringError(f"{shown} is {what}, and cannot be given a value")
                if value is TBD:
                    continue
                self._join(as_constant(value), wire, f"the value {value!r:.80}", shown, None)

    # ---- what is trained, what is kept --------------------------------------------------------------------

    def set_differentiability(self, config: Mapping[Any, bool] | None = None, /, **flags: bool) -> None:
        """Choose what is trained: ``model.set_differentiability(weight=False, table=True)``.

        True makes a float input a parameter, initialised from a normal distribution with standard deviation 0.02;
        False makes a parameter an input, without gradients.

        Args:
            config: True or False by name, port or expression. flags: by name.

        Raises:
            WiringError: the connection is neither an input nor a parameter; the model is unchanged.
            KindError: it does not have floating-point values.
        """
        self._unfrozen()
        with transaction():
            for key, flag in _pairs(config, flags):
                if not isinstance(flag, bool):
                    raise WiringError(
                        f"set_differentiability: {key!r} is {flag!r}, and must be True or False"
                    )
                wire, shown = self._found(key)
                self._differentiable(wire, key if isinstance(key, str) else None, flag, shown, None)

    def _differentiable(
        self, wire: Wire, name: str | None, flag: bool, shown: str, init: Callable[..., Any] | None
    ) -> None:
        root = wire.find()
        if root.producer is not None or root.role not in (None, "param"):
            what = f"a {root.role}" if root.role else "the result of a block"
            more = "" if root.role else "; to stop its gradient add StopGradient() after it"
            raise WiringError(f"{shown} is {what}: only inputs and parameters are trained or not{more}")
        name = name or self._name_of(wire, shown)
        if not flag:
            axes = root.declaration.axes if root.declaration is not None else ()
            for dim, axis in zip(root.shape.dims() or (), axes, strict=False):
                if axis is not None and dim.axis is None:
                    put(dim, "axis", axis)
            put(root, "role", None)
            put(root, "declaration", None)
        elif root.role is None:
            self._say(root, Wire(Shape([Rest()]), "float"), shown)
            put(root.find(), "declaration", Declaration(name, init or Normal(0.02)))
            put(root.find(), "role", "param")

    def bind_state_keys(self, input_key: Any, output_key: Any, initial_value: Any = 0) -> None:
        """Turn an input into a state whose next value is another connection: running means, counters, caches.

        Args:
            input_key: an input of the model; it becomes part of ``state=`` instead.
            output_key: its value after the model has run.
            initial_value: a number, or an array or list, which fixes the shape. With a number the shape must follow
                from the model or be given (:meth:`set_shapes`).

        Raises:
            WiringError: the first is not an input, or already has a next value. ShapeError, KindError: they do not
            match.
        """
        self._unfrozen()
        with transaction():
            wire, shown = self._found(input_key)
            after, target = self._found(output_key)
            root = wire.find()
            if root.producer is not None or root.role is not None:
                raise WiringError(
                    f"{shown} is {root.role or 'the result of a block'}, and no input: it is not a state"
                )
            if root is after.find():
                raise WiringError(f"{shown} would be its own next value: nothing would ever change it")
            name = input_key if isinstance(input_key, str) else self._name_of(wire, shown)
            value = as_constant(initial_value)
            held = value.constant
            value.role = value.constant = None
            number = not value.shape.items
            if number:
                value.shape = Shape([Rest()])
            self._say(wire, value, shown)
            shape = after.find().shape
            try:
                # Of one kind and shape, yet two values.
                join(Wire(root.find().shape, root.find().kind), Wire(shape, after.find().kind))
                settle()
            except (ShapeError, KindError) as error:
                raise type(error)(
                    f"the state {shown} and its next value {target} do not fit: {error}"
                ) from None
            init = (
                Constant(float(held) if root.find().kind.find().value == "float" else held)
                if number
                else (Given(_nested(held)))
            )
            put(root.find(), "role", "state")
            put(root.find(), "declaration", Declaration(name, init, None, True))
            put(after.find(), "consumed", True)
            self.state_updates[name] = after
            on_undo(lambda: self.state_updates.pop(name))


def _pairs(config: Mapping[Any, Any] | None, named: Mapping[str, Any]) -> Iterable[tuple[Any, Any]]:
    if config is not None and not isinstance(config, Mapping):
        raise WiringError(f"{config!r} must be a dict by connection")
    return [*(config or {}).items(), *named.items()]


def _nested(value: Any) -> Any:
    return value.values if isinstance(value, Numbers) else value


def _in_interval(key: IOKey, wire: Wire, shown: str) -> Wire:
    if key.interval is not None:
        import numpy as np

        data = np.asarray(wire.constant)
        low, high = key.interval
        if data.size and not (data.min() >= low and data.max() <= high):
            raise WiringError(f"{shown}: the value {key.value!r:.80} is not within interval={[low, high]}")
    return wire


def _within(block: Block | None, model: Block) -> bool:
    while block is not None:
        if block is model:
            return True
        block = block.parent
        if block is not None and not isinstance(block, Settings):
            return False  # inside a repeated block: its values do not exist outside it
    return False


def _region_around(block: Block | None) -> Block | None:
    """The repeated or rematerialised block that a block is inside of, or None."""
    while block is not None:
        block = block.parent
        if block is not None and not isinstance(block, Settings):
            return block
    return None
