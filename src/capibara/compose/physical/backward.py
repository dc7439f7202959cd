"""Source of backward passes, for backends that do not differentiate by themselves (NumPy).

After the lines of the forward pass come those of its operations in the opposite order, each with what flows back
through it: ``(d_x, d_weight) = grads.dense(d_out, out, x, weight, …)``. Only values that depend on a parameter have
a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from capibara.compose.logical.model import Primitive
from capibara.compose.logical.regions import Repeat
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.codegen_names import lookup, nested
from capibara.compose.physical.graph import Graph, Node, Path

__all__ = ["gradient_lines"]

Read = Callable[[Wire], str]


def _floats(wire: Wire) -> bool:
    return wire.kind.find().value in ("float", None)


class _Flow:
    """What flows back to each value: the names of the parts."""

    def __init__(self, names: Any) -> None:
        self.names = names
        self.parts: dict[int, list[str]] = {}

    def part(self, wire: Wire, of: str) -> str:
        clean = re.sub(r"[^A-Za-z0-9]+", "_", of).strip("_").removeprefix("params_")
        name = self.names.new(f"d_{clean}")
        self.parts.setdefault(id(wire), []).append(name)
        return name

    def at(self, wire: Wire) -> str | None:
        parts = self.parts.get(id(wire))
        if not parts:
            return None
        return parts[0] if len(parts) == 1 else f"grads.total({', '.join(parts)})"


def gradient_lines(
    graph: Graph, job: Any, names: Any, read: Read, given: Read, region: Node | None, state: str
) -> list[str]:
    """The lines after the forward pass, the return line among them (``given``: what leaves the function)."""
    needs = {id(leaf.wire) for leaf in graph.params.values()}
    if region is not None:
        needs |= {id(w) for w in graph.inputs.values() if _floats(w)}
    through = []
    for node in graph.nodes:
        inside = node.region is not None and bool(node.region.params)
        if inside or any(id(w) in needs for w in node.given):
            through.append(node)
            needs |= {id(w) for w in node.outputs if _floats(w)}
    lines: list[str] = []
    flow = _Flow(names)
    carry_out = region.block.carry_out if region is not None and isinstance(region.block, Repeat) else None
    place = 0
    for key, wire in graph.outputs.items():
        if region is None:
            source = f"grads.given(cotangents, {key!r}, {read(wire)})"
        elif key == carry_out:
            source = "d_carry"
        else:
            source = f"d_extra[{place}]"
            place += 1
        if id(wire) in needs:
            lines.append(f"    {flow.part(wire, key)} = {source}")
    inner: dict[Path, str] = {}
    for node in reversed(through):
        flows = [flow.at(w) for w in node.outputs]
        if all(f is None for f in flows):
            continue
        if node.region is not None:
            _region(node, job, flow, lines, read, needs, inner)
        else:
            _operation(node, job, flow, lines, read, needs, flows)
    gradients: dict[Path, str] = {}
    for path, leaf in graph.params.items():
        parts = [f for f in (flow.at(leaf.wire), inner.get(path)) if f is not None]
        gradients[path] = f"grads.of_parameter({', '.join([lookup('params', path), *parts])})"
    tree = nested(gradients) if gradients else "{}"
    if region is None:
        outputs = ", ".join(f"{k!r}: {given(w)}" for k, w in graph.outputs.items())
        lines.append(f"    return {{{outputs}}}, {state}, {tree}")
        return lines
    carry_in = region.block.carry_in if isinstance(region.block, Repeat) else None
    first = flow.at(graph.inputs[carry_in]) if carry_in is not None else None
    shared = "".join(f"{flow.at(w)}, " for k, w in graph.inputs.items() if k != carry_in)
    lines.append(f"    return {tree}, {first}, ({shared.rstrip()})")
    return lines


def _operation(
    node: Node, job: Any, flow: _Flow, lines: list[str], read: Read, needs: set[int], flows: list[str | None]
) -> None:
    from capibara.compose.physical.codegen import arguments_of

    block = node.block
    assert isinstance(block, Primitive)
    wanted = [i for i, w in enumerate(node.given) if id(w) in needs]
    if not wanted:
        return
    arguments = [read(w) for w in node.given]
    given = ", ".join(str(f) for f in flows)
    outputs = ", ".join(read(w) for w in node.outputs)
    if len(flows) > 1:
        given, outputs = f"({given})", f"({outputs})"
    named = arguments_of(node, job, read)
    if len(wanted) < len(arguments):
        named.insert(0, f"wanted=({', '.join(map(str, wanted))},)")
    own = getattr(block, "registered", False)
    function = f"grads.registered(registered[{block.op!r}], " if own else f"grads.{block.op}("
    targets = "".join(f"{flow.part(node.inputs[i], arguments[i])}, " for i in wanted)
    call = ", ".join([given, outputs, *arguments, *named])
    lines.append(f"    ({targets.rstrip()}) = {function}{call})")


def _region(
    node: Node, job: Any, flow: _Flow, lines: list[str], read: Read, needs: set[int], inner: dict[Path, str]
) -> None:
    block, body = node.block, node.region
    assert body is not None
    repeated = isinstance(block, Repeat)
    carry_in, carry_out = (block.carry_in, block.carry_out) if repeated else (None, None)
    by_key = dict(zip(block.input_keys, node.inputs, strict=True))
    out = dict(zip(block.output_keys, node.outputs, strict=True))
    carry = read(by_key[carry_in]) if carry_in is not None else "None"
    d_carry = flow.at(out[carry_out]) if carry_out is not None else None
    shared = "".join(f"{read(w)}, " for k, w in by_key.items() if k != carry_in)
    d_extra = "".join(f"{flow.at(w)}, " for k, w in out.items() if k != carry_out)
    params = lookup("params", node.path) if body.params else "{}"
    state = lookup("state", node.path) if body.states else "{}"
    base = job.named(node.label)
    # Names first, parts of the flow after: the call must not read what it gives.
    d_params = flow.names.new(f"d_{base}_params")
    rest = [(k, w) for k, w in by_key.items() if k != carry_in]
    call = f"{params}, {carry}, ({shared.rstrip()}), {state}, ops.fold(key, {node.index}), {job.train}"
    back = f"{body.name}_gradients"
    if repeated:
        right = (
            f"grads.repeat({body.name}, {back}, {d_carry}, ({d_extra.rstrip()}), {call}, count={block.count})"
        )
    else:
        right = f"{back}({call}, None, ({d_extra.rstrip()}))"
    first = flow.part(by_key[carry_in], carry) if carry_in is not None else "_"
    others = "".join(f"{flow.part(w, read(w)) if id(w) in needs else '_'}, " for _, w in rest)
    lines.append(f"    {d_params}, {first}, {f'({others.rstrip()})' if others else '_'} = {right}")
    for path in body.params:
        inner[(*node.path, *path)] = lookup(d_params, path)
