"""From a logical model to a compiled one: what is fixed, what is trained, what is left out; then the source.

The logical model is not changed: everything that :func:`compile` adds to what is known of it is taken back when the
source is written (:func:`capibara.compose.shapes.what_if`).
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from capibara.compose.block import Primitive
from capibara.compose.codegen import generate, module_source
from capibara.compose.compiled import CompiledModel, Program
from capibara.compose.errors import CompileError, KindError, ShapeError, WiringError
from capibara.compose.graph import Graph, flatten
from capibara.compose.initializers import Normal
from capibara.compose.model import Block, Model, Placement
from capibara.compose.passes import optimise
from capibara.compose.regions import Repeat
from capibara.compose.shapes import Dim, Rest, Shape, put, settle, what_if
from capibara.compose.specs import ModelSpecs
from capibara.compose.wires import Declaration, Wire, join
from capibara.errors import did_you_mean

__all__ = ["compile"]

_DTYPES = {"int": "int32", "bool": "bool"}


def compile(
    model: Block,
    backend: Any | None = None,
    *,
    shapes: Mapping[Any, Any] | None = None,
    constant_keys: Mapping[Any, Any] | None = None,
    data_keys: Iterable[Any] = (),
    trainable_keys: Iterable[Any] = (),
    discard_keys: Iterable[Any] = (),
    inference: bool = False,
    jit: bool | None = None,
    file_path: str | os.PathLike[str] | None = None,
    verbose: bool = False,
    safe_shapes: bool = True,
    safe_names: bool = True,
    use_short_namings: bool = True,
) -> CompiledModel:
    """Compile a logical model to one pure function.

    A key is a name in the model (``"input"``), the dotted place of something inside it (``"layer_0.weight"``), or
    a port (``linear.weight``).

    Args:
        model: the model. It is not changed, and can be compiled again in other ways.
        backend: where and in which precision to run; by default float32 on JAX's default device.
        shapes: sizes of inputs, ``{"input": [32, 128]}``; None in a shape leaves that size free.
        constant_keys: inputs with the value that they always have: a number, nested lists or an array. They are no
            inputs of the compiled model, and what follows from them alone is computed now. Float arrays get the
            compute dtype.
        data_keys: parameters that are inputs of the compiled model instead, without gradients; naming what is an
            input anyway changes nothing.
        trainable_keys: float inputs that are parameters of the compiled model instead; they start from a normal
            distribution with standard deviation 0.02 (see ``init`` of :meth:`CompiledModel.randomize_params`).
        discard_keys: outputs that are left out, and with them the inputs and parameters that only they need.
        inference: the model will not be trained: no gradients, dropout does nothing, ``train=True`` is refused.
        jit: compile ``evaluate`` with ``jax.jit``; by default as the backend says.
        file_path: also write the generated source to this file; it can be imported and run by itself.
        verbose: print :meth:`CompiledModel.summary`: the inferred shapes, and what was simplified.
        safe_shapes: compare the shapes of arguments with the inferred ones when the model is called. False leaves
            that to the operations.
        safe_names: refuse a model with inputs that nobody named. False makes them inputs, named by their place
            (``linear_input``).
        use_short_namings: name values in the source by the last three names of their place in the model; False
            uses all of them.

    Raises:
        UnconnectedError, CycleError, ShapeError, KindError: the model is wrong, and where.
        CompileError: the arguments are wrong.
    """
    _check_flags(
        inference=inference,
        verbose=verbose,
        safe_shapes=safe_shapes,
        safe_names=safe_names,
        use_short_namings=use_short_namings,
    )
    whole = _whole(model)
    backend = _backend(backend)
    if not isinstance(shapes, Mapping | None):
        raise CompileError(
            f"shapes={shapes!r} must be a dict of shapes by input, such as {{'input': [32, 128]}}"
        )
    whole._finish()
    with what_if():
        keys = _Keys(whole, backend.policy.compute)
        discarded = keys.outputs(discard_keys)
        keys.data(data_keys)
        keys.trainable(trainable_keys)
        keys.shapes(shapes or {})
        keys.constants(constant_keys)
        graph = flatten(whole, extra_inputs=keys.extra, safe_names=safe_names)
        if discarded:
            _discard(graph, discarded)
        specs = ModelSpecs(graph, backend.policy)
        _check_axes(backend, specs)
        # Module paths are looked up, not assumed: a backend says which operations its source calls.
        ops_module = getattr(backend, "ops_module", "capibara.compose.backends.jax_ops")
        before = sum(1 for _ in graph.walk())
        effects = optimise(graph, backend.policy, inference=inference, run=_folder(backend, ops_module))
        modes = {
            id(node.block): _mode(node.block, backend)
            for node in graph.walk()
            if isinstance(node.block, Repeat)
        }
        functions, constants = generate(
            graph,
            backend.policy,
            modes,
            inference=inference,
            short=use_short_namings,
            backward=getattr(backend, "is_manualgrad", False) and not inference,
            sharded=getattr(backend, "mesh", None) is not None or getattr(backend, "type", "jax") == "jax",
        )
        after = sum(1 for _ in graph.walk())
    program = Program(
        source=module_source(
            functions, constants, ops_module, f"Generated by capibara.compose from {title_of(whole)}."
        ),
        constants=constants,
        specs=specs,
        jit=backend.jit_default if jit is None else jit,
        inference=inference,
        check_shapes=safe_shapes,
        effects={"operations": before, **effects, "left": after},
        fixed=tuple(keys.fixed),
    )
    compiled = backend.compiled_class()(whole, backend, program, file_path)
    if verbose:
        print(compiled.summary())
    return compiled


def _check_axes(backend: Any, specs: ModelSpecs) -> None:
    """Let a backend that lays arrays over meshes look at the logical axis names of all that goes in or out."""
    if not hasattr(backend, "check_axes"):
        return
    groups = {
        "input": specs.inputs,
        "output": specs.outputs,
        "parameter": specs.params,
        "state": specs.states,
    }
    backend.check_axes(
        {
            f"{what} {('.'.join(key) if isinstance(key, tuple) else key)!r}": spec.axes
            for what, group in groups.items()
            for key, spec in group.items()
        }
    )


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise CompileError(f"{name}={value!r} must be True or False")


def title_of(model: Block) -> str:
    """What the source says that it was made from: the model's class, also of a model read from JSON."""
    return vars(model).get("title") or type(model).__name__


def _whole(model: Any) -> Model:
    if isinstance(model, Placement):
        raise CompileError(
            "model is a block called with its connections: compile a Model to which it was added"
        )
    if not isinstance(model, Block):
        raise CompileError(f"model={model!r} is no model: pass a capibara.compose Model")
    if model.parent is not None:
        raise CompileError(f"{model.label} is part of {model.parent.label}: compile that one")
    if isinstance(model, Model):
        return model
    whole = Model()
    whole.add(model, **{k: k for k in (*model.input_keys, *model.output_keys)})
    whole.expose(*model.output_keys)
    model.parent = None  # the wrapper is only for this call
    model.child_name = None
    return whole


def _backend(backend: Any) -> Any:
    from capibara.compose.backends.jax_backend import JaxBackend

    if backend is None:
        return JaxBackend()
    if not hasattr(backend, "policy"):
        raise CompileError(f"backend={backend!r} must be a JaxBackend, such as JaxBackend(device='cpu')")
    return backend


def _mode(block: Repeat, backend: Any) -> str:
    if getattr(backend, "type", "jax") != "jax":
        return "unroll"  # there is no loop to compile
    from capibara.compose.backends.jax_repeat import choose_mode

    return choose_mode(block.mode, block.count, backend.platform)


@dataclass
class _Found:
    name: str
    wire: Wire


class _Keys:
    """What the arguments of ``compile`` say of single values, put into the model until the what-if ends."""

    def __init__(self, model: Model, compute: str) -> None:
        self.model = model
        self.compute = compute
        self.extra: dict[str, Wire] = {}
        self.fixed: list[str] = []
        self._used: dict[int, str] = {}

    def _find(self, argument: str, key: Any) -> _Found:
        model = self.model
        if isinstance(key, str):
            if key in model.wires:
                return _Found(key, model.wires[key].find())
            block: Any = model
            *path, last = key.split(".")
            for name in path:
                block = next((c.block for c in getattr(block, "children", ()) if c.name == name), None)
            if path and block is not None and last in block.wires:
                return _Found(key.replace(".", "_"), block.wires[last].find())
            there = list(model.wires)
            raise CompileError(
                f"{argument} names {key!r}, which is nothing in {model.label}; its connections are {there[:20]}."
                f"{did_you_mean(key, there)}"
            )
        wire = getattr(key, "wire", None)
        if not isinstance(wire, Wire):
            raise CompileError(
                f"{argument} names {key!r}: give a name, a dotted place or a port of the model"
            )
        root = wire.find()
        name = next((k for k, w in model.wires.items() if w.find() is root), None)
        return _Found(name or str(getattr(key, "key", "value")), root)

    def _input(self, argument: str, key: Any, what: str = "input", role: str | None = None) -> _Found:
        found = self._find(argument, key)
        if found.wire.role != role or found.wire.producer is not None:
            there = self.model.input_keys
            hint = did_you_mean(str(key), there) if isinstance(key, str) else ""
            raise CompileError(f"{argument} names {key!r}, which is no {what}; the inputs are {there}.{hint}")
        return found

    def _claim(self, argument: str, key: Any, found: _Found) -> None:
        other = self._used.setdefault(id(found.wire), argument)
        if other != argument:
            raise CompileError(f"{key!r} stands in both {other} and {argument}: it can be one of them only")

    def outputs(self, keys: Any) -> list[str]:
        names = self.model.output_keys
        found = []
        for key in _listed("discard_keys", keys):
            wire = getattr(key, "wire", None)
            name = next(
                (n for n in names if isinstance(wire, Wire) and self.model.wires[n].find() is wire.find()),
                key,
            )
            if name not in names:
                raise CompileError(
                    f"discard_keys names {key!r}, which is no output; the outputs are {names}."
                    f"{did_you_mean(str(key), names)}"
                )
            found.append(name)
        if found and set(found) == set(names):
            raise CompileError(f"discard_keys names every output ({', '.join(names)}): nothing would be left")
        return found

    def data(self, keys: Any) -> None:
        for key in _listed("data_keys", keys):
            found = self._find("data_keys", key)
            if found.wire.producer is not None or found.wire.role not in (None, "param"):
                raise CompileError(f"data_keys names {key!r}, which is neither an input nor a parameter")
            self._claim("data_keys", key, found)
            if found.wire.role == "param":
                assert found.wire.declaration is not None
                for dim, axis in zip(
                    found.wire.shape.dims() or (), found.wire.declaration.axes, strict=False
                ):
                    if axis is not None and dim.axis is None:
                        put(dim, "axis", axis)
                put(found.wire, "role", None)
                put(found.wire, "declaration", None)
                if self.model.wires.get(found.name, found.wire).find() is not found.wire:
                    raise CompileError(f"data_keys: {found.name!r} is already the name of something else")
                if found.name not in self.model.wires:
                    self.extra[found.name] = found.wire

    def trainable(self, keys: Any) -> None:
        for key in _listed("trainable_keys", keys):
            found = self._find("trainable_keys", key)
            if found.wire.role == "param":
                continue
            found = self._input("trainable_keys", key)
            self._claim("trainable_keys", key, found)
            param = Wire(Shape([Rest()]), "float", "param")
            dims = found.wire.shape.dims()
            axes = () if dims is None else tuple(d.axis for d in dims)
            param.declaration = Declaration(found.name, Normal(0.02), axes=axes)
            self._join("trainable_keys", key, found, param)
            if found.name not in self.model.wires:
                raise CompileError(f"trainable_keys names {key!r}: give it a name in the model first")

    def shapes(self, shapes: Mapping[Any, Any]) -> None:
        for key, spec in shapes.items():
            if isinstance(key, str) and key not in self.model.input_keys and key not in self.extra:
                names = self.model.input_keys
                if key not in self.model.wires or self.model.wires[key].find().role != "param":
                    raise CompileError(
                        f"shapes names {key!r}, which is no input; the inputs are {names}.{did_you_mean(key, names)}"
                    )
            found = self._find("shapes", key) if key not in self.extra else _Found(key, self.extra[key])
            try:
                if found.name in self.model.wires:
                    self.model.set_shapes(**{found.name: spec})
                else:
                    join(found.wire, Wire(self.model._shape(spec)))
                    settle()
            except ShapeError as error:
                raise ShapeError(f"shapes[{key!r}]: {error}") from None

    def constants(self, values: Any) -> None:
        if values is None:
            return
        if not isinstance(values, Mapping):
            raise CompileError(f"constant_keys={values!r} must be a dict of values by input")
        for key, value in values.items():
            found = self._input("constant_keys", key)
            self._claim("constant_keys", key, found)
            self._join("constant_keys", key, found, self._constant(key, value, found))
            self.fixed.append(found.name)

    def _constant(self, key: Any, value: Any, found: _Found) -> Wire:
        kind = found.wire.kind.find().value
        if isinstance(value, bool | int | float):
            own = "bool" if isinstance(value, bool) else "float" if isinstance(value, float) else kind
            wire = Wire(Shape(), own, "constant")
            wire.constant = value
            return wire
        try:
            data = np.asarray(value)
        except (TypeError, ValueError) as error:
            raise CompileError(f"constant_keys[{key!r}] is no array: {error}") from None
        letter = "f" if "float" in data.dtype.name else data.dtype.kind
        own = {"f": "float", "i": "int", "u": "int", "b": "bool"}.get(letter)
        if own is None:
            raise CompileError(
                f"constant_keys[{key!r}] is {type(value).__name__} of dtype {data.dtype}: give a number, nested lists "
                "of numbers or an array"
            )
        if own == "float":
            data = data.astype(_numpy_dtype(self.compute))
        elif own == "int" and not isinstance(value, np.ndarray) and not hasattr(value, "dtype"):
            if data.size and (data.min() < -(2**31) or data.max() >= 2**31):
                raise CompileError(f"constant_keys[{key!r}] has numbers that do not fit an int32")
            data = data.astype("int32")
        wire = Wire(Shape(Dim(int(n)) for n in data.shape), own, "constant")
        wire.constant = data
        return wire

    def _join(self, argument: str, key: Any, found: _Found, wire: Wire) -> None:
        try:
            join(found.wire, wire)
            settle()
        except (ShapeError, KindError, WiringError) as error:
            text = f"{argument}: {key!r} has shape {found.wire.find().shape}, and {error}"
            raise type(error)(text) from None


def _numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


def _listed(argument: str, keys: Any) -> list[Any]:
    # A Port is a tuple, and is one key.
    if keys is None:
        return []
    if isinstance(keys, str) or hasattr(keys, "wire"):
        return [keys]
    if isinstance(keys, Mapping) or not isinstance(keys, Iterable):
        raise CompileError(f"{argument}={keys!r} must be a set of keys")
    return list(keys)


def _discard(graph: Graph, names: Iterable[str]) -> None:
    """Leave outputs out, and what only they needed."""

    def used() -> set[int]:
        wires = [w for n in graph.nodes for w in n.inputs]
        return {id(w) for w in (*wires, *graph.outputs.values(), *graph.next_states.values())}

    from capibara.compose.passes import remove_dead

    before = used()
    regions = {n.path for n in graph.nodes if n.region is not None}
    for name in names:
        del graph.outputs[name]
    remove_dead(graph)
    gone = before - used()
    gone_regions = regions - {n.path for n in graph.nodes if n.region is not None}
    for key in [k for k, w in graph.inputs.items() if id(w) in gone]:
        del graph.inputs[key]
    for path in [
        p
        for p, leaf in graph.params.items()
        if id(leaf.wire) in gone or any(p[:i] in gone_regions for i in range(len(p)))
    ]:
        del graph.params[path]


def _folder(backend: Any, ops_module: str) -> Any:
    """Doing one operation on constants with the backend's own operations."""
    ops = importlib.import_module(ops_module)
    in_jax = ops_module.rpartition(".")[2].startswith("jax")

    def run(block: Primitive, arguments: list[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
        function = getattr(ops, block.op, None)
        if function is None:
            return None
        numbers = all(isinstance(a, bool | int | float) for a in arguments)
        try:
            if in_jax:
                import jax

                with jax.ensure_compile_time_eval(), backend.scope():
                    results = jax.block_until_ready(function(*arguments, **named))
            else:
                results = function(*arguments, **named)
        except Exception:
            # Left as it is: what is wrong with it is said when the model runs, as it would be without folding.
            return None
        row = results if isinstance(results, tuple) else (results,)
        plain = tuple(_plain(value, numbers) for value in row)
        return None if any(value is None for value in plain) else plain

    return run


def _plain(value: Any, numbers: bool) -> Any:
    """A result as a Python number (where the operation's dtype follows what it meets) or a NumPy array."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":
            return None
        value = value.numpy()
    data = np.asarray(value)
    weak = getattr(value, "weak_type", numbers)
    return data.item() if weak and data.ndim == 0 else data
