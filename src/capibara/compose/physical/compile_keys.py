"""The keys of ``compile``: constants, data, trained inputs, discarded outputs (see :mod:`.pipeline`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose.errors import CompileError, KindError, ShapeError, WiringError
from capibara.compose.initializers import Normal
from capibara.compose.logical.connections import Connection, Port
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import Dim, Rest, Shape, settle
from capibara.compose.logical.trail import put
from capibara.compose.logical.wires import Declaration, Wire, join
from capibara.errors import did_you_mean

__all__ = ["Keys"]


@dataclass
class _Found:
    name: str
    wire: Wire


class Keys:
    """What the arguments of ``compile`` say of single values, put into the model until the what-if ends."""

    def __init__(self, model: Model, compute: str) -> None:
        self.model = model
        self.compute = compute
        self.extra: dict[str, Wire] = {}
        self.fixed: list[str] = []
        self.moved: set[int] = set()  # parameters that are inputs now, by the id of their wire
        self._used: dict[int, str] = {}

    def _find(self, argument: str, key: Any) -> _Found:
        model = self.model
        if isinstance(key, str):
            if key in model.wires:
                return _Found(key, model.wires[key].find())
            block: Any = model
            *path, last = key.split(".")
            for name in path:
                block = next((c.block for c in getattr(block, "children", ()) if c.name == name), None)
            if path and block is not None and last in block.wires:
                return _Found(key.replace(".", "_"), block.wires[last].find())
            there = list(model.wires)
            raise CompileError(
                f"{argument} names {key!r}, which is nothing in {model.label}; its connections are {there[:20]}."
                f"{did_you_mean(key, there)}"
            )
        root = _wire_of(key)
        if root is None:
            raise CompileError(
                f"{argument} names {key!r}: give a name, a dotted place or a port of the model"
            )
        name = next((k for k, w in model.wires.items() if w.find() is root), None)
        return _Found(name or str(getattr(key, "key", "value")), root)

    def _input(self, argument: str, key: Any, what: str = "an input", role: str | None = None) -> _Found:
        found = self._find(argument, key)
        if found.wire.role != role or found.wire.producer is not None:
            there = self.model.input_keys
            hint = did_you_mean(str(key), there) if isinstance(key, str) else ""
            raise CompileError(
                f"{argument} names {key!r}, which is not {what}; the inputs are {there}.{hint}"
            )
        return found

    def _claim(self, argument: str, key: Any, found: _Found) -> None:
        other = self._used.setdefault(id(found.wire), argument)
        if other != argument:
            raise CompileError(f"{key!r} is in both {other} and {argument}: it can be one of them only")

    def outputs(self, keys: Any) -> list[str]:
        names = self.model.output_keys
        found = []
        for key in _listed("discard_keys", keys):
            wire = _wire_of(key)
            name = (
                key if wire is None else next((n for n in names if self.model.wires[n].find() is wire), key)
            )
            if name not in names:
                raise CompileError(
                    f"discard_keys names {key!r}, which is not an output; the outputs are {names}."
                    f"{did_you_mean(str(key), names)}"
                )
            found.append(name)
        if found and set(found) == set(names):
            raise CompileError(f"discard_keys names every output ({', '.join(names)}): nothing would be left")
        return found

    def data(self, keys: Any) -> None:
        for key in _listed("data_keys", keys):
            found = self._find("data_keys", key)
            if found.wire.producer is not None or found.wire.role not in (None, "param"):
                raise CompileError(f"data_keys names {key!r}, which is neither an input nor a parameter")
            self._claim("data_keys", key, found)
            if found.wire.role == "param":
                assert found.wire.declaration is not None
                for dim, axis in zip(
                    found.wire.shape.dims() or (), found.wire.declaration.axes, strict=False
                ):
                    if axis is not None and dim.axis is None:
                        put(dim, "axis", axis)
                put(found.wire, "role", None)
                put(found.wire, "declaration", None)
                self.moved.add(id(found.wire))
                if self.model.wires.get(found.name, found.wire).find() is not found.wire:
                    raise CompileError(f"data_keys: {found.name!r} is already the name of something else")
                if found.name not in self.model.wires:
                    self.extra[found.name] = found.wire

    def trainable(self, keys: Any) -> None:
        for key in _listed("trainable_keys", keys):
            found = self._find("trainable_keys", key)
            if found.wire.role == "param":
                continue
            found = self._input("trainable_keys", key)
            self._claim("trainable_keys", key, found)
            param = Wire(Shape([Rest()]), "float", "param")
            dims = found.wire.shape.dims()
            axes = () if dims is None else tuple(d.axis for d in dims)
            param.declaration = Declaration(found.name, Normal(0.02), axes=axes)
            self._join("trainable_keys", key, found, param)
            if found.name not in self.model.wires:
                raise CompileError(f"trainable_keys names {key!r}: give it a name in the model first")

    def shapes(self, shapes: Mapping[Any, Any]) -> None:
        for key, spec in shapes.items():
            place = isinstance(key, str) and key not in self.model.wires and "." in key
            if place and key not in self.extra and self._find("shapes", key).wire.role != "param":
                raise CompileError(f"shapes names {key!r}, which is neither an input nor a parameter")
            if (
                isinstance(key, str)
                and not place
                and key not in self.model.input_keys
                and key not in self.extra
            ):
                names = self.model.input_keys
                if key not in self.model.wires or self.model.wires[key].find().role != "param":
                    there = (
                        f"the inputs are {names}.{did_you_mean(key, names)}"
                        if names
                        else "no input of the model has a name: say what its first block reads, as in "
                        f"Linear(8)(input={key!r})"
                    )
                    raise CompileError(f"shapes names {key!r}, which is not an input; {there}")
            found = self._find("shapes", key) if key not in self.extra else _Found(key, self.extra[key])
            try:
                if self.model.wires.get(found.name, Wire(Shape())).find() is found.wire:
                    self.model.set_shapes(**{found.name: spec})
                else:
                    join(found.wire, Wire(self.model._shape(spec)))
                    settle()
            except ShapeError as error:
                raise ShapeError(f"shapes[{key!r}]: {error}") from None

    def constants(self, values: Any) -> None:
        if values is None:
            return
        if not isinstance(values, Mapping):
            raise CompileError(f"constant_keys={values!r} must be a dict of values by input")
        for key, value in values.items():
            found = self._input("constant_keys", key)
            self._claim("constant_keys", key, found)
            self._join("constant_keys", key, found, self._constant(key, value, found))
            self.fixed.append(found.name)

    def _constant(self, key: Any, value: Any, found: _Found) -> Wire:
        kind = found.wire.kind.find().value
        if isinstance(value, bool | int | float):
            own = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else kind
            wire = Wire(Shape(), own, "constant")
            wire.constant = value
            return wire
        try:
            data = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise CompileError(f"constant_keys[{key!r}] is not an array: {error}") from None
        letter = "f" if "float" in data.dtype.name else data.dtype.kind
        own = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(letter)
        if own is None:
            raise CompileError(
                f"constant_keys[{key!r}] is {type(value).__name__} of dtype {data.dtype}: give a number, nested lists "
                "of numbers or an array"
            )
        if own == "int" and kind == "float" and isinstance(value, list | tuple):
            own = "float"  # integers take the kind of what they meet, in lists as alone
        if own == "float":
            data = data.astype(_numpy_dtype(self.compute))
        elif own == "int" and not isinstance(value, np.ndarray) and not hasattr(value, "dtype"):
            if data.size and (data.min() < -(2**31) or data.max() >= 2**31):
                raise CompileError(f"constant_keys[{key!r}] has numbers that do not fit an int32")
            data = data.astype("int32")
        wire = Wire(Shape(Dim(int(n)) for n in data.shape), own, "constant")
        wire.constant = data
        return wire

    def _join(self, argument: str, key: Any, found: _Found, wire: Wire) -> None:
        try:
            join(found.wire, wire)
            settle()
        except (ShapeError, KindError, WiringError) as error:
            text = f"{argument}: {key!r} has shape {found.wire.find().shape}, and {error}"
            raise type(error)(text) from None


def _wire_of(key: Any) -> Wire | None:
    """The value that a port, or a connection written as an expression, stands for."""
    if isinstance(key, Connection):
        key = Port(key.call.first, key.key)
    return key.wire.find() if isinstance(key, Port) else None


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


def _listed(argument: str, keys: Any) -> list[Any]:
    if keys is None:
        return []
    if isinstance(keys, str | Port | Connection):  # one key, though a port is a tuple
        return [keys]
    if isinstance(keys, Mapping) or not isinstance(keys, Iterable):
        raise CompileError(f"{argument}={keys!r} must be a set of keys")
    return list(keys)
