"""What a compiled model knows of its arrays: plain values, read off the graph before it is let go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from capibara.compose.errors import CompileError
from capibara.compose.logical.shapes import Dim
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.graph import Graph, Leaf
from capibara.compose.precision import Precision

__all__ = ["ArraySpec", "ModelSpecs", "nest", "shape_text"]


@dataclass(frozen=True)
class ArraySpec:
    """What is known of an array: sizes (a name where the size is free), dtype, logical axis names."""

    shape: tuple[int | str, ...] | None
    dtype: str
    axes: tuple[str | None, ...] | None
    init: Any = None
    stack: int = 0

    def sizes(self, free: Mapping[str, int], what: str) -> tuple[int, ...]:
        """The shape with its free sizes filled in."""
        if self.shape is None:
            raise CompileError(f"the rank of {what} is unknown: pass shapes={{…}} to compile()")
        missing = [n for n in self.shape if isinstance(n, str) and n not in free]
        if missing:
            raise CompileError(
                f"{what} has shape {shape_text(self.shape)}, and {', '.join(map(repr, missing))} is not known: pass "
                "shapes={…} with the input's sizes to compile(), or the size by name"
            )
        return tuple(free[n] if isinstance(n, str) else n for n in self.shape)


def shape_text(shape: tuple[int | str, ...]) -> str:
    return "(" + ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "") + ")"


class ModelSpecs:
    """Shapes, dtypes and axes, read off a graph."""

    def __init__(self, graph: Graph, policy: Precision) -> None:
        self._names: dict[int, str] = {}
        self._dims: list[Dim] = []  # kept alive, so that ids stay unique
        self._taken: set[str] = set()
        self._policy = policy
        self.inputs = {k: self._wire(w) for k, w in graph.inputs.items()}
        self.outputs = {k: self._wire(w) for k, w in graph.outputs.items()}
        self.params = {path: self._leaf(leaf) for path, leaf in graph.params.items()}
        self.states = {path: self._leaf(leaf) for path, leaf in graph.states.items()}

    def _dim(self, dim: Dim) -> int | str:
        root = dim.find()
        if root.size is not None:
            return root.size
        if id(root) not in self._names:
            base = root.name or root.axis or "size"
            name, i = base, 1
            while name in self._taken:
                i += 1
                name = f"{base}_{i}"
            self._taken.add(name)
            self._names[id(root)] = name
            self._dims.append(root)
        return self._names[id(root)]

    def _wire(self, wire: Wire) -> ArraySpec:
        dims = wire.shape.dims()
        shape = None if dims is None else tuple(self._dim(d) for d in dims)
        kind = wire.kind.find().value
        dtype = {"int": "int32", "bool": "bool"}.get(kind or "float", self._policy.compute)
        return ArraySpec(shape, dtype, wire.axes)

    def _leaf(self, leaf: Leaf) -> ArraySpec:
        wire, declaration = leaf.wire, leaf.wire.declaration
        assert declaration is not None
        spec = self._wire(wire)
        policy = self._policy
        default = spec.dtype if wire.role == "state" else policy.param
        shape = None if spec.shape is None else (*leaf.stack, *spec.shape)
        return ArraySpec(shape, declaration.dtype or default, leaf.axes, declaration.init, len(leaf.stack))


def nest(values: Mapping[tuple[str, ...], Any]) -> dict[str, Any]:
    """What is by path, as a nested dict."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        at = tree
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = value
    return tree
