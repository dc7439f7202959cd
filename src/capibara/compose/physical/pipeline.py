"""From a logical model to a compiled one: constants, parameters, discarded outputs; then the source.

The logical model is not changed: everything that :func:`compile` adds to it is undone once the source is written
(:func:`capibara.compose.logical.trail.what_if`).
"""

from __future__ import annotations

import functools
import importlib
import linecache
import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from capibara.compose.errors import CompileError, KindError
from capibara.compose.logical.block import Primitive
from capibara.compose.logical.model import Block, Model, Placement
from capibara.compose.logical.regions import Repeat
from capibara.compose.logical.shapes import MAX_SIZE
from capibara.compose.logical.trail import building_alone, what_if
from capibara.compose.logical.values import settle_numbers
from capibara.compose.physical.codegen import generate, module_source
from capibara.compose.physical.compile_keys import Keys
from capibara.compose.physical.compiled import CompiledModel, Program
from capibara.compose.physical.graph import Graph, Node, flatten
from capibara.compose.physical.passes import fan_out, join, optimise
from capibara.compose.physical.registered import check_registered, functions_of
from capibara.compose.physical.sizes import resolve_sizes
from capibara.compose.physical.specs import ModelSpecs

__all__ = ["compile"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _one_at_a_time(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """A model is added to while it is compiled, and put back after: two threads must not do that to one model."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with building_alone:
            return function(*args, **kwargs)

    return run


@_one_at_a_time
def compile(
    model: Block,
    backend: Any = None,
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

    A key is a name in the model (``"input"``), the dotted path of something inside it (``"layer_0.weight"``), or a
    port (``linear.weight``).

    Args:
        model: the model. It is not changed, and can be compiled again with other options.
        backend: where and in which precision to run; by default float32 on JAX's default device.
        shapes: sizes of inputs, ``{"input": [32, 128]}``, and of parameters, ``{"layer_0.weight": [128, 64]}``, also
            those of a ``TrainModel`` (``"model.layer_0.weight"``); None in a shape leaves that size free.
        constant_keys: inputs with a fixed value: a scalar, nested lists or an array. They are not inputs of the
            compiled model, and what depends on them alone is computed during compilation. Float arrays get the
            compute dtype.
        data_keys: parameters that become inputs of the compiled model instead, without gradients; existing inputs are
            accepted and unchanged.
        trainable_keys: float inputs that become parameters of the compiled model instead; they are initialised from a
            normal distribution with standard deviation 0.02 (see ``init`` of :meth:`CompiledModel.randomize_params`).
        discard_keys: outputs to drop, together with the inputs and parameters that only they need.
        inference: the model will not be trained: no gradients, dropout does nothing, ``train=True`` is refused.
        jit: compile ``evaluate`` with ``jax.jit``; by default the backend's setting.
        file_path: also write the generated source to this file, which can be imported and run on its own.
        verbose: print :meth:`CompiledModel.summary`: the inferred shapes, and what was simplified.
        safe_shapes: compare the shapes of arguments with the inferred ones when the model is called. False leaves
            that to the operations.
        safe_names: refuse a model with unnamed inputs. False makes them inputs named by their path
            (``linear_input``).
        use_short_namings: name values in the source by the last three names of their path in the model; False uses
            the whole path.

    Raises:
        UnconnectedError, CycleError, ShapeError, KindError: the model is invalid; the message says where.
        CompileError: the arguments are invalid.
    """
    _check_flags(
        inference=inference,
        verbose=verbose,
        safe_shapes=safe_shapes,
        safe_names=safe_names,
        use_short_namings=use_short_namings,
        **({} if jit is None else {"jit": jit}),
    )
    file_path = _target(file_path)
    whole = _whole(model)
    backend = _backend(backend)
    if not isinstance(shapes, Mapping | None):
        raise CompileError(
            f"shapes={shapes!r} must be a dict of shapes by input, such as {{'input': [32, 128]}}"
        )
    whole._finish()
    with what_if():
        keys = Keys(whole, backend.policy.compute)
        discarded = keys.outputs(discard_keys)
        keys.data(data_keys)
        keys.trainable(trainable_keys)
        keys.shapes(shapes or {})
        keys.constants(constant_keys)
        graph = flatten(whole, extra_inputs=keys.extra, safe_names=safe_names, moved=keys.moved)
        if discarded:
            _discard(graph, discarded)
        wires = [w for node in graph.walk() for w in node.inputs]
        settle_numbers([*wires, *graph.outputs.values(), *graph.next_states.values()], backend.policy.compute)
        resolve_sizes(graph)
        _check_elements(graph)
        check_registered(graph, backend)
        _check_powers(graph)
        specs = ModelSpecs(graph, backend.policy)
        _check_axes(backend, specs)
        # Module paths are looked up, not assumed: a backend says which operations its source calls.
        ops_module = getattr(backend, "ops_module", "capibara.compose.backends.jax_ops")
        before = sum(1 for _ in graph.walk())
        effects = optimise(graph, backend.policy, inference=inference, run=_folder(backend, ops_module))
        after = sum(1 for _ in graph.walk())
        if not inference:
            _fan_out(graph, backend)
            _join(graph, backend)
        modes = {
            id(node.block): _mode(node, backend) for node in graph.walk() if isinstance(node.block, Repeat)
        }
        functions, constants = generate(
            graph,
            backend.policy,
            modes,
            inference=inference,
            short=use_short_namings,
            backward=getattr(backend, "is_manualgrad", False) and not inference,
            sharded=getattr(backend, "mesh", None) is not None or getattr(backend, "type", "jax") == "jax",
            in_place=getattr(backend, "type", "jax") == "jax",
        )
        parts = _parts(graph, backend)
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
        functions=functions_of(graph),
        left_out=tuple(graph.left_out),
        parts=parts,
    )
    compiled = backend.compiled_class()(whole, backend, program, file_path)
    _forget_lines(compiled)
    if verbose:
        compiled.summary()
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


def _check_powers(graph: Graph) -> None:
    """Integers have no negative powers: each backend would say or do something else."""
    for node in graph.walk():
        if getattr(node.block, "op", "") != "power" or node.outputs[0].find().kind.find().value != "int":
            continue
        exponent = node.inputs[1].find().constant
        if isinstance(exponent, int | list | tuple | np.ndarray) and np.any(np.less(exponent, 0)):
            raise KindError(
                f"{node.label}: integers to the power of {exponent!r:.40} are not whole: make the base a float "
                "with Cast('float32')"
            )


def _check_elements(graph: Graph) -> None:
    """No array is larger than any machine: XLA ends the process where a number of elements overflows."""

    def check(place: str, wire: Any) -> None:
        sizes = wire.find().shape.known
        if sizes and math.prod(n for n in sizes if n) > MAX_SIZE and 0 not in sizes:
            raise CompileError(f"{place} has shape {sizes}: an array has at most 2**48 elements")

    for key, wire in graph.inputs.items():
        check(f"the input {key!r}", wire)
    for path, leaf in (*graph.params.items(), *graph.states.items()):
        check(f"the parameter or state {'.'.join(path)!r}", leaf.wire)
    for node in graph.walk():
        for key, wire in zip(node.block.output_keys, node.outputs, strict=True):
            check(f"{node.label}.{key}", wire)


def _check_flags(**flags: Any) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise CompileError(f"{name}={value!r} must be True or False")


def _forget_lines(compiled: CompiledModel) -> None:
    """The source that tracebacks show goes when the model does; that of a file stays as it is in the file."""
    name = compiled.function.__code__.co_filename
    if name.startswith("<"):
        weakref.finalize(compiled, linecache.cache.pop, name, None).atexit = False


def _target(path: Any) -> Path | None:
    """Where the source is to be written, checked before anything is compiled."""
    if path is None:
        return None
    try:
        found = Path(os.fsdecode(path))
        if "\0" in str(found):
            raise ValueError("it holds a null character")
        if found.name and found.parent.is_dir() and not found.is_dir():
            return found
        why = "is a folder" if found.is_dir() else f"there is no folder {str(found.parent)!r}"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise CompileError(f"file_path={path!r:.200} must be a file in a folder that exists: {why}")


def title_of(model: Block) -> str:
    """The model's title in the source: its class, also for a model read from JSON."""
    return vars(model).get("title") or type(model).__name__


def _whole(model: Any) -> Model:
    if isinstance(model, Placement):
        raise CompileError(
            "model is a block called with its connections: compile a Model to which it was added"
        )
    if not isinstance(model, Block):
        raise CompileError(f"model={model!r} is not a model: pass a capibara.compose Model")
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


def _mode(node: Node, backend: Any) -> str:
    if getattr(backend, "type", "jax") != "jax":
        return "unroll"  # there is no loop to compile
    from capibara.compose.backends.jax_repeat import choose_mode

    block = node.block
    assert isinstance(block, Repeat)
    decodes = node.region is not None and any(inner.block.decodes for inner in node.region.walk())
    return choose_mode(block.mode, block.count, backend.platform, decodes=decodes)


def _fan_out(graph: Graph, backend: Any) -> None:
    """Mark what several products read, where the backend's mesh may divide their results."""
    mesh = getattr(backend, "mesh", None)
    if mesh is None or mesh.size == 1 or any(node.block.decodes for node in graph.walk()):
        return
    rules = backend.rules

    def where(axis: str) -> Any:
        entry = rules.spec((axis,), mesh, kind="activations")[0]
        axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        return axes if any(mesh.shape[name] > 1 for name in axes) else None

    fan_out(graph, where)


def _join(graph: Graph, backend: Any) -> None:
    """Join operations that the backend has in one, where no mesh divides them."""
    mesh = getattr(backend, "mesh", None)
    if getattr(backend, "type", "jax") == "jax" and (mesh is None or mesh.size == 1):
        join(graph)


def _parts(graph: Graph, backend: Any) -> tuple[str, ...]:
    mesh = getattr(backend, "mesh", None)
    if mesh is None or mesh.size == 1:
        return ()
    from capibara.compose.backends.jax_parts import describe

    return describe(graph, mesh, backend.rules)


def _discard(graph: Graph, names: Iterable[str]) -> None:
    """Leave outputs out, and what only they needed."""

    def used() -> set[int]:
        wires = [w for n in graph.nodes for w in n.inputs]
        return {id(w) for w in (*wires, *graph.outputs.values(), *graph.next_states.values())}

    from capibara.compose.physical.passes import remove_dead

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
        graph.left_out.append(path)


def _folder(backend: Any, ops_module: str) -> Any:
    """Doing one operation on constants with the backend's own operations."""
    ops = importlib.import_module(ops_module)
    in_jax = ops_module.rpartition(".")[2].startswith("jax")

    def run(block: Primitive, arguments: list[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
        function = getattr(ops, block.op, None)
        if (
            function is None or block.registered
        ):  # a user's own, perhaps under the name of one of the library's
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
