"""From a flat graph to readable Python source: one pure function, and one more for each repeated block.

The source is the model: it can be read, kept and run. Nothing of the model's names reaches it unchecked: every
name is an identifier that :mod:`capibara.compose.logical.model` accepted, every literal goes through ``repr``.
"""

from __future__ import annotations

import keyword
import math
import re
import unicodedata
from dataclasses import dataclass, field
from typing import Any

from capibara.compose.errors import CompileError
from capibara.compose.logical.model import Primitive
from capibara.compose.logical.regions import Repeat
from capibara.compose.logical.wires import Wire
from capibara.compose.physical.codegen_names import lookup, nested
from capibara.compose.physical.constants import argument, as_source, frozen
from capibara.compose.physical.graph import Graph, Node, Path
from capibara.compose.physical.in_place import written_in_place
from capibara.compose.physical.sizes import filled
from capibara.compose.precision import Precision

__all__ = ["generate", "keywords", "literal", "module_source"]

_RESERVED = {
    "params",
    "inputs",
    "state",
    "key",
    "train",
    "ops",
    "shard",
    "constants",
    "cotangents",
    "d_carry",
    "d_extra",
    "grads",
    "outputs",
    "registered",
    "carry",
    "shared",
}


@dataclass
class _Job:
    """What all functions of one source have in common."""

    precision: Precision
    modes: dict[int, str]
    inference: bool
    short: bool
    backward: bool = False
    sharded: bool = True
    in_place: bool = False
    constants: dict[str, Any] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)

    @property
    def train(self) -> str:
        return "False" if self.inference else "train"

    def named(self, label: str) -> str:
        parts = label.split(".")
        return "_".join(p for p in (parts[-3:] if self.short else parts) if p)


def generate(
    graph: Graph,
    precision: Precision,
    modes: dict[int, str],
    *,
    inference: bool = False,
    short: bool = True,
    backward: bool = False,
    sharded: bool = True,
    in_place: bool = False,
) -> tuple[str, dict[str, Any]]:
    """The source of a graph, and the constants that it names.

    Args:
        graph: from :func:`capibara.compose.physical.graph.flatten`.
        precision: which casts to write.
        modes: ``id(node.block)`` → "scan" or "unroll" for each repetition.
        inference: operations always run in inference mode.
        short: name a value by the last three names of its place in the nested model, not by all of them.
        backward: also write functions of the gradients (:mod:`capibara.compose.physical.backward`), for backends that
            do not differentiate by themselves. sharded: write how values are laid over a mesh. in_place: tell the
            repetitions that decode which states they write into (:mod:`capibara.compose.physical.in_place`).

    Returns:
        The source of a function ``forward(params, inputs, state, key, train) -> (outputs, new_state)``, and the
        values for its free variable ``constants``.
    """
    job = _Job(precision, modes, inference, short, backward, sharded, in_place)
    # Functions and local values must not share a name: a local assignment would hide the function.
    taken = _Names()
    for node in graph.walk():
        if node.region is not None:
            node.region.name = taken.new("_".join(node.path) + "_block")
            taken.taken.add(f"{node.region.name}_gradients")
    _function(graph, job, region=None)
    return "\n\n\n".join(job.functions) + "\n", job.constants


def module_source(functions: str, constants: dict[str, Any], ops_module: str, title: str) -> str:
    """A module that stands by itself: what it imports, its constants as text, its functions."""
    package, _, name = ops_module.rpartition(".")
    imports = [f"from {package} import {name} as ops"]
    if "grads." in functions:
        imports.insert(0, f"from {package} import {name.removesuffix('_ops')}_gradients as grads")
    own = sorted(set(re.findall(r"registered\[('\w+')\]", functions)))
    if constants:
        made = "tensor as array" if name.startswith("torch") else "array"
        imports.append(f"from capibara.compose.physical.constants import {made}")
    if "shard(" in functions:
        imports.append("from capibara.compose.physical.sharding import constrain as shard")
    lines = [f'"""{title}"""', "", *imports, ""]
    if constants:
        lines += ["constants = {", *(f"    {k!r}: {as_source(v)}," for k, v in constants.items()), "}", ""]
    if own:
        lines += [
            f"registered = {{}}  # functions by name, to be put here where this file is used: {', '.join(own)}",
            "",
        ]
    return "\n".join([*lines, "", functions])


class _Names:
    def __init__(self) -> None:
        self.taken = set(_RESERVED)
        self.of: dict[int, str] = {}
        self._next: dict[str, int] = {}

    def new(self, wanted: str) -> str:
        if not wanted.isascii():
            wanted = unicodedata.normalize("NFKC", wanted)  # as Python reads names: 'ﬁ' is 'fi' to it
        base = wanted if not keyword.iskeyword(wanted) else wanted + "_"
        # Goes on from the number given out last: n values of one name are named in n steps.
        name, i = base, self._next.get(base, 1)
        while name in self.taken:
            i += 1
            name = f"{base}_{i}"
        self._next[base] = i
        self.taken.add(name)
        return name


def _function(graph: Graph, job: _Job, region: Node | None) -> None:
    precision, constants = job.precision, job.constants
    names = _Names()
    for node in graph.nodes:
        if node.region is not None:
            names.taken |= {node.region.name, f"{node.region.name}_gradients"}
    lines: list[str] = []
    cast = precision.compute != precision.param

    if region is None:
        lines.append(f"def {graph.name}(params, inputs, state, key, train):")
        for key, wire in graph.inputs.items():
            names.of[id(wire)] = names.new(key)
            value = f"inputs[{key!r}]"
            if wire.kind.find().value == "float" and cast:
                value = f"ops.cast({value}, {precision.compute!r})"
            lines.append(f"    {names.of[id(wire)]} = {value}")
    else:
        lines.append(f"def {graph.name}(params, carry, shared, state, key, train):")
        block = region.block
        carry = block.carry_in if isinstance(block, Repeat) else None
        rest = [k for k in graph.inputs if k != carry]
        for key, wire in graph.inputs.items():
            names.of[id(wire)] = names.new(key)
        if carry is not None:
            lines.append(f"    {names.of[id(graph.inputs[carry])]} = carry")
        if rest:
            lines.append(f"    ({', '.join(names.of[id(graph.inputs[k])] for k in rest)},) = shared")

    leaf_of = {id(leaf.wire): (path, leaf) for path, leaf in graph.params.items()}
    state_of = {id(leaf.wire): path for path, leaf in graph.states.items()}

    def read(wire: Wire) -> str:
        if id(wire) in names.of:
            return names.of[id(wire)]
        if id(wire) in leaf_of:
            path, leaf = leaf_of[id(wire)]
            value = lookup("params", path)
            declaration = leaf.wire.declaration
            assert declaration is not None
            if cast and not declaration.keep_dtype and declaration.dtype is None:
                # Cast once, where it is first used.
                names.of[id(wire)] = names.new("_".join(path))
                lines.append(f"    {names.of[id(wire)]} = ops.cast({value}, {precision.compute!r})")
                return names.of[id(wire)]
            return value
        if id(wire) in state_of:
            return lookup("state", state_of[id(wire)])
        if wire.role == "constant":
            literal = _literal(wire)
            if literal is not None:
                return literal
            name = f"c{len(constants)}"
            constants[name] = frozen(wire.constant)
            names.of[id(wire)] = f"constants[{name!r}]"
            return names.of[id(wire)]
        raise CompileError("a value has no source")  # flatten() has checked this

    def given(wire: Wire) -> str:
        """A value that leaves the function: an array, also where operations read a number."""
        if wire.role != "constant":
            return read(wire)
        value = literal(wire)
        if value is None:
            return f"ops.to_tensor({read(wire)})"
        dtype = {bool: "bool", int: "int32"}.get(type(value), precision.compute)
        return f"ops.full((), {read(wire)}, dtype={dtype!r})"

    new_states: dict[Path, str] = {}
    for node in graph.nodes:
        if node.region is None:
            _operation(node, job, names, lines, read)
        else:
            _region(node, job, names, lines, read, new_states)
            _function(node.region, job, node)

    for path in graph.states:
        if path in new_states:
            continue
        wire = graph.next_states.get(path)
        new_states[path] = given(wire) if wire is not None else lookup("state", path)
    state = nested(new_states) if new_states else "state"
    if job.backward:
        job.functions.append(_gradients(graph, job, names, lines, read, given, region, state))
    if region is None:
        pairs = ", ".join(f"{k!r}: {given(w)}" for k, w in graph.outputs.items())
        lines.append(f"    return {{{pairs}}}, {state}")
    else:
        carry = region.block.carry_out if isinstance(region.block, Repeat) else None
        first = given(graph.outputs[carry]) if carry is not None else "None"
        extra = "".join(f"{given(w)}, " for k, w in graph.outputs.items() if k != carry)
        lines.append(f"    return {first}, {state}, ({extra.rstrip() if extra else ''})")
    job.functions.append("\n".join(lines))


def _gradients(
    graph: Graph,
    job: _Job,
    names: _Names,
    lines: list[str],
    read: Any,
    given: Any,
    region: Node | None,
    state: str,
) -> str:
    """The function that goes forward and back."""
    from capibara.compose.physical.backward import gradient_lines

    for wire in graph.outputs.values():
        read(wire)  # what is cast for an output alone has its line now
    back = gradient_lines(graph, job, names, read, given, region, state)
    if region is None:
        head = "def gradients(params, inputs, state, key, train, cotangents):"
    else:
        head = f"def {graph.name}_gradients(params, carry, shared, state, key, train, d_carry, d_extra):"
    return "\n".join([head, *lines[1:], *back])


def arguments_of(node: Node, job: _Job, read: Any) -> list[str]:
    """The keyword arguments of an operation as they are written (``read``: the source of a value)."""
    block = node.block
    assert isinstance(block, Primitive)
    arguments = [
        f"{k}={argument(v, f'{node.label}: {k}')}" for k, v in keywords(node, job.precision, read).items()
    ]
    if block.uses_key:
        arguments.append(f"key=ops.fold(key, {node.index})")
    if block.uses_train:
        arguments.append(f"train={job.train}")
    return arguments


def _literal(wire: Wire) -> str | None:
    """A Python number as source, or None if it is an array, or a number that has no literal (infinities, NaN)."""
    value = literal(wire)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return None if value is None else repr(value)


def literal(wire: Wire) -> bool | int | float | None:
    """A constant as the Python number that it is for the operations that read it, or None if it is an array.

    Raises:
        CompileError: an integer that no int32 holds.
    """
    value = wire.constant
    if isinstance(value, bool):
        return value
    if isinstance(value, int):
        if wire.kind.find().value == "float":
            return float(value) if abs(value) < 1e300 else math.inf
        if abs(value) >= 2**31:
            raise CompileError(
                f"the number {value} does not fit an int32: pass an array of the dtype you need"
            )
        return int(value)
    # float(): a subclass (NumPy's float64) has a repr of its own
    return float(value) if isinstance(value, float) else None


def keywords(node: Node, precision: Precision, read: Any = None) -> dict[str, Any]:
    """The arguments of an operation that are known when the model is compiled, and sizes as source."""
    block = node.block
    assert isinstance(block, Primitive)
    named = {key: filled(value, node, read) for key, value in block.attributes.items()}
    if block.accumulates:
        named["accumulate"] = precision.accumulate
    takes = getattr(block, "takes_dtype", False)  # "int": only when the operation makes floats of integers
    if takes is True or (takes == "int" and node.inputs[0].kind.find().value in ("int", "bool")):
        named["dtype"] = precision.compute
    return named


def _operation(node: Node, job: _Job, names: _Names, lines: list[str], read: Any) -> None:
    block = node.block
    assert isinstance(block, Primitive)
    arguments = [*(read(w) for w in node.given), *arguments_of(node, job, read)]
    single = len(node.outputs) == 1
    for key, wire in zip(block.output_keys, node.outputs, strict=True):
        names.of[id(wire)] = names.new(
            job.named(node.label) + ("" if single or key == "output" else f"_{key}")
        )
    targets = ", ".join(names.of[id(w)] for w in node.outputs)
    function = f"registered[{block.op!r}]" if getattr(block, "registered", False) else f"ops.{block.op}"
    lines.append(f"    {targets} = {function}({', '.join(arguments)})")
    for wire in node.outputs if block.constrain_output and job.sharded else ():
        if wire.axes and all(wire.axes):
            target = names.of[id(wire)]
            lines.append(f"    {target} = shard({target}, {wire.axes!r})")


def _region(
    node: Node,
    job: _Job,
    names: _Names,
    lines: list[str],
    read: Any,
    states: dict[Path, str],
) -> None:
    block, inner = node.block, node.region
    assert inner is not None
    carry_in = block.carry_in if isinstance(block, Repeat) else None
    carry_out = block.carry_out if isinstance(block, Repeat) else None
    by_key = dict(zip(block.input_keys, node.inputs, strict=True))
    carry = read(by_key[carry_in]) if carry_in is not None else "None"
    shared = "".join(f"{read(w)}, " for k, w in by_key.items() if k != carry_in)
    params = lookup("params", node.path) if inner.params else "{}"
    state = lookup("state", node.path) if inner.states else "{}"
    base = job.named(node.label)
    for key, wire in zip(block.output_keys, node.outputs, strict=True):
        names.of[id(wire)] = names.new(base if key == "output" else f"{base}_{key}")
    outputs = dict(zip(block.output_keys, node.outputs, strict=True))
    out = names.of[id(outputs[carry_out])] if carry_out is not None else "_"
    extra = "".join(f"{names.of[id(w)]}, " for k, w in outputs.items() if k != carry_out)
    state_name = names.new(f"{base}_state") if inner.states else "_"
    call = f"{params}, {carry}, ({shared.rstrip()}), {state}, ops.fold(key, {node.index}), {job.train}"
    if isinstance(block, Repeat):
        options = f"count={block.count}, mode={job.modes[id(node.block)]!r}, remat={block.remat!r}"
        places = written_in_place(inner) if job.in_place else None
        if places is not None:
            options += f", in_place={places!r}"
        right = f"ops.repeat({inner.name}, {call}, {options})"
    else:
        right = f"ops.checkpointed({inner.name}, {block.remat!r})({call})"  # type: ignore[attr-defined]
    lines.append(f"    {out}, {state_name}, {f'({extra.rstrip()})' if extra else '_'} = {right}")
    for path in inner.states:
        states[(*node.path, *path)] = lookup(state_name, path)
