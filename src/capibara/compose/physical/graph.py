"""From a nested logical model to a flat graph of operations, in an order in which they can run.

Nesting disappears here; what is left of it is the path of every parameter and state, and the label of every
operation. A repeated or rematerialised block stays a graph of its own (:attr:`Node.region`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from capibara.compose.errors import CycleError, UnconnectedError, WiringError
from capibara.compose.logical.block import Block, Primitive, site_of
from capibara.compose.logical.model import Model
from capibara.compose.logical.regions import Region, Repeat
from capibara.compose.logical.wires import Wire

__all__ = ["Graph", "Leaf", "Node", "flatten"]

Path = tuple[str, ...]


@dataclass
class Leaf:
    """A parameter or a state of the compiled model.

    Attributes:
        wire: its shape and declaration (of one repetition, if it is repeated).
        stack: counts of the repetitions around it, outermost first; its array has these as leading dimensions.
    """

    wire: Wire
    stack: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[str | None, ...] | None:
        inner = self.wire.axes
        return None if inner is None else ("layers",) * len(self.stack) + inner


@dataclass
class Node:
    """One operation, or one region, of a flat graph.

    Attributes:
        index: its place in the graph as flattened; passes do not change it, so that the random numbers that it
            draws do not depend on what else is left out.
        sizes: of the ports that are sizes, how each follows from ``inputs[arrays:]``, whose shapes are read.
        arrays: how many of ``inputs`` the operation gets; None: all.
    """

    block: Block
    label: str
    inputs: list[Wire]
    outputs: list[Wire]
    path: Path
    region: Graph | None = None
    index: int = 0
    sizes: dict[str, Any] = field(default_factory=dict)
    arrays: int | None = None

    @property
    def given(self) -> list[Wire]:
        """The inputs that the operation gets."""
        return self.inputs[: self.arrays]


@dataclass
class Graph:
    """A pure function: inputs, parameters and states in; outputs and next states out.

    ``left_out``: parameters of the model that are none of the function.
    """

    name: str
    inputs: dict[str, Wire]
    outputs: dict[str, Wire]
    params: dict[Path, Leaf] = field(default_factory=dict)
    states: dict[Path, Leaf] = field(default_factory=dict)
    next_states: dict[Path, Wire] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)

    def walk(self) -> Iterator[Node]:
        """All nodes, those inside regions too."""
        stack: list[Graph] = [self]
        while stack:
            graph = stack.pop()
            for node in graph.nodes:
                yield node
                if node.region is not None:
                    stack.append(node.region)


def flatten(
    model: Model,
    name: str = "forward",
    *,
    extra_inputs: Mapping[str, Wire] | None = None,
    safe_names: bool = True,
    moved: Collection[int] = (),
) -> Graph:
    """Flatten a model.

    Args:
        model: the model. name: of the function that it becomes.
        extra_inputs: values inside the model that are inputs of the graph too.
        safe_names: False makes inputs of what is connected to nothing, named by the place where it is read.
        moved: values that were parameters, by the id of their wire.

    Raises:
        UnconnectedError: an operation needs a value that nothing gives.
        CycleError: a value depends on itself.
        WiringError: a parameter and a block share a path.
    """
    model._finish()
    graph = Graph(
        name,
        {k: model.wires[k].find() for k in model.input_keys} | dict(extra_inputs or {}),
        {k: model.wires[k].find() for k in model.output_keys},
    )
    if not graph.outputs:
        raise UnconnectedError(f"{model.label} has no output: add a block to it before compiling it")
    seen: set[int] = set()
    nodes: list[Node] = []
    updates: dict[int, Wire] = {}

    def leaves(block: Model, path: Path) -> None:
        for key, wire in block.wires.items():
            root = wire.find()
            if root.role in ("param", "state") and id(root) not in seen:
                seen.add(id(root))
                table = graph.params if root.role == "param" else graph.states
                table[(*path, key)] = Leaf(root)
            elif id(root) in moved and id(root) not in seen:
                seen.add(id(root))
                graph.left_out.append((*path, key))
        for key, wire in block.state_updates.items():
            updates[id(block.wires[key].find())] = wire.find()

    stack: list[tuple[Block, Path]] = [(model, ())]
    while stack:
        block, path = stack.pop()
        if isinstance(block, Model):
            leaves(block, path)
            stack.extend((child.block, (*path, child.name)) for child in reversed(block.children))
        elif isinstance(block, Primitive):
            nodes.append(
                Node(
                    block,
                    block.label,
                    [block.wires[k].find() for k in block.ports_in],
                    [block.wires[k].find() for k in block.output_keys],
                    path,
                )
            )
        elif isinstance(block, Region):
            inner = flatten(block.body, "_".join(path) or "body")
            counts = (block.count,) if isinstance(block, Repeat) else ()
            for mine, theirs in ((graph.params, inner.params), (graph.states, inner.states)):
                for key, leaf in theirs.items():
                    mine[(*path, *key)] = Leaf(leaf.wire, (*counts, *leaf.stack))
            nodes.append(
                Node(
                    block,
                    block.label,
                    [block.wires[k].find() for k in block.input_keys],
                    [block.wires[k].find() for k in block.output_keys],
                    path,
                    inner,
                )
            )
        else:
            raise WiringError(f"{block!r} is not a kind of block that can be compiled")
    for path, leaf in graph.states.items():
        if id(leaf.wire) in updates:
            graph.next_states[path] = updates[id(leaf.wire)]
    _check_paths([*graph.params, *graph.states])
    made = {id(w) for n in nodes for w in n.outputs} | {id(w) for w in graph.inputs.values()}
    for node in nodes:
        for wire in node.inputs:
            # Also where nothing needs the result: a forgotten connection is the likelier reason for that.
            if wire.role is None and id(wire) not in made:
                block, key = _open_end(node, wire)
                if safe_names:
                    raise _unconnected(block, key)
                graph.inputs[_free_name(f"{block.label}_{key}".replace(".", "_"), graph.inputs)] = wire
                made.add(id(wire))
    graph.nodes = _order(graph, nodes)
    for index, node in enumerate(graph.nodes):
        node.index = index
    return graph


def _check_paths(paths: list[Path]) -> None:
    taken = set(paths)
    for path in paths:
        for i in range(1, len(path)):
            if path[:i] in taken:
                raise WiringError(
                    f"the parameter {'.'.join(path[:i])} and the block of {'.'.join(path)} have the same path: "
                    "give the block another name"
                )


def _order(graph: Graph, nodes: list[Node]) -> list[Node]:
    """The nodes that outputs and next states need, each after what it depends on (depth first, iterative)."""
    maker: dict[int, Node] = {id(w): n for n in nodes for w in n.outputs}
    order: list[Node] = []
    done: dict[int, bool] = {}  # id(node) → finished; False while it is being visited
    stateful = [n for n in nodes if n.region is not None and n.region.states]
    roots = [*graph.outputs.values(), *graph.next_states.values(), *(w for n in stateful for w in n.outputs)]
    rank = {id(n): i for i, n in enumerate(nodes)}
    # In the order in which blocks were added wherever possible, so that generated code reads as the model does.
    for start in sorted(
        {id(maker[id(w)]): maker[id(w)] for w in roots if id(w) in maker}.values(), key=lambda n: rank[id(n)]
    ):
        if id(start) in done:
            continue
        stack: list[tuple[Node, Iterator[Wire]]] = [(start, iter(start.inputs))]
        done[id(start)] = False
        while stack:
            node, waiting = stack[-1]
            for wire in waiting:
                before = maker.get(id(wire))
                if before is None:
                    continue
                if id(before) not in done:
                    done[id(before)] = False
                    stack.append((before, iter(before.inputs)))
                    break
                if not done[id(before)]:
                    raise _cycle([n for n, _ in stack], before)
            else:
                done[id(node)] = True
                order.append(node)
                stack.pop()
    return order


def _place(node: Node) -> str:
    site = site_of(node.block)
    return f"{node.label}" + (f" (added at {site})" if site else "")


def _free_name(base: str, taken: Mapping[str, Wire]) -> str:
    name, i = base, 1
    while name in taken:
        i += 1
        name = f"{base}_{i}"
    return name


def _open_end(node: Node, wire: Wire) -> tuple[Block, str]:
    """The outermost block whose port an unconnected value is: the one that the user added and forgot to connect."""
    key = next((k for k, w in node.block.wires.items() if w.find() is wire), "input")
    block: Block = node.block
    while isinstance(block.parent, Model):
        outer = next((k for k, w in block.parent.wires.items() if w.find() is wire), None)
        if outer is None:
            break
        block, key = block.parent, outer
    return block, key


def _unconnected(block: Block, key: str) -> UnconnectedError:
    site = site_of(block)
    added = f" (added at {site})" if site else ""
    return UnconnectedError(
        f"the input {key!r} of {block.label}{added} is connected to nothing: name what it reads, as in "
        f"{type(block).__name__}(…)({key}='x'), or add the block with += to join it to the one before"
    )


def _cycle(visiting: list[Node], again: Node) -> CycleError:
    start = next(i for i, n in enumerate(visiting) if n is again)
    # The stack runs from consumer to producer; said the other way round it follows the data.
    names = [_place(n) for n in reversed(visiting[start:])]
    return CycleError(
        "these blocks form a cycle, each needs the result of the one before:\n  "
        + "\n  ".join([*names, names[0]])
    )
