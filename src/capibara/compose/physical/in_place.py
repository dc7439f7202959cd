"""Which states a repeated block writes into, instead of giving them anew.

A decoding step changes one row of a cache of thousands. Its graph says that a cache goes in and another one comes out;
here it is found where the second can only be the first with rows written to it, because nothing else reads either of
them. Such a state need not be taken out of the array of all repetitions (:mod:`capibara.compose.backends.jax_stacked`).
"""

from __future__ import annotations

from collections import Counter

from capibara.compose.logical.block import Primitive
from capibara.compose.physical.graph import Graph, Path

__all__ = ["written_in_place"]


def written_in_place(graph: Graph) -> tuple[Path, ...] | None:
    """The states of a repeated block that its operations write into.

    Args:
        graph: of the block.

    Returns:
        Their paths; None if nothing in the block decodes (:attr:`~capibara.compose.logical.block.Block.decodes`).
    """
    if not any(node.block.decodes for node in graph.walk()):
        return None
    states = {id(leaf.wire): path for path, leaf in graph.states.items()}
    uses = Counter(id(wire) for node in graph.nodes for wire in node.inputs)
    uses.update(id(wire) for wire in (*graph.outputs.values(), *graph.next_states.values()))
    found = []
    for node in graph.nodes:
        if not isinstance(node.block, Primitive):
            continue
        inputs = dict(zip(node.block.ports_in, node.given, strict=False))  # without those that are sizes
        outputs = dict(zip(node.block.output_keys, node.outputs, strict=True))
        for before, after in node.block.in_place.items():
            path = states.get(id(inputs[before]))
            if path is None or graph.next_states.get(path) is not outputs[after]:
                continue
            if uses[id(inputs[before])] == 1 and uses[id(outputs[after])] == 1:
                found.append(path)
    return tuple(found)
