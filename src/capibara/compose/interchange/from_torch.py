"""PyTorch modules as composed models, with their weights.

``torch.export`` traces a module for example inputs and breaks it down to the operations that PyTorch calls its core
set. Each of them has one function in :mod:`.from_torch_operations`, which puts the primitives that compute the same
into a model. What does not depend on the input's values is decided by the trace: Python branches, and every size
that ``dynamic_shapes`` does not leave open.

Parameters keep torch's names: ``encoder.layers.0.linear1.weight`` is
``params["encoder"]["layers"]["item_0"]["linear1"]["weight"]``. A part that does not begin with a letter gets
``item_`` before it, and characters that cannot stand in a name become ``_``. Buffers (the statistics of a batch
normalisation, tables) are constants of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose.errors import ComposeError, WiringError
from capibara.compose.initializers import Given
from capibara.compose.interchange.from_torch_operations import TABLE, Refused
from capibara.compose.logical.connections import Port
from capibara.compose.logical.model import Model
from capibara.compose.primitives import Buffer, ToTensor
from capibara.errors import MissingExtraError

__all__ = ["Imported", "UnsupportedTorchError", "from_torch"]


class UnsupportedTorchError(ComposeError, NotImplementedError):
    """A torch module does something that has no counterpart in compose; the message lists all of it."""


@dataclass(frozen=True)
class Imported:
    """A model made of a torch module.

    Attributes:
        model: to be compiled or connected. Its inputs have the names of ``forward``'s parameters, its outputs are
            ``output``, or ``output_0``, ``output_1`` … where the module returns several.
        params: the weights as NumPy arrays, nested as the compiled model takes them.
    """

    model: Model
    params: dict[str, Any]


def from_torch(
    module: Any,
    example_inputs: tuple[Any, ...],
    example_keywords: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> Imported:
    """A model that computes what a torch module computes in evaluation mode, and the module's weights.

    Equivalent torch: ``torch.export.export(module.eval(), example_inputs, …).run_decompositions()``. The module is
    not changed. Dtypes are those of the compiled model: floats are computed in the backend's dtype, whole numbers
    as int32. A parameter that the module has under several names is one parameter, under one of them.

    Args:
        module: a ``torch.nn.Module``.
        example_inputs: tensors to call it with. Their sizes become the model's unless left open.
        example_keywords: the same for arguments by name.
        dynamic_shapes: as ``torch.export.export`` takes it: ``({0: torch.export.Dim("batch")},)`` leaves the first
            size of the first input open.

    Raises:
        MissingExtraError: torch is not installed.
        UnsupportedTorchError: operations without a counterpart, all of them, and the modules that use them.
        WiringError: ``module`` is no module, or ``torch.export`` cannot trace it.
    """
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", "torch", "from_torch") from None
    if not isinstance(module, torch.nn.Module):
        raise WiringError(f"module={module!r:.80} ({type(module).__name__}) must be a torch.nn.Module")
    if not isinstance(example_inputs, tuple):
        raise WiringError(
            f"example_inputs ({type(example_inputs).__name__}) must be a tuple of the arguments, as in (x,)"
        )
    return _Importer(_traced(module, example_inputs, example_keywords, dynamic_shapes)).imported()


def _traced(module: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any] | None, dynamic: Any) -> Any:
    import warnings

    import torch

    training = [m for m in module.modules() if m.training]
    try:
        module.eval()
        with warnings.catch_warnings(), torch.no_grad():
            # torch.export warns of what it uses itself.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            program = torch.export.export(module, inputs, dict(keywords or {}), dynamic_shapes=dynamic)
            return program.run_decompositions()
    except Exception as error:
        raise WiringError(
            f"torch.export cannot trace this {type(module).__name__}: {type(error).__name__}: {error}"
        ) from error
    finally:
        for part in training:
            part.training = True


def _part(name: str) -> str:
    """One part of a torch name as an identifier."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return name if name[:1].isalpha() else f"item_{name}"


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    """A copy; bfloat16, which NumPy lacks, as float32, which holds it exactly."""
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


def _place(node: Any) -> str:
    """The module that an operation comes from."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return (stack[-1][0] if stack else "") or "the module itself"


def _name(node: Any) -> str:
    target = node.target
    return getattr(target, "_name", None) or str(target)  # "aten::add.Tensor"


def _entry(node: Any) -> Any:
    space, _, rest = _name(node).partition("::")
    return TABLE.get(rest.split(".")[0]) if space == "aten" else None


def _is_getitem(node: Any) -> bool:
    import operator

    return node.target is operator.getitem


def _is_size(node: Any) -> bool:
    """It computes a size or checks one: nothing is computed of that, sizes are read off the trace."""
    value = node.meta.get("val")
    if isinstance(value, int | float) or type(value).__name__ in ("SymInt", "SymBool", "SymFloat"):
        return True
    return value is None and ("assert" in _name(node) or "sym_constrain" in _name(node))


class _Importer:
    """A traced program on its way to a model."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.model = Model()
        self.params: dict[str, Any] = {}
        self._values: dict[Any, Any] = {}
        self._holders: dict[tuple[str, ...], Model] = {}

    def imported(self) -> Imported:
        self._check()
        self._inputs()
        for node in self.program.graph.nodes:
            if node.op == "call_function" and not _is_size(node):
                self._run(node)
        self._outputs()
        return Imported(self.model, self.params)

    def _check(self) -> None:
        bad: dict[str, dict[str, None]] = {}
        for node in self.program.graph.nodes:
            if node.op == "call_function" and not (_is_size(node) or _is_getitem(node) or _entry(node)):
                bad.setdefault(_name(node), {})[_place(node)] = None
            elif node.op == "get_attr":
                bad.setdefault(f"get_attr {node.target}", {})[_place(node)] = None
        if bad:
            rows = "".join(f"\n  {name} in {', '.join(places)}" for name, places in sorted(bad.items()))
            raise UnsupportedTorchError(
                f"from_torch: {len(bad)} operation(s) of this module have no counterpart in compose:{rows}\n"
                "Rewrite those parts, or compose them by hand and import the modules around them."
            )

    # ---- what goes in ---------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        signature = self.program.graph_signature
        held: dict[tuple[str, ...], dict[str, np.ndarray[Any, Any]]] = {}
        seen: dict[int, tuple[tuple[str, ...], str]] = {}
        where: dict[str, tuple[tuple[str, ...], str]] = {}
        taken: set[tuple[str, ...]] = set()
        used = {n.name for n in self.program.graph.nodes if n.op == "placeholder" and n.users}
        constants: dict[str, Any] = {}
        for spec in signature.input_specs:
            kind, name = spec.kind.name, getattr(spec.arg, "name", "")
            if kind == "USER_INPUT" or name not in used:
                continue
            tensor = (
                self.program.state_dict.get(spec.target)
                if spec.target in self.program.state_dict
                else self.program.constants.get(spec.target)
            )
            if kind == "PARAMETER" and tensor is not None and tensor.is_floating_point():
                if id(tensor) not in seen:
                    *path, key = map(_part, spec.target.split("."))
                    while (*path, key) in taken:
                        key += "_"
                    taken.add((*path, key))
                    seen[id(tensor)] = tuple(path), key
                    held.setdefault(tuple(path), {})[key] = _array(tensor)
                where[name] = seen[id(tensor)]
            elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR") and tensor is not None:
                array = _array(tensor)
                constants[name] = array.astype("float64") if array.dtype.kind == "f" else array
            else:
                raise UnsupportedTorchError(
                    f"from_torch: the module reads {name} ({kind}), which is no array"
                )
        self._hold(held)
        for node in self.program.graph.nodes:
            if node.op != "placeholder":
                continue
            if node.name in where:
                path, key = where[node.name]
                self._values[node] = Port(self._holders.get(path, self.model), key)
            elif node.name in constants:
                self._values[node] = constants[node.name]
            elif node.name in {
                getattr(s.arg, "name", "") for s in signature.input_specs if s.kind.name == "USER_INPUT"
            }:
                self._values[node] = self._input(node)

    def _input(self, node: Any) -> Any:
        value = node.meta.get("val")
        if not hasattr(value, "shape"):
            return value  # a number or None, which the trace has written in
        key = _part(node.name)
        while key in self.model.wires or key == "output" or key.startswith("output_"):
            key += "_in"
        return self.model.add_input(key, tuple(_size(n) for n in value.shape), kind_of(value))

    def _hold(self, held: Mapping[tuple[str, ...], Mapping[str, np.ndarray[Any, Any]]]) -> None:
        """A model of nothing but parameters for each module that has some, nested as the modules are."""
        tree: dict[tuple[str, ...], Model] = {(): self.model}
        for path in held:
            for i in range(1, len(path) + 1):
                if path[:i] not in tree:
                    tree[path[:i]] = Model()
        for path, arrays in held.items():
            at = self.params
            for part in path:
                at = at.setdefault(part, {})
            for key, array in arrays.items():
                tree[path].add_parameter(key, array.shape, Given(array))
                at[key] = array
        for path in sorted(tree, key=len, reverse=True):  # a model is finished before it is put in another
            if path:
                tree[path[:-1]].add(tree[path], path[-1])
        self._holders = tree

    # ---- what is computed -----------------------------------------------------------------------------------

    def _run(self, node: Any) -> None:
        from torch.fx.node import map_arg

        def value(given: Any) -> Any:
            if given not in self._values:
                return given.meta.get("val")  # a size
            return self._values[given]

        args = map_arg(node.args, value)
        keywords = map_arg(node.kwargs, value)
        if _is_getitem(node):
            self._values[node] = args[0][args[1]]
            if self._values[node] is None and node.users:
                raise UnsupportedTorchError(
                    f"from_torch: result {args[1]} of {_name(node.args[0])} in {_place(node)} has no counterpart"
                )
            return
        entry = _entry(node)
        assert entry is not None
        try:
            self._values[node] = entry(Step(self.model, node), *args, **keywords)
        except Refused as error:
            raise UnsupportedTorchError(f"from_torch: {_name(node)} in {_place(node)}: {error}") from None

    def _outputs(self) -> None:
        node = next(n for n in self.program.graph.nodes if n.op == "output")
        specs = [s for s in self.program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
        changed = [s.target for s in self.program.graph_signature.output_specs if "MUTATION" in s.kind.name]
        if changed:
            raise UnsupportedTorchError(
                f"from_torch: the module changes {', '.join(map(str, changed))} in place"
            )
        by_name = {n.name: n for n in self.program.graph.nodes}
        names = [s.arg.name for s in specs if getattr(s.arg, "name", None) in by_name]
        if not names:
            raise UnsupportedTorchError(f"from_torch: the module returns no array ({node.args!r:.80})")
        keys = ["output"] if len(names) == 1 else [f"output_{i}" for i in range(len(names))]
        for key, name in zip(keys, names, strict=True):
            value = self._values[by_name[name]]
            block = Buffer() if isinstance(value, Port) else ToTensor()
            self.model.add(block, input=value, output=key)
        self.model.expose(*keys)


def _size(size: Any) -> int | None:
    return size if isinstance(size, int) else None


def kind_of(tensor: Any) -> str:
    """The kind of a traced tensor."""
    import torch

    if tensor.dtype == torch.bool:
        return "bool"
    if tensor.is_complex():
        raise UnsupportedTorchError("from_torch: complex numbers have no counterpart in compose")
    return "float" if tensor.is_floating_point() else "int"


class Step:
    """One operation of the trace, as the functions of the table see it."""

    def __init__(self, model: Model, node: Any) -> None:
        self.model = model
        self.node = node

    def put(self, block: Any, **ports: Any) -> Port:
        """Add a block; its (first) output."""
        self.model.add(block, **ports)
        return Port(block, block.output_keys[0])

    def all(self, block: Any, **ports: Any) -> tuple[Port, ...]:
        """Add a block; all of its outputs."""
        self.model.add(block, **ports)
        return tuple(Port(block, key) for key in block.output_keys)

    @property
    def result(self) -> Any:
        """The traced result: its shape and dtype (of several: the first)."""
        value = self.node.meta["val"]
        return value[0] if isinstance(value, tuple | list) else value

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Of the result; None where a size is left open."""
        return tuple(_size(n) for n in self.result.shape)

    @property
    def kind(self) -> str:
        return kind_of(self.result)

    def given(self, i: int = 0) -> Any:
        """The traced argument ``i``: a tensor without values, or what was written."""
        arg = self.node.args[i]
        return arg.meta["val"] if hasattr(arg, "meta") else arg

    def cast(self, i: int, value: Any, kind: str | None = None) -> Any:
        """Argument ``i`` in the kind of the result (or ``kind``), as torch promotes it."""
        return self.turned(value, self.kind_at(i), kind or self.kind)

    def kind_at(self, i: int) -> str | None:
        """The kind of argument ``i``."""
        given = self.given(i)
        if hasattr(given, "dtype"):
            return kind_of(given)
        return "bool" if isinstance(given, bool) else "float" if isinstance(given, float) else "int"

    def turned(self, value: Any, have: str | None, want: str) -> Any:
        from capibara.compose import primitives as p

        if have == want or not isinstance(value, Port):
            return _number(value, want)
        if want == "float":  # in the compute dtype, whatever that will be
            if have == "bool":
                return self.put(p.Where(), cond=value, input1=1.0, input2=0.0)
            return self.put(p.Divide(), left=value, right=1)
        return self.put(p.Cast("int32" if want == "int" else "bool"), input=value)


def _number(value: Any, want: str) -> Any:
    make = {"float": float, "int": int, "bool": bool}[want]
    if isinstance(value, np.ndarray):
        return value.astype({"float": "float64", "int": "int64", "bool": "bool"}[want])
    return make(value) if isinstance(value, bool | int | float) else value
