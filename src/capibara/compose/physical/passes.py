"""What is done to a flat graph before source is written from it: less to compute, the same results.

Each pass is a function of the graph that changes it in place, in one sweep over its nodes (which are in an order in
which they can run), and says how many nodes it dealt with. None of them recurses, and each takes time linear in the
number of nodes; regions (repeated and rematerialised blocks) are graphs of their own and are treated one by one.

* :func:`remove_identities`: operations that give out their input as it is.
* :func:`fold_constants`: operations on constants are run once, here, if the result is small.
* :func:`share_common`: the same operation on the same values is done once.
* :func:`remove_dead`: what no output and no state needs is dropped.
* :func:`fan_out`, for training on a mesh: what several products read is marked, so that its gradient is exchanged once.
* :func:`join`, for training on one device: products of one value with several weights become one operation, as do
  ``silu`` and the product that alone reads it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from capibara.compose.logical.block import Primitive
from capibara.compose.logical.shapes import Dim, Shape
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.codegen import keywords, literal
from capibara.compose.physical.graph import Graph, Node
from capibara.compose.precision import Precision

__all__ = [
    "FOLD_LIMIT",
    "fan_out",
    "fold_constants",
    "join",
    "optimise",
    "remove_dead",
    "remove_identities",
    "share_common",
]

FOLD_LIMIT = 4096
"""Elements of the largest array that :func:`fold_constants` keeps: past it, source and program would grow for
what costs little to compute again."""

_COMMUTATIVE = {"add", "multiply"}

Run = Callable[[Primitive, list[Any], dict[str, Any]], "tuple[Any, ...] | None"]


def optimise(
    graph: Graph, precision: Precision, *, inference: bool = False, run: Run | None = None
) -> dict[str, int]:
    """All passes over a graph and the regions in it.

    Args:
        graph: from :func:`capibara.compose.physical.graph.flatten`; it is changed.
        precision: the dtypes of operations.
        inference: the model will not be trained: dropout is the identity.
        run: does one operation on constants (``run(block, arguments, keywords)`` → results, or None where it
            cannot); without it nothing is folded.

    Returns:
        How many nodes each pass removed or replaced, by the pass's name.
    """
    counts = {"identities": 0, "constants": 0, "common": 0, "dead": 0}
    for part in _parts(graph):
        if run is not None:
            counts["constants"] += fold_constants(part, precision, run)
        counts["identities"] += remove_identities(part, inference=inference)
        counts["common"] += share_common(part)
        counts["dead"] += remove_dead(part)
    return counts


def _parts(graph: Graph) -> Iterable[Graph]:
    yield graph
    for node in graph.walk():
        if node.region is not None:
            yield node.region


class _Instead:
    """Which value now stands for another."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Wire, Wire]] = {}  # the wires are held, so that ids stay theirs

    def put(self, old: Wire, new: Wire) -> None:
        self._by_id[id(old)] = (old, new)

    def get(self, wire: Wire) -> Wire:
        pair = self._by_id.get(id(wire))
        return wire if pair is None else pair[1]

    def apply(self, graph: Graph) -> None:
        """Replace what the graph gives out."""
        for table in (graph.outputs, graph.next_states):
            for key, wire in table.items():
                table[key] = self.get(wire)  # type: ignore[index]


def remove_identities(graph: Graph, *, inference: bool = False) -> int:
    """Let the readers of an identity read its input: buffers, dropout of nothing, reshapes to the same shape.

    Args:
        graph: it is changed. inference: dropout counts as an identity whatever its rate.
    """
    instead = _Instead()
    kept = []
    for node in graph.nodes:
        node.inputs = [instead.get(w) for w in node.inputs]
        same = _same_as(node, inference)
        # A constant that an output is read from must stay an array, so its buffer stays.
        if same is None or same.role == "constant":
            kept.append(node)
        else:
            instead.put(node.outputs[0], same)
    removed = len(graph.nodes) - len(kept)
    graph.nodes = kept
    instead.apply(graph)
    return removed


def _same_as(node: Node, inference: bool) -> Wire | None:
    """The input that the node's only output equals always, or None."""
    block = node.block
    if block.registered or not isinstance(block, Primitive) or len(node.outputs) != 1 or not node.inputs:
        return None
    first = node.inputs[0]
    if block.op in ("multiply", "divide") and len(node.inputs) == 2:
        second = node.inputs[1]
        if _is_one(second):
            return first if _is_float(first) else None
        return second if block.op == "multiply" and _is_one(first) and _is_float(second) else None
    if len(node.inputs) != 1:
        return None
    if block.op == "buffer":
        return first
    if block.op == "dropout":
        return first if inference or block.attributes.get("rate") == 0.0 else None
    if block.op in ("reshape", "broadcast_to"):
        before, after = first.shape.known, node.outputs[0].shape.known
        return first if before is not None and None not in before and before == after else None
    if block.op == "transpose":
        axes = block.attributes.get("axes")
        return first if axes is not None and tuple(axes) == tuple(range(len(axes))) else None
    return None


def _is_one(wire: Wire) -> bool:
    """A Python number, which changes neither shape nor dtype of what it is multiplied with."""
    return wire.role == "constant" and literal(wire) == 1 and not isinstance(wire.constant, bool)


def _is_float(wire: Wire) -> bool:
    return wire.kind.find().value == "float"


def _pure(node: Node) -> bool:
    """Whether equal arguments always give equal results, and nothing else happens."""
    block = node.block
    return (
        node.region is None
        and isinstance(block, Primitive)
        and not block.uses_key
        and getattr(block, "pure", True)
    )


def fold_constants(graph: Graph, precision: Precision, run: Run, limit: int = FOLD_LIMIT) -> int:
    """Run what depends on constants alone, and put the results in its place.

    Only results of a known size of at most ``limit`` elements are computed. Arrays that are made from nothing
    (``ops.zeros(…)``) stay as they are, which reads better; they are run where something folded needs them.
    """
    sources: dict[int, Node] = {}  # id(wire) → the node that makes it from nothing
    values, instead = _Instead(), _Instead()
    folded = 0

    def constant(wire: Wire) -> Wire | None:
        new = instead.get(wire)
        if new.role == "constant":
            return new
        node = sources.get(id(wire))
        if node is None:
            return None
        new = values.get(wire)
        if new is not wire:
            return new
        if not _run(node, [], precision, run, values):
            for output in node.outputs:
                del sources[id(output)]
            return None
        return values.get(wire)

    for node in graph.nodes:
        if not _pure(node) or node.block.uses_train or not _small(node, limit):  # type: ignore[attr-defined]
            continue
        if not node.inputs:
            sources.update((id(w), node) for w in node.outputs)
            continue
        if any(instead.get(w).role != "constant" and id(w) not in sources for w in node.inputs):
            continue
        inputs = [constant(w) for w in node.inputs]
        if None not in inputs and _run(node, inputs, precision, run, instead):  # type: ignore[arg-type]
            folded += 1
    for node in graph.nodes:
        if node.region is None:  # a region takes arrays, and no Python numbers
            node.inputs = [instead.get(w) for w in node.inputs]
    instead.apply(graph)
    return folded


def _small(node: Node, limit: int) -> bool:
    for wire in node.outputs:
        sizes = wire.shape.known
        if sizes is None or None in sizes or math.prod(n or 0 for n in sizes) > limit:
            return False
    return True


def _run(node: Node, inputs: list[Wire], precision: Precision, run: Run, results: _Instead) -> bool:
    """Do an operation on constants; its results become constants too. False where that is not possible."""
    assert isinstance(node.block, Primitive)
    arguments = [w.constant if (number := literal(w)) is None else number for w in inputs]
    values = run(node.block, arguments, keywords(node, precision))
    if values is None or len(values) != len(node.outputs):
        return False
    for wire, value in zip(node.outputs, values, strict=True):
        new = Wire(
            Shape(Dim(int(n)) for n in getattr(value, "shape", ())), wire.kind.find().value, "constant"
        )
        new.constant = value
        results.put(wire, new)
    return True


def share_common(graph: Graph) -> int:
    """Do the same operation on the same values once. Randomness is drawn, and regions run, each for itself."""
    instead = _Instead()
    seen: dict[tuple[Any, ...], Node] = {}
    kept = []
    for node in graph.nodes:
        node.inputs = [instead.get(w) for w in node.inputs]
        if not _pure(node):
            kept.append(node)
            continue
        first = seen.setdefault(_signature(node), node)
        if first is node:
            kept.append(node)
        else:
            for old, new in zip(node.outputs, first.outputs, strict=True):
                instead.put(old, new)
    removed = len(graph.nodes) - len(kept)
    graph.nodes = kept
    instead.apply(graph)
    return removed


def _signature(node: Node) -> tuple[Any, ...]:
    block = node.block
    assert isinstance(block, Primitive)
    inputs = [_identity(w) for w in node.inputs]
    if block.op in _COMMUTATIVE:
        inputs.sort(key=str)
    axes = tuple(w.axes for w in node.outputs) if block.constrain_output else None
    kinds = tuple(w.kind.find().value for w in node.outputs)
    named = repr((sorted(block.attributes.items()), node.sizes))
    return (block.op, tuple(inputs), named, axes, kinds)


def _identity(wire: Wire) -> tuple[Any, ...]:
    """Equal for what is the same value: a wire is itself, a number is its type and digits."""
    value = wire.constant
    if (
        wire.role == "constant"
        and isinstance(value, bool | int | float)
        and not isinstance(value, np.generic)
    ):
        return ("number", type(value).__name__, repr(value), wire.kind.find().value)
    if wire.role == "constant":
        return ("array", id(value))
    return ("wire", id(wire))


def remove_dead(graph: Graph) -> int:
    """Drop the nodes that no output and no next state depends on. Regions with states are always needed."""
    needed = {id(w) for w in (*graph.outputs.values(), *graph.next_states.values())}
    kept = []
    for node in reversed(graph.nodes):
        alive = any(id(w) in needed for w in node.outputs)
        if alive or (node.region is not None and node.region.states):
            needed.update(id(w) for w in node.inputs)
            kept.append(node)
    removed = len(graph.nodes) - len(kept)
    graph.nodes = kept[::-1]
    return removed


_PRODUCTS = {"dense": -1, "project": -2}
"""Products with a weight, and the dimension of their result that a mesh may divide."""


def fan_out(graph: Graph, where: Callable[[str], Any]) -> int:
    """Let products that read the same value, and whose results a mesh divides alike, read it through one operation.

    It says that the gradient of the value is the sum of theirs: on a mesh their sum is exchanged, not each of them.

    Args:
        graph: it is changed, and so are the regions in it.
        where: a logical axis → what says to which mesh axes it goes (equal for those that go to the same), or None
            for none.

    Returns:
        How many operations were added.
    """
    return sum(_fan_out(part, where) for part in _parts(graph))


def _fan_out(graph: Graph, where: Callable[[str], Any]) -> int:
    readers: dict[tuple[int, Any], list[tuple[Node, str]]] = {}
    for node in graph.nodes:
        block = node.block
        if node.region is not None or block.registered or not isinstance(block, Primitive):
            continue
        axes = node.outputs[0].axes if block.op in _PRODUCTS else None
        axis = axes[_PRODUCTS[block.op]] if axes and len(axes) > 1 else None
        if axis is not None and (place := where(axis)) is not None:
            readers.setdefault((id(node.inputs[0]), place), []).append((node, axis))
    first: dict[int, Node] = {}
    for group in readers.values():
        if len(group) < 2:
            continue
        node, axis = group[0]
        value = node.inputs[0]
        block = Primitive(
            "fan_out", {"input": ("*b in", "float")}, {"output": ("*b in", "float")}, {"axis": axis}
        )
        copies = Wire(value.shape, value.kind)
        first[id(node)] = Node(block, f"{node.label}.read", [value], [copies], node.path)
        for reader, _ in group:
            reader.inputs = [copies, *reader.inputs[1:]]
    graph.nodes = [each for node in graph.nodes for each in (first.get(id(node)), node) if each is not None]
    return len(first)


def join(graph: Graph) -> int:
    """Let neighbours be one operation whose gradient takes fewer passes over memory than theirs.

    * ``products``: dense products of one value with several parameters; its gradient is one sum.
    * ``gated``: ``silu`` and a product that alone reads it.

    Args:
        graph: it is changed, and so are the regions in it.

    Returns:
        How many operations are new.
    """
    return sum(_join_products(part) + _join_gates(part) for part in _parts(graph))


def _is(node: Node, *ops: str) -> bool:
    """Whether a node is one of the backend's own operations."""
    block = node.block
    return isinstance(block, Primitive) and not block.registered and node.region is None and block.op in ops


def _floats(*names: str) -> dict[str, tuple[str, str]]:
    """Ports of any shapes: those of their wires are known already."""
    return {name: (f"*{name}", "float") for name in names}


def _reads(graph: Graph) -> Counter[int]:
    """How often each wire (by its id) is read."""
    every = [w for node in graph.nodes for w in node.inputs]
    return Counter(map(id, (*every, *graph.outputs.values(), *graph.next_states.values())))


def _join_products(graph: Graph) -> int:
    weights = {id(leaf.wire) for leaf in graph.params.values()}
    groups: dict[int, list[Node]] = {}
    for node in graph.nodes:
        if _is(node, *_PRODUCTS) and id(node.inputs[1]) in weights:
            groups.setdefault(id(node.inputs[0]), []).append(node)
    groups = {key: group for key, group in groups.items() if len(group) > 1}
    gone = {id(node) for group in groups.values() for node in group[1:]}
    for group in groups.values():
        first = group[0]
        first.label, keys = _common([node.label for node in group])
        weights_of = [f"weight_{key}" for key in keys]
        ports = _floats("input", *weights_of), _floats(*keys)
        first.block = Primitive("products", *ports, accumulates=True, constrain_output=True)
        first.inputs = [first.inputs[0], *(node.inputs[1] for node in group)]
        first.outputs = [node.outputs[0] for node in group]
    graph.nodes = [node for node in graph.nodes if id(node) not in gone]
    return len(groups)


def _common(labels: list[str]) -> tuple[str, list[str]]:
    """What several labels have in common, and what each has of its own."""
    parts = [label.split(".") for label in labels]
    own = [i for i, each in enumerate(zip(*parts, strict=False)) if len(set(each)) > 1]
    if len(own) != 1 or len({*map(len, parts)}) > 1 or len({each[own[0]] for each in parts}) < len(parts):
        return labels[0], [f"of_{i}" for i in range(len(labels))]
    common = [part for i, part in enumerate(parts[0]) if i != own[0]]
    return ".".join(common), [each[own[0]] for each in parts]


def _join_gates(graph: Graph) -> int:
    reads = _reads(graph)
    active: dict[int, Node] = {}
    gone: set[int] = set()
    for node in graph.nodes:
        if _is(node, "silu") and reads[id(node.outputs[0])] == 1:
            active[id(node.outputs[0])] = node
        elif _is(node, "multiply"):
            left, right = node.inputs
            if id(left) not in active:
                left, right = right, left
            if (first := active.get(id(left))) is None or right.role == "constant":
                continue
            node.block = Primitive("gated", _floats("gate", "up"), _floats("output"))
            node.inputs = [first.inputs[0], right]
            gone.add(id(first))
    graph.nodes = [node for node in graph.nodes if id(node) not in gone]
    return len(gone)
