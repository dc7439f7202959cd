"""Whether the registered operations of a model fit: they are on the backend, and give what their blocks say."""

from __future__ import annotations

from typing import Any

from capibara.compose.errors import CompileError, ShapeError
from capibara.compose.logical.block import site_of
from capibara.compose.logical.custom import Operation, Wrapped
from capibara.compose.physical.graph import Graph, Node
from capibara.errors import did_you_mean

__all__ = ["check_registered", "functions_of"]


def check_registered(graph: Graph, backend: Any) -> None:
    """Every operation of the user's own in a graph is there, and gives what its block says.

    Raises:
        CompileError: the backend has no operation of that name.
        ShapeError: its results have other shapes than the model was built with.
    """
    table = getattr(backend, "registered_ops", {})
    for node in graph.walk():
        block = node.block
        if not isinstance(block, Operation):
            continue
        site = site_of(block)
        place = f"{node.label}" + (f" (added at {site})" if site else "")
        if isinstance(block, Wrapped):
            if getattr(backend, "type", "") != block.library:
                raise CompileError(
                    f"{place}: it wraps a function of {block.library}, which {backend!r} cannot run; compile the model "
                    f"for a backend of {block.library}"
                )
            continue
        if block.op not in table:
            raise CompileError(
                f"{place}: no operation {block.op!r} is registered on {backend!r}; registered are "
                f"{', '.join(sorted(table)) or 'none'}.{did_you_mean(block.op, table)} Register it with "
                f"backend.register_op({block.op!r})"
            )
        if getattr(backend, "type", "") == "jax":
            _check_shapes(node, block, table[block.op], backend, place)


def functions_of(graph: Graph) -> dict[str, Any]:
    """Functions that blocks carry with them, by the name of their operation."""
    return {n.block.op: n.block.function for n in graph.walk() if isinstance(n.block, Wrapped)}


def _check_shapes(node: Node, block: Operation, function: Any, backend: Any, place: str) -> None:
    sizes = [w.shape.known for w in (*node.inputs, *node.outputs)]
    if any(s is None or None in s for s in sizes) or any(w.role == "constant" for w in node.inputs):
        return
    import jax

    dtypes = {"int": "int32", "bool": "bool"}
    specs = [
        jax.ShapeDtypeStruct(size, dtypes.get(w.kind.find().value or "", backend.policy.compute))
        for size, w in zip(sizes, node.inputs, strict=False)
        if size is not None
    ]
    try:
        with backend.scope():
            results = jax.eval_shape(lambda *a: function(*a, **block.attributes), *specs)
    except Exception:
        return  # what is wrong is said, with its own traceback, when the model runs
    row = results if isinstance(results, tuple) else (results,)
    found = [tuple(getattr(r, "shape", ())) for r in row]
    wanted = [w.shape.known for w in node.outputs]
    if found != wanted:
        raise ShapeError(
            f"{place}: the operation {block.op!r} gives {', '.join(map(str, found))} of "
            f"{', '.join(str(s.shape) for s in specs)}, and the model was built for "
            f"{', '.join(map(str, wanted))}: say so with op({block.op!r}, shapes={{…}})"
        )
