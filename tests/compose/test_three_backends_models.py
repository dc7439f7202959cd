"""Compiled models on NumPy and PyTorch: what goes in and out, randomness, registered operations, compositions."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_oracle import HAS_TORCH, needs_torch, torch

from capibara import compose as ml
from capibara.compose import initializers

MAKERS: dict[str, Any] = {"numpy": ml.NumpyBackend, "jax": ml.JaxBackend}
if HAS_TORCH:
    MAKERS["torch"] = ml.TorchBackend


@pytest.fixture(params=["numpy", pytest.param("torch", marks=needs_torch)])
def backend(request: Any) -> Any:
    return MAKERS[request.param]("float64")


def numbers(tree: Any, backend: Any) -> Any:
    if isinstance(tree, dict):
        return {k: numbers(v, backend) for k, v in tree.items()}
    return backend.to_numpy(tree)


# ---- arguments --------------------------------------------------------------------------------------------


def linear(backend: Any, **options: Any) -> Any:
    return ml.compile(ml.Linear(3), backend, shapes={"input": [None, 4]}, **options)


def test_evaluate_as_on_jax(backend: Any) -> None:
    compiled = linear(backend)
    params = compiled.randomize_params(3)
    x = np.random.default_rng(0).normal(size=(2, 4))
    w, b = (backend.to_numpy(params[k]) for k in ("weight", "bias"))
    out = compiled.evaluate(params, {"input": x})
    assert isinstance(out["output"], backend.get_backend_array_type())
    np.testing.assert_allclose(numbers(out, backend)["output"], x @ w + b, rtol=1e-14)
    g = np.random.default_rng(1).normal(size=(2, 3))
    out, gradients = compiled.evaluate(params, {"input": x}, {"output": backend.array(g)})
    np.testing.assert_allclose(numbers(gradients, backend)["weight"], x.T @ g, rtol=1e-13)
    np.testing.assert_allclose(numbers(gradients, backend)["bias"], g.sum(0), rtol=1e-13)
    _, none = compiled.evaluate(params, {"input": x}, {})
    assert not numbers(none, backend)["weight"].any()
    np.testing.assert_array_equal(
        backend.to_numpy(compiled.apply(params, {"input": x})["output"]), numbers(out, backend)["output"]
    )
    assert compiled.num_params == 15
    if backend.type == "torch":
        assert not out["output"].requires_grad


BAD: list[tuple[Any, str]] = [
    (lambda c, p, x: c.evaluate(p, {}), "missing"),
    (lambda c, p, x: c.evaluate(p, [x]), "must be a dict"),
    (lambda c, p, x: c.evaluate(p, {"input": x[:, :3]}), "shape"),
    (lambda c, p, x: c.evaluate(p, {"input": x.astype("int32")}), "dtype"),
    (lambda c, p, x: c.evaluate(p, {"input": [1.0]}), "not an array"),
    (lambda c, p, x: c.evaluate({}, {"input": x}), "weight"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, [x]), "must be a dict"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, {"outptu": x}), "Did you mean 'output'"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, {"output": x}), "has shape"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, {"output": "a"}), "expected an array of float64"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, {"output": x.astype("int32")}), "expected an array"),
    (lambda c, p, x: c.evaluate(p, {"input": x}, key=3), "expected a key of this backend"),
    (lambda c, p, x: c.randomize_params("a"), "must be an integer"),
    (lambda c, p, x: c.init(5), "expected a key"),
]


@pytest.mark.parametrize("number", range(len(BAD)))
def test_bad_arguments(backend: Any, number: int) -> None:
    compiled = linear(backend)
    call, message = BAD[number]
    with pytest.raises(ml.InputError, match=message):
        call(compiled, compiled.randomize_params(), np.ones((2, 4)))


def test_inference_has_no_gradients(backend: Any) -> None:
    compiled = linear(backend, inference=True)
    assert "gradients" not in compiled.source
    with pytest.raises(ml.InputError, match="inference"):
        compiled.evaluate(compiled.randomize_params(), {"input": np.ones((2, 4))}, {"output": 1.0})


def test_discrete_outputs_have_no_gradient(backend: Any) -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="y")
    model |= ml.primitives.Greater()(left="y", right=0.0, output="positive")
    model.expose("y", "positive")
    compiled = ml.compile(model, backend, shapes={"x": [2, 4]})
    params = compiled.randomize_params()
    out, _ = compiled.evaluate(params, {"x": np.ones((2, 4))}, {"y": np.ones((2, 3))})
    assert backend.to_numpy(out["positive"]).dtype == bool
    with pytest.raises(ml.InputError, match="has no gradient"):
        compiled.evaluate(params, {"x": np.ones((2, 4))}, {"positive": np.ones((2, 3))})


def test_narrow_computation_keeps_wide_parameters(backend: Any) -> None:
    policy = ml.Precision("float64", "float32", "float64")
    narrow = type(backend)(policy=policy)
    compiled = linear(narrow)
    params = compiled.randomize_params()
    x = np.ones((2, 4))
    out, gradients = compiled.evaluate(params, {"input": x}, {"output": np.ones((2, 3))})
    assert str(out["output"].dtype).endswith("float32")
    for value in (*params.values(), *gradients.values()):
        assert str(value.dtype).endswith("float64")


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_torch_in_other_precisions(dtype: str) -> None:
    compiled = linear(ml.TorchBackend(dtype))
    params = compiled.randomize_params()
    x = {"input": compiled.backend.ones(2, 4)}
    out, gradients = compiled.evaluate(params, x, {"output": torch.ones(2, 3)})
    assert str(out["output"].dtype) == f"torch.{dtype}"
    assert str(gradients["weight"].dtype) == f"torch.{dtype}"


# ---- randomness -------------------------------------------------------------------------------------------


def dropout() -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(50)(input="x", output="h")
    model |= ml.Dropout(0.4)(input="h", output="y")
    return model


def test_dropout_and_its_gradient_drop_the_same(backend: Any) -> None:
    compiled = ml.compile(dropout(), backend, shapes={"x": [4, 3]})
    params, x = compiled.randomize_params(), {"x": np.ones((4, 3))}
    key = backend.get_random_key()
    out, gradients = compiled.evaluate(params, x, {"y": np.ones((4, 50))}, key=key, train=True)
    y = backend.to_numpy(out["y"])
    kept = y != 0
    assert 0.3 < kept.mean() < 0.9
    plain = backend.to_numpy(compiled.evaluate(params, x)["y"])
    np.testing.assert_allclose(y, np.where(kept, plain / 0.6, 0), rtol=1e-12)
    np.testing.assert_allclose(numbers(gradients, backend)["linear"]["bias"], kept.sum(0) / 0.6, rtol=1e-12)
    again = compiled.evaluate(params, x, key=key, train=True)
    np.testing.assert_array_equal(backend.to_numpy(again["y"]), y)
    other = compiled.evaluate(params, x, key=backend.get_random_key(), train=True)
    assert (backend.to_numpy(other["y"]) != y).any()
    with pytest.raises(ml.InputError, match="randomness"):
        compiled.evaluate(params, x, train=True)


def test_dropout_in_a_repetition_differs_by_layer(backend: Any) -> None:
    model = ml.Model()
    body = ml.Model()
    body |= ml.Dropout(0.5)(input="input", output="output")
    model |= ml.Repeat(body, 3)(input="x", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [400]})
    out = compiled.evaluate({}, {"x": np.ones(400)}, key=backend.get_random_key(), train=True)
    assert abs((backend.to_numpy(out["y"]) != 0).mean() - 1 / 8) < 5 * np.sqrt(7 / 64 / 400)


@needs_torch
def test_numpy_and_torch_start_and_drop_alike() -> None:
    found = []
    for kind in ("numpy", "torch"):
        backend = MAKERS[kind]("float64")
        compiled = ml.compile(dropout(), backend, shapes={"x": [4, 3]})
        params = compiled.randomize_params(5)
        out = compiled.evaluate(params, {"x": np.ones((4, 3))}, key=backend.get_random_key(), train=True)
        found.append(numbers({"params": params, "out": out}, backend))
    np.testing.assert_array_equal(
        found[0]["params"]["linear"]["weight"], found[1]["params"]["linear"]["weight"]
    )
    np.testing.assert_allclose(found[0]["out"]["y"], found[1]["out"]["y"], rtol=1e-12)


INITIALISERS = [
    (initializers.Normal(0.5), 0.0, 0.25),
    (initializers.Scaled(2.0), 0.0, 2 / 200),
    (initializers.Constant(3.0), 3.0, 0.0),
]


@pytest.mark.parametrize("number", range(len(INITIALISERS)))
def test_initialisers_have_their_moments(backend: Any, number: int) -> None:
    init, mean, variance = INITIALISERS[number]
    compiled = ml.compile(ml.Linear(200), backend, shapes={"input": [1, 200]})
    w = backend.to_numpy(compiled.randomize_params(1, init={"weight": init})["weight"])
    n = w.size
    assert abs(w.mean() - mean) <= 5 * np.sqrt(variance / n)
    assert abs(w.var() - variance) <= 5 * variance * np.sqrt(2 / n)


def test_repeated_blocks_start_differently(backend: Any) -> None:
    compiled = ml.compile(ml.Repeat(ml.Linear(4), 3), backend, shapes={"input": [1, 4]})
    (w,) = (backend.to_numpy(v) for k, v in compiled.randomize_params()["repeat"].items() if k == "weight")
    assert w.shape == (3, 4, 4)
    assert not np.allclose(w[0], w[1])


# ---- operations of the user's own -------------------------------------------------------------------------


def registered(backend: Any) -> tuple[Any, Any, Any]:
    model = ml.Model()
    model |= ml.Linear(5)(input="x", output="h")
    model |= ml.op("gelu")(input="h", output="y")
    compiled = ml.compile(model, backend, shapes={"x": [2, 4]})
    params = compiled.randomize_params()
    x = {"x": np.random.default_rng(0).normal(size=(2, 4))}
    h = x["x"] @ backend.to_numpy(params["linear"]["weight"]) + backend.to_numpy(params["linear"]["bias"])
    out, gradients = compiled.evaluate(params, x, {"y": np.ones((2, 5))})
    return h, numbers(out, backend)["y"], numbers(gradients, backend)["linear"]["bias"]


@pytest.mark.parametrize("kind", MAKERS)
def test_a_registered_operation_wins_over_a_built_in_one(kind: str) -> None:
    backend = MAKERS[kind]("float64")

    @backend.register_op("gelu")
    def cube(x: Any) -> Any:
        return x * x * x

    h, y, gradient = registered(backend)
    np.testing.assert_allclose(y, h**3, rtol=1e-10)
    np.testing.assert_allclose(gradient, (3 * h**2).sum(0), rtol=1e-10)
    assert cube(2) == 8
    assert list(backend.registered_ops) == ["gelu"]
    assert not MAKERS[kind]().registered_ops


def test_a_registered_derivative() -> None:
    backend = ml.NumpyBackend("float64")
    backend.register_op("gelu", np.arctan, vjp=lambda g, out, x: (g / (1 + x * x),))
    h, y, gradient = registered(backend)
    np.testing.assert_allclose(y, np.arctan(h), rtol=1e-14)
    np.testing.assert_allclose(gradient, (1 / (1 + h * h)).sum(0), rtol=1e-12)


def test_a_registered_operation_in_bare_numpy_needs_its_derivative() -> None:
    backend = ml.NumpyBackend("float64")
    backend.register_op("gelu", np.arctan)
    with pytest.raises(ml.InputError, match=r"'gelu' cannot be differentiated.*vjp="):
        registered(backend)


@pytest.mark.parametrize("name", ["", "a b", 3, "1a"])
def test_names_that_cannot_be_registered(name: Any) -> None:
    with pytest.raises(ml.WiringError, match="must be an identifier"):
        ml.NumpyBackend().register_op(name)
    with pytest.raises(ml.WiringError, match="cannot be called"):
        ml.NumpyBackend().register_op("a", 3)  # type: ignore[arg-type]


# ---- any composition --------------------------------------------------------------------------------------

P = ml.primitives
UNARY = [P.Tanh, P.Sigmoid, P.Gelu, P.Silu, P.Softplus, P.Square, P.Sine, P.Softmax, P.Relu, P.Absolute]
BINARY = [P.Add, P.Subtract, P.Multiply, P.Minimum, P.Maximum]


@st.composite
def compositions(draw: Any) -> list[tuple[int, int, int]]:
    """Steps (operation, where its inputs come from); later ones may read anything before them."""
    last = len(UNARY) + len(BINARY) + 2
    count = draw(st.integers(1, 8))
    return [tuple(draw(st.integers(0, n)) for n in (last, i, i)) for i in range(count)]


def build(steps: list[tuple[int, int, int]]) -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="v0")
    for i, (kind, a, b) in enumerate(steps):
        out = f"v{i + 1}"
        if kind < len(UNARY):
            model |= UNARY[kind]()(input=f"v{a}", output=out)
        elif kind < len(UNARY) + len(BINARY):
            model |= BINARY[kind - len(UNARY)]()(left=f"v{a}", right=f"v{b}", output=out)
        elif kind == len(UNARY) + len(BINARY):
            model |= ml.Linear(4)(input=f"v{a}", output=out)
        elif kind == len(UNARY) + len(BINARY) + 1:
            model |= ml.LayerNorm(4)(input=f"v{a}", output=out)
        else:
            model |= ml.Repeat(ml.Linear(4), 2)(input=f"v{a}", output=out)
    model.expose(f"v{len(steps)}")
    return model


@pytest.mark.slow
@settings(max_examples=15, deadline=None, derandomize=True)
@given(compositions())
def test_any_composition_agrees(steps: list[tuple[int, int, int]]) -> None:
    x = {"x": np.random.default_rng(2).normal(size=(3, 4))}
    start = ml.compile(build(steps), ml.NumpyBackend("float64"), shapes={"x": [3, 4]}).randomize_params(1)
    results = []
    for kind, make in MAKERS.items():
        backend = make("float64")
        options: Any = {"jit": False} if kind == "jax" else {}
        compiled = ml.compile(build(steps), backend, shapes={"x": [3, 4]}, **options)
        assert compiled.jit is False

        def moved(tree: Any, backend: Any = backend) -> Any:
            return {k: moved(v) for k, v in tree.items()} if isinstance(tree, dict) else backend.array(tree)

        params = moved(start)
        (name,) = compiled.output_keys
        weights = np.cos(np.arange(12.0)).reshape(3, 4)
        out, gradients = compiled.evaluate(params, x, {name: backend.array(weights)})
        results.append(numbers({"out": out, "gradients": gradients}, backend))

    def same(a: Any, b: Any) -> None:
        if isinstance(a, dict):
            assert a.keys() == b.keys()
            for key in a:
                same(a[key], b[key])
        else:
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11)

    for other in results[1:]:
        same(results[0], other)


# ---- without the other libraries --------------------------------------------------------------------------

BLOCKED = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Finder())
from capibara import compose as ml
"""


def run(source: str, blocked: set[str], devices: int = 1) -> str:
    import os

    text = BLOCKED.format(blocked=blocked) + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", text],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "XLA_FLAGS": emulated(devices)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_compose_imports_neither_jax_nor_torch() -> None:
    out = run("print([m for m in ('jax', 'jaxlib', 'torch') if m in sys.modules])", set())
    assert out.strip() == "[]"


def test_numpy_without_jax_and_torch() -> None:
    out = run(
        """
        import numpy as np
        backend = ml.NumpyBackend()
        model = ml.Model()
        model |= ml.Linear(4)(input="x", output="h")
        model |= ml.Repeat(ml.Linear(4), 2)(input="h", output="r")
        model |= ml.Dropout(0.1)(input="r", output="y")
        compiled = ml.compile(model, backend, shapes={"x": [2, 3]}, constant_keys={})
        params = compiled.randomize_params()
        x = {"x": backend.randn(2, 3)}
        key = backend.get_random_key()
        out, gradients = compiled.evaluate(params, x, {"y": backend.ones(2, 4)}, key=key, train=True)
        print(gradients["linear"]["weight"].shape, backend.grad(lambda v: backend.sum(v * v))(backend.ones(2)))
        try:
            ml.TorchBackend()
        except ImportError as error:
            print(error)
        """,
        {"jax", "jaxlib", "torch", "ml_dtypes"},
    )
    assert "(3, 4) [2. 2.]" in out
    assert "capibara-jax[torch]" in out


@pytest.mark.slow
@needs_torch
def test_torch_without_jax() -> None:
    out = run(
        """
        backend = ml.TorchBackend()
        compiled = ml.compile(ml.Linear(4), backend, shapes={"input": [2, 3]})
        x = {"input": backend.randn(2, 3)}
        out, gradients = compiled.evaluate(compiled.randomize_params(), x, {"output": backend.ones(2, 4)})
        print(tuple(gradients["weight"].shape))
        """,
        {"jax", "jaxlib"},
    )
    assert out.strip() == "(3, 4)"


@pytest.mark.slow
def test_sharded_arrays() -> None:
    out = run(
        """
        import jax
        backend = ml.JaxBackend(device_mesh=(2,))
        x = backend.ones(128, 64, device_mesh=(2,))
        assert [s.data.shape for s in x.addressable_shards] == [(64, 64)] * 2
        assert {s.device for s in x.addressable_shards} == set(jax.devices()[:2])
        y = backend.ones(128, 64, device_mesh=(2,), tensor_split=(1,))
        assert y.addressable_shards[0].data.shape == (128, 32)
        for make in (backend.zeros, backend.randn, backend.rand):
            assert make(8, 4, device_mesh=(2, 2)).addressable_shards[0].data.shape == (4, 2)
        z = backend.array(jax.numpy.arange(8.0), device_mesh=(4,))
        assert [float(s.data[0]) for s in z.addressable_shards] == [0, 2, 4, 6]
        rows = backend.randint(0, 5, 4, 4, device_mesh=(2, 2), tensor_split=(None, 0))
        assert rows.addressable_shards[0].data.shape == (2, 4)
        assert backend.ones(4, tensor_split=(0,)).addressable_shards[0].data.shape == (2,)
        assert len(backend.ones(3).addressable_shards) == 1
        wide = ml.JaxBackend("float64").ones(4, device_mesh=(2,))
        assert wide.dtype == "float64" and len(wide.addressable_shards) == 2
        for call, message in (
            (lambda: backend.ones(3, 4, device_mesh=(2,)), "equal parts"),
            (lambda: backend.ones(4, device_mesh=(2,), tensor_split=(1,)), "is not a dimension"),
            (lambda: backend.ones(4, device_mesh=(2, 2), tensor_split=(0, 0)), "twice"),
            (lambda: backend.ones(4, device_mesh=(2,), tensor_split=(0, 0)), "axes"),
            (lambda: backend.ones(8, device_mesh=(8,)), "needs 8 devices"),
            (lambda: ml.JaxBackend().ones(4, tensor_split=(0,)), "needs device_mesh"),
        ):
            try:
                call()
            except (ml.InputError, ml.CompileError) as error:
                assert message in str(error), error
            else:
                raise AssertionError(message)
        model = ml.compile(ml.MLP(64, [32], 16), backend)
        params = model.randomize_params()
        out = model.evaluate(params, {"input": x})["output"]
        plain = ml.compile(ml.MLP(64, [32], 16), ml.JaxBackend())
        host = jax.tree.map(lambda v: jax.numpy.asarray(backend.to_numpy(v)), params)
        want = plain.evaluate(host, {"input": jax.numpy.ones((128, 64))})["output"]
        assert jax.numpy.allclose(backend.to_numpy(out), want, rtol=1e-5, atol=1e-6)
        print("done")
        """,
        set(),
        devices=4,
    )
    assert out.strip() == "done"
