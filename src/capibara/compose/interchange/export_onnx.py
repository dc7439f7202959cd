"""Compiled models as ONNX files, for runtimes other than JAX and PyTorch.

An ONNX file contains a graph of operations and the weights. PyTorch writes it: the model is compiled for a
``TorchBackend`` (again, if it was compiled for another), its function is traced by ``torch.export``, and
``torch.onnx.export`` translates the trace. Dropout and similar operations behave as in evaluation. Sizes that the
model leaves open stay open, under their names.
"""

from __future__ import annotations

import builtins
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

from capibara.compose.errors import CompileError
from capibara.compose.interchange.onnx_parts import Path, flat, quiet, rename, tensors_of
from capibara.compose.logical.model import Model
from capibara.compose.physical.compiled import CompiledModel
from capibara.compose.physical.pipeline import compile
from capibara.compose.physical.specs import ArraySpec, nest
from capibara.errors import MissingExtraError
from capibara.files import replace_file

__all__ = ["export_onnx"]

MAX_BYTES = (1 << 31) - (1 << 20)
"""What one file of protocol buffers holds (2 GiB), less room for the graph."""

OPEN_SIZE = 64
"""Open sizes are traced at this and the even numbers after it: large enough for windows, and no two alike."""


def export_onnx(
    model: CompiledModel | Model,
    params: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    state: Mapping[str, Any] | None = None,
    opset: int | None = None,
    optimize: bool = True,
    **sizes: int,
) -> Any:
    """Write a model with its parameters as an ONNX file.

    Inputs and outputs have the model's keys, weights their dotted names (``layer_0.weight``). States that evaluation
    does not change, such as running statistics, are weights as well; others become inputs ``state.<name>`` and
    outputs ``next_state.<name>``.

    Equivalent torch: ``torch.onnx.export(module, inputs, path, dynamo=True)`` for a module that calls
    ``compiled.apply``.

    Args:
        model: a compiled model on any backend without a mesh, or a model, which is compiled with default options.
        params: its parameters, nested as in the model, as arrays of any of the three libraries.
        path: the file, written atomically. None: only return the graph.
        state: the state, for a model with states.
        opset: the ONNX opset version; by default torch's choice.
        optimize: let torch simplify the graph and precompute operations on weights: such weights lose their names.
        sizes: values for free sizes, by name; the others stay open.

    Returns:
        The ``onnx.ModelProto``. Integers are int32 in it, floats have the backend's compute dtype.

    Raises:
        MissingExtraError: torch, onnx or onnxscript is missing.
        InputError: parameters or states that are not the model's.
        CompileError: the model cannot be compiled for PyTorch, an input's rank is unknown, an operation has no
            counterpart in ONNX, a size cannot stay open, or the weights exceed the limit of one file (2 GiB).
    """
    for package in ("torch", "onnx", "onnxscript"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "onnx", "export_onnx")
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int) or opset < 1):
        raise CompileError(f"opset={opset!r} must be a version of ONNX' set of operations, such as 18")
    compiled = _in_torch(model)
    tensors = tensors_of(compiled, "parameter", params, compiled.params)
    states = tensors_of(compiled, "state", state, compiled.states)
    total = sum(t.numel() * t.element_size() for t in (*tensors.values(), *states.values()))
    if total > MAX_BYTES:
        raise CompileError(
            f"export_onnx: the weights have {total:,} bytes, and one ONNX file holds {MAX_BYTES:,}: compile the model "
            "for a narrower dtype, or export its parts"
        )
    job = _Job(compiled, tensors, states, sizes)
    proto = job.proto(opset, optimize)
    if path is not None:
        replace_file(path, proto.SerializeToString())
    return proto


def _in_torch(model: Any) -> CompiledModel:
    """The model compiled for PyTorch: as it is, or its logical model once more with what is known of its inputs."""
    from capibara.compose.backends.torch_backend import TorchBackend

    if isinstance(model, Model):
        return compile(model, TorchBackend(), inference=True, jit=False)
    if not isinstance(model, CompiledModel):
        raise CompileError(
            f"export_onnx: {model!r:.200} ({type(model).__name__}) is neither a compiled model nor a Model"
        )
    backend = model.backend
    if backend.type == "torch" and backend.device.type == "cpu":
        return model
    if getattr(backend, "mesh", None) is not None:
        raise CompileError(
            "export_onnx: the model is sharded over a mesh; compile it for a backend without one"
        )
    logical = model.model
    again = (
        "compile the model for TorchBackend() with the same arguments, and export that: "
        "export_onnx(ml.compile(model, ml.TorchBackend(), …), params)"
    )
    if model.fixed:
        raise CompileError(
            f"export_onnx: this model was compiled for {backend!r} with constant_keys for {', '.join(model.fixed)}; "
            + again
        )
    extra = [k for k in model.inputs if k not in logical.input_keys]
    trained = [p[0] for p in model.params if len(p) == 1 and p[0] in logical.input_keys]
    try:
        compiled = compile(
            logical,
            TorchBackend(policy=backend.policy),
            shapes={k: list(s.shape) for k, s in model.inputs.items() if s.shape is not None},
            data_keys=[k for k in extra if k in logical.wires],
            trainable_keys=trained,
            discard_keys=[k for k in logical.output_keys if k not in model.outputs],
            inference=True,
            jit=False,
        )
    except CompileError as error:
        raise CompileError(f"export_onnx: the model cannot be compiled for PyTorch: {error}") from error
    same = all(
        list(getattr(compiled, what)) == list(getattr(model, what))
        for what in ("inputs", "outputs", "params")
    )
    if not same:
        raise CompileError(f"export_onnx: this model was compiled for {backend!r} with other keys; {again}")
    return compiled


class _Job:
    """One export: what goes in, under which names, at which sizes it is traced."""

    def __init__(
        self,
        compiled: CompiledModel,
        params: dict[Path, Any],
        states: dict[Path, Any],
        sizes: Mapping[str, int],
    ) -> None:
        self.compiled = compiled
        self.params = params
        self.states = states
        specs = [*compiled.inputs.values(), *compiled.states.values()]
        free = dict.fromkeys(n for s in specs for n in s.shape or () if isinstance(n, str))
        for name, size in sizes.items():
            if name not in free:
                raise CompileError(
                    f"{name!r} is not a free size of the model; the free sizes are {list(free)}"
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise CompileError(f"{name}={size!r} must be an integer above 0")
        for path, spec in compiled.states.items():  # of arrays that are here, all sizes are known
            for name, size in zip(spec.shape or (), states[path].shape, strict=True):
                if isinstance(name, str) and sizes.get(name, size) == size:
                    sizes = {**sizes, name: int(size)}
        self.open = [n for n in free if n not in sizes]
        self.sizes = {**{n: OPEN_SIZE + 2 * i for i, n in enumerate(self.open)}, **sizes}
        self.inputs = {k: self._example(k, s, self.sizes) for k, s in compiled.inputs.items()}
        self.function = _function(compiled)
        self.changing = self._changing() if states else []

    def _example(self, key: str, spec: ArraySpec, sizes: Mapping[str, int]) -> Any:
        import torch

        if spec.shape is None:
            raise CompileError(
                f"export_onnx: the rank of input {key!r} is not known; compile with shapes={{…}}"
            )
        shape = [sizes[n] if isinstance(n, str) else n for n in spec.shape]
        if spec.dtype in ("int32", "bool"):
            return torch.zeros(shape, dtype=getattr(torch, spec.dtype))
        random = torch.Generator().manual_seed(0)
        return torch.rand(shape, generator=random).to(getattr(torch, spec.dtype))

    def _changing(self) -> list[Path]:
        """The states that evaluation replaces by others."""
        import torch

        with torch.no_grad():
            _, after = self._run(self.params, self.inputs, self.states)
        after = flat(after)
        return [p for p, value in self.states.items() if after.get(p) is not value]

    def _run(self, params: dict[Path, Any], inputs: dict[str, Any], states: dict[Path, Any]) -> Any:
        from capibara.compose.interchange.torch_onnx_ops import ExactNumbers

        with ExactNumbers():
            return self.function(nest(params), inputs, nest(states), None, False)

    def proto(self, opset: int | None, optimize: bool) -> Any:
        import torch

        job, outputs = self, list(self.compiled.outputs)
        held = {**self.params, **{p: t for p, t in self.states.items() if p not in self.changing}}
        # Registered under plain names, since a module cannot hold all that a model may be called; the file gets
        # the model's names.
        slots = {path: f"held_{i}" for i, path in enumerate(held)}

        class Whole(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                for path, slot in slots.items():
                    self.register_parameter(slot, torch.nn.Parameter(held[path], requires_grad=False))

            def forward(self, *arrays: Any) -> tuple[Any, ...]:
                own = {path: getattr(self, slot) for path, slot in slots.items()}
                inputs = dict(zip(job.inputs, arrays, strict=False))
                states = dict(zip(job.changing, arrays[len(inputs) :], strict=True))
                all_states = {p: states.get(p, own.get(p)) for p in job.states}
                given, after = job._run({p: own[p] for p in job.params}, inputs, all_states)
                after = flat(after)
                # Copies, because an output of a graph is a value of its own.
                return tuple(
                    x.clone() for x in (*(given[k] for k in outputs), *(after[p] for p in job.changing))
                )

        changing = [".".join(p) for p in self.changing]
        example = (*self.inputs.values(), *(self.states[p] for p in self.changing))
        shapes = [self.compiled.inputs[k].shape for k in self.inputs]
        dynamic = [{i: n for i, n in enumerate(s or ()) if n in self.open} for s in shapes]
        try:
            with quiet(), torch.no_grad():
                program = torch.onnx.export(
                    Whole().eval(),
                    example,
                    dynamo=True,
                    verbose=False,
                    opset_version=opset,
                    optimize=optimize,
                    input_names=[*self.inputs, *(f"state.{n}" for n in changing)],
                    output_names=[*outputs, *(f"next_state.{n}" for n in changing)],
                    dynamic_shapes=(tuple(dynamic + [{}] * len(changing)),) if self.open else None,
                )
        except Exception as error:
            raise CompileError(self._failed(error)) from error
        assert program is not None
        self._compare(program.exported_program)
        proto = program.model_proto
        rename(proto, {slot: ".".join(path) for path, slot in slots.items()})
        return self._checked(proto)

    def _compare(self, traced: Any) -> None:
        """See whether the trace computes the same at other sizes than its own: a size may be in it as a number."""
        import torch

        if not self.open or traced is None:
            return
        for first in (5, 37):  # small if that is enough for the model's windows
            sizes = {**self.sizes, **{n: first + 2 * i for i, n in enumerate(self.open)}}
            inputs = {k: self._example(k, s, sizes) for k, s in self.compiled.inputs.items()}
            try:
                with torch.no_grad():
                    outputs, after = self._run(self.params, inputs, self.states)
                    found = traced.module()(*inputs.values(), *(self.states[p] for p in self.changing))
            except Exception:
                continue  # those sizes do not fit the model
            after = flat(after)
            for name, got, want in zip(
                [*self.compiled.outputs, *self.changing],
                found,
                [*(outputs[k] for k in self.compiled.outputs), *(after[p] for p in self.changing)],
                strict=True,
            ):
                close = {torch.float64: 1e-9, torch.float32: 1e-3}.get(want.dtype, 5e-2)
                if got.shape != want.shape or not torch.allclose(
                    got.double(), want.double(), close, close, equal_nan=True
                ):
                    raise CompileError(
                        f"export_onnx: {name!r} depends on {', '.join(self.open)} in a way that a trace does not keep; "
                        f"give the sizes: export_onnx(…, {self.open[0]}=8)"
                    )
            return

    def _failed(self, error: BaseException) -> str:
        cause = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        text = f"export_onnx: {type(cause).__name__}: {str(cause).strip()[:800]}"
        if self.open:
            text += (
                f" A size that must be known (that of a loop over time, say) can be given: "
                f"export_onnx(…, {self.open[-1]}=8)"
            )
        return text

    def _checked(self, proto: Any) -> Any:
        import onnx

        for value in proto.graph.input:
            spec = self.compiled.inputs.get(value.name)
            for want, dim in zip((spec and spec.shape) or (), value.type.tensor_type.shape.dim, strict=False):
                if want in self.open and not dim.HasField("dim_param"):
                    raise CompileError(
                        f"export_onnx: the size {want!r} cannot stay open: the trace has written it in. Give it: "
                        f"export_onnx(…, {want}={dim.dim_value})"
                    )
        try:
            onnx.checker.check_model(proto)
        except onnx.checker.ValidationError as error:
            raise CompileError(f"export_onnx: what torch wrote is not valid ONNX: {error}") from error
        return proto


def _function(compiled: CompiledModel) -> Any:
    """The generated source once more, with the operations of :mod:`.torch_onnx_ops`."""
    from capibara.compose.interchange import torch_onnx_ops

    namespace: dict[str, Any] = {"__name__": "capibara_onnx"}
    exec(builtins.compile(compiled.source, "<capibara.compose.export_onnx>", "exec"), namespace)
    namespace["ops"] = torch_onnx_ops
    for name in ("constants", "registered"):
        if name in compiled.namespace:
            namespace[name] = compiled.namespace[name]
    return namespace["forward"]
