"""Reading a model from JSON: text from outside, checked before anything is built from it (see :mod:`.interchange`)."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from capibara.compose.errors import ComposeError
from capibara.compose.initializers import Given
from capibara.compose.interchange.json_format import (
    DTYPES,
    FORMAT,
    INITIALISERS,
    MAX_BLOCKS,
    MAX_DEGREE,
    MAX_DEPTH,
    MAX_ELEMENTS,
    MAX_PORTS,
    MAX_REPEATS,
    MAX_SIZE,
    MAX_TEXT,
    OPERATIONS,
    PRIMITIVES,
    REGIONS,
    VERSION,
    ModelFormatError,
)
from capibara.compose.logical.arguments import identifier
from capibara.compose.logical.block import Block, Port
from capibara.compose.logical.model import Model
from capibara.compose.logical.shapes import Dim, Rest
from capibara.compose.logical.values import as_constant
from capibara.compose.logical.wires import KINDS, Wire
from capibara.compose.physical.constants import array

__all__ = ["from_json"]

_KNOWN = {**PRIMITIVES, **REGIONS, **OPERATIONS}


def from_json(text: str | bytes | Mapping[str, Any]) -> Any:
    """The model that :func:`to_json` wrote: it compiles to the same source, and starts from the same parameters.

    Args:
        text: JSON text (at most 64 MiB), or what :func:`json.loads` made of it.

    Raises:
        ModelFormatError: it is not a model of a version that this release reads, or is larger than is allowed.
        ComposeError: the model that it describes is wrong, as it would be wrong in Python.
    """
    document = _parsed(text) if isinstance(text, str | bytes) else text
    top = _fields(document, "the document", ("format", "version", "symbols", "model"))
    if top["format"] != FORMAT:
        raise ModelFormatError(f"the format is {_short(top['format'])}, not {FORMAT!r}")
    if type(top["version"]) is not int or top["version"] != VERSION:
        raise ModelFormatError(f"the version is {_short(top['version'])}; this release reads {VERSION}")
    reader = _Reader(top["symbols"])
    try:
        return reader.block(top["model"], 0)
    except ComposeError:
        raise
    except Exception as error:  # whatever a constructor makes of wrong arguments
        raise ModelFormatError(f"this is not a model: {type(error).__name__}: {error}") from None


def _parsed(text: str | bytes) -> Any:
    if len(text) > MAX_TEXT:
        raise ModelFormatError(f"the text has {len(text)} characters, more than {MAX_TEXT}")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ModelFormatError(f"duplicate key among {[k[:40] for k, _ in items][:12]}")
        return found

    def constant(name: str) -> Any:
        raise ModelFormatError(f"{name} is not a number that a model may hold")

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except RecursionError:
        raise ModelFormatError("the text is nested too deep") from None
    except ValueError as error:
        if isinstance(error, ModelFormatError):
            raise
        raise ModelFormatError(f"not valid JSON: {error}") from None


def _short(value: Any) -> str:
    return repr(value)[:80] if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _fields(value: Any, what: str, needed: tuple[str, ...], more: tuple[str, ...] = ()) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelFormatError(f"{what} is {_short(value)}, not an object")
    missing = [k for k in needed if k not in value]
    unknown = [k for k in value if k not in (*needed, *more)]
    if missing or unknown:
        raise ModelFormatError(f"{what}: missing {missing}, unknown {[_short(k) for k in unknown[:8]]}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ModelFormatError(f"{what} is {_short(value)}, not a list")
    return value


def _whole(value: Any, what: str, high: int = MAX_SIZE) -> int:
    if type(value) is not int or not -high <= value <= high:
        raise ModelFormatError(f"{what} is {_short(value)}, not an integer of at most {high}")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > 256:
        raise ModelFormatError(f"{what} is {_short(value)}, not a text of at most 256 characters")
    return value


def _name(value: Any, what: str) -> str:
    identifier(_text(value, what), f"{what} is {_short(value)}")
    return value


class _Reader:
    def __init__(self, symbols: Any) -> None:
        self.blocks = 0
        self.elements = 0
        self.symbols: dict[str, Dim | Rest] = {}
        if not isinstance(symbols, Mapping) or len(symbols) > 10 * MAX_BLOCKS:
            raise ModelFormatError("symbols is not an object, or has too many entries")
        for key, entry in symbols.items():
            what = f"the symbol {_short(key)}"
            found = _fields(entry, what, ("name",), ("axis", "size"))
            name = None if found["name"] is None else _text(found["name"], what)
            axis = found.get("axis")
            size = found.get("size")
            if size is not None and _whole(size, what) < 0:
                raise ModelFormatError(f"{what} has the negative size {size}")
            if str(key).startswith("r"):
                self.symbols[key] = Rest(name)
            else:
                self.symbols[key] = Dim(size, name, None if axis is None else _text(axis, what))

    def block(self, node: Any, depth: int) -> Block:
        self.blocks += 1
        if depth > MAX_DEPTH:
            raise ModelFormatError(f"models are nested more than {MAX_DEPTH} deep")
        if self.blocks > MAX_BLOCKS:
            raise ModelFormatError(f"there are more than {MAX_BLOCKS} blocks")
        name = node.get("class") if isinstance(node, Mapping) else None
        if name == "Model":
            return self._model(node, depth)
        kind: Any = _KNOWN.get(name) if isinstance(name, str) else None
        if kind is None or not isinstance(name, str):
            raise ModelFormatError(f"{_short(name)} is not a class of blocks that a model may hold")
        given = _fields(node, name, ("class", "arguments"))["arguments"]
        if not isinstance(given, Mapping):
            raise ModelFormatError(f"the arguments of {name} are not an object")
        arguments: dict[str, Any] = {}
        rest: list[Any] = []
        for key, value in given.items():
            place = f"{name}: {_short(key)}"
            if name in REGIONS and key == "block":
                arguments[key] = self.block(value, depth + 1)
            elif key == "count":
                arguments[key] = _whole(value, place, MAX_REPEATS if name in REGIONS else MAX_PORTS)
            elif key == "degree":  # sizes grow as its binomials
                arguments[key] = _whole(value, place, MAX_DEGREE)
            else:
                arguments[key] = self._value(value, place)
        parameters = inspect.signature(kind).parameters
        for key in list(arguments):
            if key not in parameters:
                raise ModelFormatError(f"{name} has no argument {_short(key)}")
            if parameters[key].kind is inspect.Parameter.VAR_POSITIONAL:
                rest = list(arguments.pop(key))
        return kind(*rest, **arguments)

    def _model(self, node: Mapping[str, Any], depth: int) -> Model:
        parts = _fields(node, "a model", ("class", "title", "name", "wires", "blocks", "exposed", "updates"))
        name = parts["name"]
        model = Model(name=None if name is None else _name(name, "a model's name"))
        title = _name(parts["title"], "a model's title")
        if title != "Model":
            vars(model)["title"] = title
        for entry in _list(parts["wires"], "wires"):
            self._wire(model, entry)
        for entry in _list(parts["blocks"], "blocks"):
            child = _fields(entry, "a block", ("name", "block", "connections"))
            block = self.block(child["block"], depth + 1)
            if not isinstance(child["connections"], Mapping):
                raise ModelFormatError("connections is not an object")
            ends = {_text(k, "a port"): self._end(model, v) for k, v in child["connections"].items()}
            model._add(block, ends, _name(child["name"], "a block's name"))
        exposed = [_name(key, "an exposed name") for key in _list(parts["exposed"], "exposed")]
        model.expose(*exposed)
        if not isinstance(parts["updates"], Mapping):
            raise ModelFormatError("updates is not an object")
        for key, end in parts["updates"].items():
            model.update_state(_name(key, "a state"), self._end(model, end, values=False))
        return model

    def _wire(self, model: Model, entry: Any) -> None:
        if isinstance(entry, Mapping) and "same" in entry:
            found = _fields(entry, "a wire", ("key", "same"))
            key, other = _name(found["key"], "a wire"), _name(found["same"], "a wire")
            if other not in model.wires or key in model.wires:
                raise ModelFormatError(f"the wire {key!r} cannot be the same as {other!r}")
            model.wires[key] = model.wires[other]
            return
        found = _fields(
            entry,
            "a wire",
            ("key", "shape", "kind"),
            ("role", "init", "dtype", "keep_dtype", "axes", "value"),
        )
        key, role, kind = _name(found["key"], "a wire"), found.get("role"), found["kind"]
        what = f"the wire {key!r}"
        if kind is not None and kind not in KINDS:
            raise ModelFormatError(f"{what} has the kind {_short(kind)}, expected one of {KINDS}")
        shape = [self._dim(item, what) for item in _list(found["shape"], what)]
        if role is None:
            model._declare(key, Wire(model._shape(shape), kind))
            return
        if role == "constant":
            wire = as_constant(self._value(found.get("value"), what))
            model._declare(key, wire)
            return
        if role not in ("param", "state"):
            raise ModelFormatError(f"{what} has the role {_short(role)}")
        dtype, keep = found.get("dtype"), found.get("keep_dtype", False)
        if (dtype is not None and dtype not in DTYPES) or not isinstance(keep, bool):
            raise ModelFormatError(f"{what} has dtype {_short(dtype)}, keep_dtype {_short(keep)}")
        axes = tuple(None if a is None else _text(a, what) for a in _list(found.get("axes", []), what))
        if axes and len(axes) != len(shape):
            raise ModelFormatError(f"{what} has {len(axes)} axis names for {len(shape)} dimensions")
        init = self._init(found.get("init"), what)
        if role == "param":
            model.add_parameter(key, shape, init, axes=axes, dtype=dtype, keep_dtype=keep)
        else:
            model.add_state(key, shape, init, axes=axes, kind=kind or "float", dtype=dtype)

    def _init(self, node: Any, what: str) -> Any:
        name = node.get("class") if isinstance(node, Mapping) else None
        kind = INITIALISERS.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ModelFormatError(f"{what}: {_short(name)} is not an initialiser")
        if kind is Given:
            value = self._value(_fields(node, what, ("class", "value"))["value"], what)
            return Given(value) if isinstance(value, np.ndarray) else self._refuse(what, value)
        values = {f.name: f for f in dataclasses.fields(kind)}
        given = _fields(node, what, ("class",), tuple(values))
        arguments: dict[str, Any] = {}
        for key, value in given.items():
            if key == "class":
                continue
            default = values[key].default
            if isinstance(value, str) or value is None:
                if isinstance(default, int | float) and not isinstance(default, bool):
                    raise ModelFormatError(f"{what}: {key} is {_short(value)}, not a number")
                arguments[key] = None if value is None else _text(value, what)
            elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                arguments[key] = value if abs(value) <= 1e30 else self._refuse(what, value)
            else:
                self._refuse(what, value)
        try:
            return kind(**arguments)
        except ComposeError as error:
            raise ModelFormatError(f"{what}: {error}") from None

    def _refuse(self, what: str, value: Any) -> Any:
        raise ModelFormatError(f"{what}: {_short(value)} is not allowed as a value here")

    def _dim(self, item: Any, what: str) -> Any:
        if isinstance(item, str):
            found = self.symbols.get(item[1:] if item.startswith("*") else item)
            if found is None or isinstance(found, Rest) != item.startswith("*"):
                raise ModelFormatError(f"{what}: {_short(item)} is not a symbol of a size")
            return found
        if _whole(item, what) < 0:
            raise ModelFormatError(f"{what} has the negative size {item}")
        return item

    def _end(self, model: Model, value: Any, *, values: bool = True) -> Any:
        if isinstance(value, str):
            return _name(value, "a connection")
        if isinstance(value, Mapping) and set(value) == {"port"}:
            *path, key = [_text(p, "a port") for p in _list(value["port"], "a port")] or [""]
            block: Any = model
            for name in path:
                block = next((c.block for c in getattr(block, "children", ()) if c.name == name), None)
            if block is None or block is model or key not in block.wires:
                raise ModelFormatError(f"there is no port {'.'.join([*path, key])!r} yet")
            return Port(block, key)
        if values and isinstance(value, Mapping) and set(value) == {"value"}:
            return self._value(value["value"], "a connection")
        raise ModelFormatError(f"{_short(value)} is not a connection")

    def _value(self, value: Any, what: str, depth: int = 0) -> Any:
        if depth > 16:
            raise ModelFormatError(f"{what} is nested too deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return _text(value, what)
        if isinstance(value, int):
            return _whole(value, what, 2**31 if depth == 0 and what == "a connection" else MAX_SIZE)
        if isinstance(value, float):
            if not math.isfinite(value):
                raise ModelFormatError(f"{what} is {value}, which is not an allowed number here")
            return value
        if isinstance(value, Mapping) and len(value) == 1:
            ((tag, inner),) = value.items()
            if tag == "float" and inner in ("inf", "-inf"):
                return float(inner)
            if tag == "ellipsis" and inner is True:
                return Ellipsis
            if tag == "array":
                return self._array(inner, what)
            if tag in ("tuple", "list", "slice", "dict"):
                row = [self._value(v, what, depth + 1) for v in _list(inner, what)] if tag != "dict" else []
                if tag == "slice" and len(row) == 3:
                    return slice(*row)
                if tag == "dict":
                    found = [
                        [self._value(v, what, depth + 1) for v in _list(p, what)] for p in _list(inner, what)
                    ]
                    if all(len(p) == 2 and isinstance(p[0], str | int) for p in found):
                        return dict(found)
                elif tag != "slice":
                    return tuple(row) if tag == "tuple" else row
        return self._refuse(what, value)

    def _array(self, node: Any, what: str) -> np.ndarray:
        parts = _fields(node, what, ("dtype", "shape", "data"))
        dtype, data = parts["dtype"], _list(parts["data"], what)
        shape = tuple(_whole(n, what) for n in _list(parts["shape"], what))
        self.elements += len(data)
        if (
            dtype not in DTYPES
            or min(shape, default=0) < 0
            or math.prod(shape) != len(data)
            or len(shape) > 32
        ):
            raise ModelFormatError(
                f"{what}: an array of dtype {_short(dtype)} and shape {shape} has other data"
            )
        if self.elements > MAX_ELEMENTS:
            raise ModelFormatError(f"the arrays have more than {MAX_ELEMENTS} elements together")
        for number in data:
            if not isinstance(number, bool | int | float) or not math.isfinite(number):
                self._refuse(what, number)
        return array(data, dtype).reshape(shape)
