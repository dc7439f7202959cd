"""Models as JSON text, and back.

The text describes the structure: blocks by class name with their arguments, models as their blocks with named
connections, shapes with their symbols, parameters and states with their initialisers by name. Input is untrusted:
classes come from a closed table (the primitives, ``Model``, ``Repeat``, ``Remat``, ``Operation``; initialisers
likewise), nothing is evaluated or imported, and size, nesting, numbers and counts are bounded before anything is
built. For a user-defined operation (``ml.op``), the name is written, not the function.

The format (``"version": 1``)::

    {"format": "capibara.compose.model", "version": 1,
     "symbols": {"d0": {"name": "batch", "axis": null}, "r0": {"name": "b"}},
     "model": {"class": "Model", "title": "MLP", "name": null,
               "wires": [{"key": "input", "shape": ["*r0", "d0"], "kind": "float"},
                         {"key": "weight", "role": "param", "shape": [4, 8], "init": {"class": "Normal", …}, …}],
               "blocks": [{"name": "product", "block": {"class": "Dense", "arguments": {}},
                           "connections": {"input": "input", "weight": "weight", "output": "output"}}],
               "exposed": ["output"], "updates": {}}}

A connection is a name, ``{"port": ["block", …, "key"]}``, or ``{"value": …}``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compose.initializers import Given
from capibara.compose.interchange.json_format import (
    DTYPES,
    FORMAT,
    INITIALISERS,
    MAX_DEPTH,
    PRIMITIVES,
    REGIONS,
    VERSION,
    ModelFormatError,
)
from capibara.compose.interchange.json_reading import from_json
from capibara.compose.logical.block import Block
from capibara.compose.logical.custom import Operation
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import Dim, Shape
from capibara.compose.logical.values import Numbers
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.pipeline import title_of
from capibara.compose.precision import FLOAT_DTYPES

__all__ = ["VERSION", "ModelFormatError", "from_json", "to_json"]


def to_json(model: Block, *, indent: int | None = None) -> str:
    """A model as JSON text, which :func:`from_json` reads.

    Subclasses of ``Model`` are written as their blocks, so later changes to them are kept, but not their own methods.

    Args:
        model: a model, or one block. indent: as in :func:`json.dumps`.

    Raises:
        ModelFormatError: something in it cannot be written: a user-defined primitive or initialiser.
    """
    if not isinstance(model, Block):
        raise ModelFormatError(f"model={model!r} is not a model: pass a capibara.compose Model")
    writer = _Writer()
    body = writer.block(model, {}, 0)
    document = {"format": FORMAT, "version": VERSION, "symbols": writer.symbols, "model": body}
    return json.dumps(document, indent=indent, allow_nan=False)


class _Writer:
    def __init__(self) -> None:
        self.symbols: dict[str, dict[str, Any]] = {}
        self._names: dict[int, str] = {}
        self._keep: list[Any] = []

    def block(self, block: Block, given: dict[int, str], depth: int) -> dict[str, Any]:
        """``given``: the wires that the model around it joins to something, by id."""
        if depth > MAX_DEPTH:
            raise ModelFormatError(f"{block.label} is nested more than {MAX_DEPTH} deep")
        name = type(block).__name__
        if isinstance(block, Model):
            return self._model(block, given, depth)
        if isinstance(block, Operation):
            return _operation(block)
        known = REGIONS.get(name) or PRIMITIVES.get(name)
        if type(block) is not known:
            raise ModelFormatError(
                f"{block.label} is a {name}, which is not one of the library's primitives: it cannot be saved"
            )
        positional, named = block.made_with
        bound = inspect.signature(type(block)).bind(*positional, **named)
        arguments: dict[str, Any] = {}
        for key, value in bound.arguments.items():
            if isinstance(value, Block):
                owned = getattr(block, "_owned", ())
                restored = {id(wire): declaration for wire, declaration in owned}
                arguments[key] = (
                    self._model(value, {}, depth + 1, restored)
                    if isinstance(value, Model)
                    else self.block(value, {}, depth + 1)
                )
            else:
                # Of an argument only the number counts, of a constant its dtype does.
                number = value.item() if isinstance(value, np.generic) else value
                arguments[key] = _written(number, f"{block.label}: {key}")
        return {"class": name, "arguments": arguments}

    def _model(
        self, model: Model, given: dict[int, str], depth: int, shared: Mapping[int, Any] | None = None
    ) -> dict[str, Any]:
        if depth > MAX_DEPTH:
            raise ModelFormatError(f"{model.label} is nested more than {MAX_DEPTH} deep")
        model._finish()
        own: dict[int, str] = {}
        wires = []
        for key, wire in model.wires.items():
            root = wire.find()
            if id(root) in own:
                wires.append({"key": key, "same": own[id(root)]})
                continue
            own[id(root)] = key
            wires.append(self._wire(key, root, id(root) in given, shared or {}))
        seen: dict[int, tuple[str, ...]] = {}
        blocks = []
        for child in model.children:
            connections: dict[str, Any] = {}
            joined: dict[int, str] = {}
            for key, wire in child.block.wires.items():
                root = wire.find()
                if id(root) in own:
                    connections[key] = own[id(root)]
                elif id(root) in seen:
                    connections[key] = {"port": list(seen[id(root)])}
                elif root.role == "constant" and not isinstance(child.block, Model):
                    connections[key] = {"value": _written(root.constant, f"{child.block.label}.{key}")}
                else:
                    continue
                joined[id(root)] = key
            blocks.append(
                {
                    "name": child.name,
                    "block": self.block(child.block, joined, depth + 1),
                    "connections": connections,
                }
            )
            for path, block in _inside(child.name, child.block):
                for key, wire in block.wires.items():
                    seen.setdefault(id(wire.find()), (*path, key))
        updates = {}
        for key, wire in model.state_updates.items():
            root = wire.find()
            updates[key] = own.get(id(root)) or {"port": list(seen[id(root)])}
        return {
            "class": "Model",
            "title": title_of(model),
            "name": model.name,
            "wires": wires,
            "blocks": blocks,
            "exposed": list(model._exposed),
            "updates": updates,
        }

    def _wire(self, key: str, root: Wire, given: bool, shared: Mapping[int, Any]) -> dict[str, Any]:
        entry: dict[str, Any] = {"key": key, "shape": self._shape(root.shape), "kind": root.kind.find().value}
        declaration = shared.get(id(root), root.declaration)
        role = "param" if id(root) in shared else root.role
        if given or role is None or root.producer is not None:
            return entry
        if role == "constant":
            return {**entry, "role": role, "value": _written(root.constant, key)}
        return {
            **entry,
            "role": role,
            "init": _written_init(declaration.init, key),
            "dtype": declaration.dtype,
            "keep_dtype": declaration.keep_dtype,
            "axes": list(declaration.axes),
        }

    def _shape(self, shape: Shape) -> list[Any]:
        prefix, rest, suffix = shape.resolve()
        items: list[Any] = [self._dim(d) for d in prefix]
        if rest is not None:
            items.append("*" + self._symbol(rest, "r", {"name": rest.name}))
        return [*items, *(self._dim(d) for d in suffix)]

    def _dim(self, dim: Dim) -> int | str:
        if dim.size is not None and dim.axis is None:
            return dim.size
        entry: dict[str, Any] = {"name": dim.name, "axis": dim.axis}
        return self._symbol(dim, "d", entry if dim.size is None else {**entry, "size": dim.size})

    def _symbol(self, node: Any, letter: str, entry: dict[str, Any]) -> str:
        if id(node) not in self._names:
            self._names[id(node)] = f"{letter}{len(self.symbols)}"
            self._keep.append(node)
            self.symbols[self._names[id(node)]] = entry
        return self._names[id(node)]


def _operation(block: Operation) -> dict[str, Any]:
    """An operation of the user's own: what it is called and how its ports are named, not what it computes."""
    if type(block) is not Operation:
        raise ModelFormatError(
            f"{block.label} wraps the function {getattr(block, 'function', block)!r:.120}, which cannot be written "
            "down: register it with backend.register_op(name) and use op(name) in the model"
        )
    shapes, kinds, attributes, _ = block._given
    arguments = {
        "op": block.op,
        "inputs": block.ports_in,
        "outputs": block.output_keys,
        "shapes": shapes,
        "kinds": kinds,
        "attributes": attributes,
    }
    return {
        "class": "Operation",
        "arguments": {key: _written(value, f"{block.label}: {key}") for key, value in arguments.items()},
    }


def _inside(name: str, block: Block) -> Any:
    """A block and the blocks in it, with their paths (not into regions: nothing in them can be joined)."""
    stack: list[tuple[tuple[str, ...], Block]] = [((name,), block)]
    while stack:
        path, at = stack.pop()
        yield path, at
        if isinstance(at, Model):
            stack.extend(((*path, c.name), c.block) for c in reversed(at.children))


def _written_init(init: Any, key: str) -> dict[str, Any]:
    name = type(init).__name__
    if INITIALISERS.get(name) is not type(init):
        raise ModelFormatError(
            f"the initialiser of {key!r} is {init!r}: only those of capibara.compose.initializers can be written down"
        )
    if isinstance(init, Given):
        return {"class": name, "value": _written(np.asarray(init.value), key)}
    return {"class": name, **{f.name: _written(getattr(init, f.name), key) for f in dataclasses.fields(init)}}


def _written(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and not isinstance(value, np.generic):
        return int(value)
    if isinstance(value, float) and not isinstance(value, np.generic):
        if math.isnan(value):
            raise ModelFormatError(f"{place} is NaN, which cannot be saved")
        return float(value) if math.isfinite(value) else {"float": "inf" if value > 0 else "-inf"}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [_written(v, place) for v in (value.start, value.stop, value.step)]}
    if isinstance(value, Numbers):
        return _written(value.values, place)
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_written(v, place) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_written(k, place), _written(v, place)] for k, v in value.items()]}
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        data = np.asarray(value)
        dtype = data.dtype.name
        if dtype not in DTYPES:
            raise ModelFormatError(f"{place} is an array of dtype {dtype}, which cannot be saved")
        numbers = data.astype("float64") if dtype in FLOAT_DTYPES else data
        if not np.isfinite(numbers).all():
            raise ModelFormatError(f"{place} holds infinities or NaN, which cannot be saved")
        return {"array": {"dtype": dtype, "shape": list(data.shape), "data": numbers.ravel().tolist()}}
    raise ModelFormatError(f"{place} is {value!r} ({type(value).__name__}), which cannot be saved")
