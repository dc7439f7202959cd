"""Convert expressions to blocks in a model.

The calls of an expression are added after their inputs, each once, however often its result is used; without
recursion, so that expressions of ten thousand operators work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from capibara.compose.errors import WiringError
from capibara.compose.logical.block import Block
from capibara.compose.logical.connections import Call, Connection, IOKey, Placement, Port, called
from capibara.compose.logical.operators import Operators
from capibara.compose.logical.trail import on_undo, transaction

if TYPE_CHECKING:
    from capibara.compose.logical.model import Model

__all__ = ["as_placement", "expanded", "gather", "origin_of"]

DEEPEST = 32


def as_placement(other: Any) -> tuple[Block, Mapping[str, Any], str | None]:
    """A block to be added, and its connections.

    Raises:
        WiringError: it is not a block.
    """
    if isinstance(other, Placement):
        return other.block, other.connections, other.name
    if isinstance(other, Block):
        return other, {}, None
    if isinstance(other, Connection):
        return other.call.block(), other.call.connections, other.call.name
    raise WiringError(
        f"{other!r} is not a block: add a block, as in `model += Relu()`, or one called with its connections, as in "
        "`model |= Linear(8)(input='x')`"
    )


def _origin(call: Call) -> Placement | Call:
    return call if call.origin is None else call.origin


def origin_of(other: Any) -> Placement | Call | None:
    """The origin of something that is added to a model; see :attr:`Call.origin`."""
    if isinstance(other, Connection):
        return _origin(other.call)
    return other if isinstance(other, Placement) else None


def _expression(value: Any, depth: int = 0) -> Any:
    """A placement as its main output, a list with connections in it as their stack; anything else as it is."""
    if isinstance(value, Placement):
        return value.connection
    if not isinstance(value, list | tuple) or not _holds(value, depth):
        return value
    from capibara.compose import primitives

    parts = [_expression(v, depth + 1) for v in value]
    # A number has no place in a stack of arrays until it is one.
    parts = [v if isinstance(v, Operators) else called(primitives.ToTensor, {"input": v}) for v in parts]
    return called(lambda: primitives.Stack(len(parts)), {f"input_{i}": v for i, v in enumerate(parts)})


def _holds(value: Any, depth: int) -> bool:
    if depth > DEEPEST:
        raise WiringError(f"lists nested more than {DEEPEST} deep cannot be connected")
    return isinstance(value, Operators) or (
        isinstance(value, list | tuple) and any(_holds(v, depth + 1) for v in value)
    )


def expanded(model: Model, connections: Mapping[str, Any]) -> dict[str, Any]:
    """The connections, with everything in the model that they are computed from; in a transaction."""
    values = {key: _expression(value) for key, value in connections.items()}
    for value in values.values():
        if isinstance(value, Connection) and not _have(model, value.call):
            _build(model, value.call)
    return values


def _have(model: Model, call: Call) -> bool:
    """Whether the model has the call's block already, put there by this call."""
    if id(call) in model._built:
        return True
    block = call.first
    if block.parent is not model or block.placed_by is not _origin(call):
        return False
    model._built[id(call)] = (call, block)
    on_undo(lambda: model._built.pop(id(call)))
    return True


def _reads(call: Call) -> dict[str, Any]:
    """What a call reads, lists as stacks: settled at the first look, so that a stack stays one."""
    for value in call.connections.values():
        if isinstance(value, Placement | list | tuple):
            call.connections = {k: _expression(v) for k, v in call.connections.items()}
            return call.connections
    return dict(call.connections)


def _build(model: Model, root: Call) -> None:
    stack: list[tuple[Call, dict[str, Any], Iterator[Any]]] = []

    def enter(call: Call) -> None:
        reads = _reads(call)
        stack.append((call, reads, iter(reads.values())))

    enter(root)
    while stack:
        call, reads, waiting = stack[-1]
        for value in waiting:
            if isinstance(value, Connection) and not _have(model, value.call):
                enter(value.call)
                break
        else:
            stack.pop()
            if not _have(model, call):
                _place(model, call, reads)


def _place(model: Model, call: Call, reads: Mapping[str, Any]) -> None:
    block = call.block()
    model._put(block, reads, call.name, call.site, last=False)
    model._built[id(call)] = (call, block)
    on_undo(lambda: model._built.pop(id(call)))


def _names(outputs: Mapping[str, Any]) -> set[str]:
    """The names that the keys in expressions have."""
    names: set[str] = set()
    seen: set[int] = set()
    waiting = [_expression(value) for value in outputs.values()]
    while waiting:
        value = waiting.pop()
        if isinstance(value, IOKey) and value.name is not None:
            names.add(value.name)
        elif isinstance(value, str):
            names.add(value)
        elif isinstance(value, Connection) and id(value.call) not in seen:
            seen.add(id(value.call))
            waiting.extend(_reads(value.call).values())
    return names


def gather(model: Model, outputs: Mapping[str, Any]) -> Model:
    """Add to an empty model everything that the outputs are computed from; see :meth:`Model.create`."""
    from capibara.compose import primitives

    if not outputs:
        raise WiringError("a model needs at least one output: Model.create(output=…)")
    with transaction():
        model._reserved = frozenset(_names(outputs) | set(outputs))
        values = expanded(model, outputs)
        for key, value in values.items():
            if isinstance(value, Connection | Port):
                wire, shown = model._resolve(value)
                if key in model.wires and model.wires[key].find() is not wire.find():
                    raise WiringError(
                        f"{key!r} is the name of an input already: give the output {shown} another"
                    )
                if wire.find().producer is not None:
                    model._name(key, wire)
                    continue
            if key in model.wires or (isinstance(value, IOKey) and value.name == key):
                raise WiringError(f"{key!r} is the name of an input already: give the output another")
            block = primitives.Buffer() if isinstance(value, IOKey | Port | str) else primitives.ToTensor()
            model._put(block, {"input": value, "output": key}, None, None, last=False)
        model.expose(*values)
        model._reserved = frozenset()
    wire = model.wires[list(values)[-1]].find()
    assert wire.producer is not None
    block, key = wire.producer
    model._last = Port(block, key)  # type: ignore[arg-type]
    return model
