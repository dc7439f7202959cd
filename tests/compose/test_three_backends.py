"""Every operation on NumPy and PyTorch: values and gradients against the same references as on JAX."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from primitive_table import KINDS, TABLES, Case, check, recorded, same_references, table, wanted, weight_of
from torch_oracle import HAS_TORCH, needs_torch

from capibara import compose as ml
from capibara.compose.backends import jax_ops, numpy_ops

BACKENDS: dict[str, Any] = {"numpy": lambda: ml.NumpyBackend("float64")}
if HAS_TORCH:
    BACKENDS["torch"] = lambda: ml.TorchBackend("float64")
CASES = {f"{name}/{label}": case for name in TABLES for label, case in table(name).CASES.items()}


def found(case: Case, backend: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Outputs, gradients of ``Σ output · weight`` by input, declared shapes."""
    model = ml.Model()
    given = {}
    names: dict[str, Any] = {}
    for key, value in case.inputs.items():
        array = np.asarray(value)
        array = array.astype("int32") if array.dtype.kind == "i" else array
        names[key] = ml.IOKey(f"in_{key}", shape=array.shape, kind=KINDS[array.dtype.kind])
        given[f"in_{key}"] = array
    block = case.make()
    outputs = {key: f"out_{key}" for key in block.output_keys}
    model.add(block, "block", **names, **outputs)
    model.expose(*outputs.values())
    real = [k for k, v in given.items() if v.dtype.kind == "f"]
    compiled = ml.compile(model, backend, trainable_keys=real)
    params = {k: backend.array(given[k]) for k in real}
    rest = {k: backend.array(v) for k, v in given.items() if k not in real}
    key = backend.get_random_key()
    out = compiled.evaluate(params, rest, key=key, train=True)
    cotangents = {
        k: backend.array(weight_of(backend.to_numpy(v)))
        for k, v in out.items()
        if backend.to_numpy(v).dtype.kind == "f"
    }
    again, gradients = compiled.evaluate(params, rest, cotangents, key=key, train=True)
    for name, value in out.items():
        np.testing.assert_allclose(backend.to_numpy(value), backend.to_numpy(again[name]), rtol=1e-12)
    return (
        {k[4:]: backend.to_numpy(v) for k, v in out.items()},
        {k[3:]: backend.to_numpy(v) for k, v in gradients.items()},
        {k[4:]: s.shape for k, s in compiled.outputs.items()},
    )


@pytest.mark.thin(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, backend: str) -> None:
    case = CASES[name]
    check(name, case, found(case, BACKENDS[backend]()))


@needs_torch
def test_the_record_is_what_pytorch_says() -> None:
    """It stands in for PyTorch where that is not installed; ``python tests/support/primitive_table.py`` makes it."""
    for name, case in CASES.items():
        same_references(recorded(name), wanted(case), case.rtol)


# ---- models: the same parameters on all three -------------------------------------------------------------


def _tree(specs: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for number, (path, spec) in enumerate(specs.items()):
        at = out
        for key in path[:-1]:
            at = at.setdefault(key, {})
        at[path[-1]] = np.random.default_rng(number).uniform(-0.8, 0.8, spec.shape)
    return out


def _map(fn: Any, tree: Any) -> Any:
    return {k: _map(fn, v) for k, v in tree.items()} if isinstance(tree, dict) else fn(tree)


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {path: tree}
    return {k: v for name, sub in tree.items() for k, v in _leaves(sub, f"{path}.{name}").items()}


def _repeated(remat: str = "none") -> ml.Block:
    model = ml.Model()
    model |= ml.Linear(6)(input="input", output="hidden")
    model |= ml.Repeat(ml.MLP(6, [5], 6), 3, remat=remat)(input="hidden", output="output")
    return model


def _attention() -> ml.Block:
    model = ml.Model()
    table = model.add(ml.RotaryTable(2), "rotary", positions="positions")
    model |= ml.SelfAttention(8, 4, num_kv_heads=2)(
        input="input", cos=table.cos, sin=table.sin, output="output"
    )
    return model


def _inner_repeat() -> ml.Block:
    return ml.Repeat(ml.Repeat(ml.Linear(4), 2), 3)


def _hypernetwork() -> ml.Block:
    """A value that several read, and a parameter that two blocks share."""
    model = ml.Model()
    model |= ml.Linear(4)(input="input", output="a")
    model |= ml.Tanh()(input="a", output="b")
    model |= ml.Multiply()(left="a", right="b", output="c")
    model |= ml.Add()(left="c", right="a", output="output")
    return model


MODELS = {
    "linear": (lambda: ml.Linear(3), {"input": (2, 4)}),
    "repeat": (_repeated, {"input": (2, 4)}),
    "repeat_remat": (lambda: _repeated("full"), {"input": (2, 4)}),
    "remat": (lambda: ml.Remat(ml.Linear(4)), {"input": (2, 4)}),
    "nested_repeat": (_inner_repeat, {"input": (2, 4)}),
    "several_readers": (_hypernetwork, {"input": (2, 4)}),
    "attention": (_attention, {"input": (2, 5, 8), "positions": "arange"}),
    "state_space": (lambda: ml.StateSpace(8, 3, 4, chunk_size=2), {"input": (2, 5, 8)}),
    "rms_norm": (lambda: ml.RMSNorm(4), {"input": (3, 4)}),
    "layer_norm": (lambda: ml.LayerNorm(4), {"input": (3, 4)}),
    "swiglu": (lambda: ml.SwiGLU(6, 4), {"input": (3, 4)}),
}


def _inputs(shapes: dict[str, Any]) -> dict[str, Any]:
    made = {}
    for key, shape in shapes.items():
        made[key] = (
            np.arange(5, dtype="int32")
            if shape == "arange"
            else np.random.default_rng(7).uniform(-1, 1, shape)
        )
    return made


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", MODELS)
def test_models_agree(name: str) -> None:
    make, shapes = MODELS[name]
    inputs = _inputs(shapes)
    results = {}
    for kind, backend in (*((k, b()) for k, b in BACKENDS.items()), ("jax", ml.JaxBackend("float64"))):
        compiled = ml.compile(make(), backend, shapes={k: v.shape for k, v in inputs.items()})
        params = _map(lambda x, b=backend: b.array(x), _tree(compiled.params))
        outputs = compiled.evaluate(params, inputs)
        given = {k: backend.array(weight_of(backend.to_numpy(v))) for k, v in outputs.items()}
        again, gradients = compiled.evaluate(params, inputs, given)
        results[kind] = _leaves(_map(backend.to_numpy, {"out": again, "gradient": gradients}))
    for kind in BACKENDS:
        assert results[kind].keys() == results["jax"].keys()
        for key, want in results["jax"].items():
            np.testing.assert_allclose(
                results[kind][key], want, rtol=1e-10, atol=1e-12, err_msg=f"{kind}{key}"
            )


@pytest.mark.parametrize("train", [False, True])
def test_vector_quantiser_agrees_with_its_state(train: bool) -> None:
    x = np.random.default_rng(0).normal(size=(6, 3))
    results = {}
    for kind, backend in (*((k, b()) for k, b in BACKENDS.items()), ("jax", ml.JaxBackend("float64"))):
        model = ml.Model()
        model |= ml.Linear(3)(input="x", output="h")
        model |= ml.VectorQuantiser(4, 3)(input="h", output="y", commitment="loss", indices="indices")
        model.expose("y", "loss", "indices")
        compiled = ml.compile(model, backend, shapes={"x": x.shape})
        params = _map(backend.array, _tree(compiled.params))
        state = _map(lambda v, b=backend: b.array(v, dtype="float32"), _tree(compiled.states))
        given = {"y": backend.ones(6, 3), "loss": 1.0}
        out, gradients, after = compiled.evaluate(params, {"x": x}, given, state=state, train=train)
        results[kind] = _leaves(_map(backend.to_numpy, {"out": out, "gradient": gradients, "state": after}))
    for kind in BACKENDS:
        for key, want in results["jax"].items():
            # The codebook is float32.
            np.testing.assert_allclose(results[kind][key], want, rtol=2e-6, atol=1e-7, err_msg=f"{kind}{key}")


def test_every_operation_is_on_every_backend() -> None:
    everywhere = [jax_ops, numpy_ops]
    if HAS_TORCH:
        everywhere.append(importlib.import_module("capibara.compose.backends.torch_ops"))
    for ops in everywhere:
        only_of_jax = {"fan_out", "gated", "products"} if ops is not jax_ops else set()
        assert set(ops.__all__) == set(jax_ops.__all__) - only_of_jax
        for name in ops.__all__:
            assert callable(getattr(ops, name)), name


@pytest.mark.parametrize("kind", ["jax", *BACKENDS])
def test_arrays_without_elements(kind: str) -> None:
    backend = ml.JaxBackend("float64") if kind == "jax" else BACKENDS[kind]()
    empty = {"x": np.zeros((0, 5)), "u": np.zeros((0, 2)), "i": np.array([1, 2], "int32")}
    for add in (False, True):
        model = ml.Model()
        model |= ml.Scatter(1, add)(input="x", indices="i", updates="u", output="y")
        model.expose("y")
        compiled = ml.compile(model, backend, shapes={"x": (None, 5), "i": (2,)})
        got = compiled.evaluate({}, empty)["y"]
        assert got.shape == (0, 5)
    # What NumPy, JAX and PyTorch refuse: of no elements no size follows.
    free = ml.compile(ml.functional(lambda x: x.reshape((x.shape[0], -1))), backend, shapes={"x": (None, 5)})
    with pytest.raises(ml.InputError, match="do not fit"):
        free.evaluate({}, {"x": empty["x"]})
