"""PyTorch modules as composed models, with their weights.

``torch.export`` traces a module with example inputs and decomposes it to PyTorch's core operations. Each of them has
a function in :mod:`.from_torch_operations` that adds equivalent primitives to a model. The trace fixes everything
that does not depend on input values: Python branches, and every size that ``dynamic_shapes`` does not leave open.

Parameters keep torch's names: ``encoder.layers.0.linear1.weight`` is
``params["encoder"]["layers"]["item_0"]["linear1"]["weight"]``. A part that does not begin with a letter is prefixed
with ``item_``, and invalid characters become ``_``. Buffers (the statistics of a batch normalisation, tables) are
constants of the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from capibara.compose.errors import KindError, ShapeError, WiringError
from capibara.compose.initializers import Given
from capibara.compose.interchange.from_torch_recurrent import RECURRENT, Blank
from capibara.compose.interchange.from_torch_sizes import OpenSizes, Refused
from capibara.compose.interchange.from_torch_step import Step, UnsupportedTorchError, kind_of
from capibara.compose.interchange.from_torch_trace import (
    entry_of,
    is_getitem,
    is_size,
    name_of,
    place_of,
    trace,
)
from capibara.compose.logical.connections import Port
from capibara.compose.logical.model import Model
from capibara.compose.primitives import Buffer, ToTensor
from capibara.errors import MissingExtraError

__all__ = ["Imported", "UnsupportedTorchError", "from_torch"]


@dataclass(frozen=True)
class Imported:
    """A model imported from a torch module.

    Attributes:
        model: to be compiled or connected. Its inputs have the names of ``forward``'s parameters, its outputs are
            ``output``, or ``output_0``, ``output_1`` … if the module returns several.
        params: the weights as NumPy arrays, nested as in the compiled model.
        state: with ``training=True`` the initial running statistics, such as ``layers_0_norm_running_mean``;
            otherwise empty, since they are constants.
    """

    model: Model
    params: dict[str, Any]
    state: dict[str, Any] = field(default_factory=dict)


def from_torch(
    module: Any,
    example_inputs: tuple[Any, ...],
    example_keywords: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    training: bool = False,
) -> Imported:
    """Convert a torch module in evaluation mode, and its weights, to a composed model.

    Equivalent torch: ``torch.export.export(module.eval(), example_inputs, …).run_decompositions()``. The module is
    not changed. Dtypes are those of the compiled model: floats are computed in the backend's dtype, integers
    as int32. A parameter with several names in the module is one parameter, under one of them.

    Args:
        module: a ``torch.nn.Module``.
        example_inputs: tensors to call it with. Their sizes become the model's unless left open.
        example_keywords: the same for arguments by name.
        dynamic_shapes: as ``torch.export.export`` takes it: ``({0: torch.export.Dim("batch")},)`` leaves the first
            size of the first input open.
        training: trace the module in training mode, for a model that trains like it: with ``train=True`` its dropout
            is active, and its batch normalisations use the batch and update their running statistics, which are then
            states; otherwise both behave as in evaluation. Python branches on ``self.training`` are those of
            training.

    Raises:
        MissingExtraError: torch is not installed.
        UnsupportedTorchError: operations without a counterpart, all of them, the modules that use them and the
            lines of code that call them; or ``forward`` changes other buffers than running statistics.
        WiringError: ``module`` is not a module, or ``torch.export`` cannot trace it.
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
    if not isinstance(training, bool):
        raise WiringError(f"training={training!r} must be True or False")
    return _Importer(trace(module, example_inputs, example_keywords, dynamic_shapes, training)).imported()


def _part(name: str) -> str:
    """One part of a torch name as an identifier."""
    name = re.sub(r"[^A-Za-z0-9_]", "_", name)
    return name if name[:1].isalpha() else f"item_{name}"


def _array(tensor: Any) -> np.ndarray[Any, Any]:
    """A copy; bfloat16, which NumPy lacks, as float32, which holds it exactly."""
    import torch

    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor).numpy().copy()


class _Importer:
    """A traced program on its way to a model."""

    def __init__(self, program: Any) -> None:
        self.program = program
        self.model = Model()
        self.params: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self._values: dict[Any, Any] = {}
        self._sizes = OpenSizes(self.model)
        self._holders: dict[tuple[str, ...], Model] = {}
        self._by_name = {n.name: n for n in program.graph.nodes}
        self._statistics = self._moving()
        self._updates: dict[str, Any] = {}
        self._nodes = self._needed()

    def imported(self) -> Imported:
        self._check()
        self._inputs()
        for node in self.program.graph.nodes:
            if node in self._nodes and node.op == "call_function" and not is_size(node):
                self._run(node)
        self._outputs()
        return Imported(self.model, self.params, self.state)

    def _moving(self) -> dict[str, Any]:
        """The running statistics that batch normalisation replaces, by name: what computes the new ones."""
        found, bad = {}, []
        for spec in self.program.graph_signature.output_specs:
            if "MUTATION" not in spec.kind.name:
                continue
            node = self._by_name[spec.arg.name]
            if is_getitem(node) and "_native_batch_norm_legit_functional" in name_of(node.args[0]):
                found[spec.target] = node
            elif not str(spec.target).endswith("num_batches_tracked"):  # a count that only torch reads
                bad.append(str(spec.target))
        if bad:
            raise UnsupportedTorchError(f"from_torch: the module changes {', '.join(bad)} in place")
        return found

    def _needed(self) -> set[Any]:
        """What outputs and statistics are computed from."""
        specs = self.program.graph_signature.output_specs
        row = [self._by_name.get(getattr(s.arg, "name", None)) for s in specs if s.kind.name == "USER_OUTPUT"]
        row = [node for node in (*row, *self._statistics.values()) if node is not None]
        seen: set[Any] = set(row)
        while row:
            for node in row.pop().all_input_nodes:
                if node not in seen:
                    seen.add(node)
                    row.append(node)
        return seen

    def _check(self) -> None:
        bad: dict[str, dict[str, None]] = {}
        for node in self._nodes:
            if node.op == "call_function" and not (is_size(node) or is_getitem(node) or entry_of(node)):
                bad.setdefault(name_of(node), {})[place_of(node)] = None
            elif node.op == "get_attr":
                bad.setdefault(f"get_attr {node.target}", {})[place_of(node)] = None
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
        used = {n.name for n in self._nodes if n.op == "placeholder"}
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
            elif spec.target in self._statistics and tensor is not None:
                constants[name] = self._statistic(spec.target, _array(tensor))
            elif kind in ("PARAMETER", "BUFFER", "CONSTANT_TENSOR") and tensor is not None:
                array = _array(tensor)
                constants[name] = array.astype("float64") if array.dtype.kind == "f" else array
            else:
                raise UnsupportedTorchError(
                    f"from_torch: the module reads {name} ({kind}), which is not an array"
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

    def _statistic(self, target: str, array: np.ndarray[Any, Any]) -> Port:
        key = "_".join(map(_part, target.split(".")))
        while key in self.model.wires:
            key += "_"
        self.state[key] = array
        port = self.model.add_state(key, array.shape, Given(array))
        self._updates[key] = self._statistics[target]
        return port

    def _input(self, node: Any) -> Any:
        value = node.meta.get("val")
        if not hasattr(value, "shape"):
            return value  # a number or None, which the trace has written in
        key = _part(node.name)
        while key in self.model.wires or key == "output" or key.startswith("output_"):
            key += "_in"
        port = self.model.add_input(key, self._sizes.dims(value.shape), kind_of(value))
        self._sizes.learn(port, value.shape)
        return port

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
        if is_getitem(node):
            self._values[node] = args[0][args[1]]
            if self._values[node] is None and node.users:
                raise UnsupportedTorchError(
                    f"from_torch: result {args[1]} of {name_of(node.args[0])} in {place_of(node)} has no counterpart"
                )
            return
        entry = entry_of(node)
        assert entry is not None
        try:
            if name_of(node).split("::")[1].split(".")[0] not in RECURRENT:
                args, keywords = _made((args, keywords))
            with self._sizes.nothing_assumed():
                self._values[node] = entry(Step(self.model, node, self._sizes), *args, **keywords)
        except (Refused, WiringError, ShapeError, KindError) as error:
            raise UnsupportedTorchError(f"from_torch: {name_of(node)} in {place_of(node)}: {error}") from None

    def _outputs(self) -> None:
        node = next(n for n in self.program.graph.nodes if n.op == "output")
        specs = [s for s in self.program.graph_signature.output_specs if s.kind.name == "USER_OUTPUT"]
        names = [s.arg.name for s in specs if getattr(s.arg, "name", None) in self._by_name]
        if not names:
            raise UnsupportedTorchError(f"from_torch: the module returns no array ({node.args!r:.80})")
        keys = ["output"] if len(names) == 1 else [f"output_{i}" for i in range(len(names))]
        for key, name in zip(keys, names, strict=True):
            value = self._values[self._by_name[name]]
            value = _made(value)
            block = Buffer() if isinstance(value, Port) else ToTensor()
            self.model.add(block, input=value, output=key)
        self.model.expose(*keys)
        for key, node in self._updates.items():
            self.model.update_state(key, self._values[node])


def _made(value: Any) -> Any:
    """Arguments with the arrays of one number that have been left unmade so far."""
    if isinstance(value, dict):
        return {k: _made(v) for k, v in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, Port):
        return type(value)(map(_made, value))
    return value.made() if isinstance(value, Blank) else value
