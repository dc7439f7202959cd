"""What the portable backends do beside computing: parameters in files, ``torch.compile``, starting values, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml

BACKENDS = ["jax", "numpy", "torch"]


def backend(name: str, **options: Any) -> Any:
    if name == "torch":
        pytest.importorskip("torch")
    return {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}[name](**options)


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


# ---- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", BACKENDS)
@pytest.mark.parametrize("writer", BACKENDS)
def test_parameters_move_between_backends_in_files(writer: str, reader: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    shapes: Any = {"input": [3, 4]}
    one = ml.compile(ml.MLP(4, [5], 2), backend(writer), shapes=shapes)
    other = ml.compile(ml.MLP(4, [5], 2), backend(reader), shapes=shapes)
    params = one.randomize_params(3)
    one.save_params(tmp_path / "p.safetensors", params)
    found = other.load_params(tmp_path / "p.safetensors")
    kind = other.backend.get_backend_array_type()
    assert all(isinstance(x, kind) for x in jax.tree.leaves(found))
    for a, b in zip(leaves(params), leaves(found), strict=True):
        np.testing.assert_array_equal(a, b)
    x = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
    before, after = one.evaluate(params, {"input": x}), other.evaluate(found, {"input": x})
    np.testing.assert_allclose(
        np.asarray(before["output"]), np.asarray(after["output"]), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_a_file_of_another_model_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    one = ml.compile(ml.MLP(4, [5], 2), backend(name), shapes={"input": [3, 4]})
    other = ml.compile(ml.MLP(4, [6], 2), backend(name), shapes={"input": [3, 4]})
    one.save_params(tmp_path / "p.safetensors", one.randomize_params())
    with pytest.raises(ml.InputError, match="layer_0"):
        other.load_params(tmp_path / "p.safetensors")
    with pytest.raises(FileNotFoundError):
        one.load_params(tmp_path / "none.safetensors")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    compiled = ml.compile(ml.Linear(2), ml.NumpyBackend(), shapes={"input": [3, 4]})
    params = compiled.randomize_params()
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"capibara-jax\[train\]"):
        compiled.save_params(tmp_path / "p.safetensors", params)


# ---- PyTorch's compiler -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # PyTorch's own, while its compiler is imported
def test_models_through_torch_compile() -> None:
    torch = pytest.importorskip("torch")
    plain = ml.compile(ml.MLP(4, [8], 2), backend("torch"), shapes={"input": [None, 4]})
    fast = ml.compile(ml.MLP(4, [8], 2), backend("torch", jit=True), shapes={"input": [None, 4]})
    params = plain.randomize_params(1)
    for rows in (3, 5):
        inputs = {"input": torch.linspace(-1, 1, 4 * rows).reshape(rows, 4)}
        given = {"output": torch.ones(rows, 2)}
        expected = plain.evaluate(params, inputs, given)
        found = fast.evaluate(params, inputs, given)
        for a, b in zip(leaves(expected), leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    alone = fast.evaluate(params, inputs)["output"]
    np.testing.assert_allclose(alone, expected[0]["output"], rtol=1e-5, atol=1e-6)


# ---- refusals ---------------------------------------------------------------------------------------------


def test_second_derivatives_on_numpy_name_the_backends_that_have_them() -> None:
    numpy = ml.NumpyBackend()

    def inner(x: Any) -> Any:
        return numpy.sum(numpy.multiply(x, numpy.multiply(x, x)))

    with pytest.raises(ml.InputError, match="JaxBackend or TorchBackend for second derivatives"):
        numpy.grad(lambda x: numpy.sum(numpy.grad(inner)(x)))(numpy.ones(3))


# ---- starting values --------------------------------------------------------------------------------------


def test_other_initialisers_are_compiled_once() -> None:
    compiled = ml.compile(ml.MLP(4, [5], 2), ml.JaxBackend(), shapes={"input": [3, 4]})
    traced: list[Any] = []

    def own(key: Any, shape: Any, dtype: Any) -> Any:
        traced.append(shape)
        return jnp.full(shape, 2.0, dtype)

    params: Any = {}
    for seed in range(3):
        params = compiled.randomize_params(seed, init={"*.bias": own, "*": 0.5})
    assert len(traced) == 2
    np.testing.assert_array_equal(params["layer_0"]["bias"], 2.0)
    np.testing.assert_array_equal(params["layer_0"]["weight"], 0.5)
    # Others are others, also where the patterns are the same.
    assert compiled.randomize_params(0, init={"*": 0.25})["layer_0"]["bias"][0] == 0.25
    assert compiled.randomize_params(0)["layer_0"]["bias"][0] == 0
    for number in range(40):
        compiled.randomize_params(0, init=float(number))
    assert len(compiled._makers) <= 16


def test_an_initialiser_that_cannot_be_hashed_serves_too() -> None:
    class Listed(list):
        def __call__(self, key: Any, shape: Any, dtype: Any) -> Any:
            return jnp.full(shape, self[0], dtype)

    compiled = ml.compile(ml.Linear(2), ml.JaxBackend(), shapes={"input": [3, 4]})
    chosen = Listed([3.0])
    assert compiled.randomize_params(0, init=chosen)["bias"].tolist() == [3.0, 3.0]
    chosen[0] = 4.0
    assert compiled.randomize_params(0, init=chosen)["bias"].tolist() == [4.0, 4.0]


# ---- layer normalisation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("use_scale", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_layer_norm_with_and_without(name: str, use_scale: bool, use_bias: bool) -> None:
    model = ml.Model()
    model |= ml.Linear(6)(input="input", output="hidden")
    model |= ml.LayerNorm(use_scale=use_scale, use_bias=use_bias)(input="hidden", output="output")
    model.expose("output")
    again = ml.from_json(ml.to_json(model))
    rng = np.random.default_rng(0)
    x, given = rng.normal(size=(3, 4)), rng.normal(size=(3, 6))
    torch = pytest.importorskip("torch")
    for each in (model, again):
        compiled = ml.compile(each, backend(name, dtype="float64"), shapes={"input": [3, 4]})
        params = compiled.randomize_params(1)
        wanted = {k for k, on in (("scale", use_scale), ("bias", use_bias)) if on}
        norm = params.get("layer_norm", {})
        assert set(norm) == wanted
        host = jax.tree.map(np.asarray, params)
        weight = torch.tensor(host["linear"]["weight"], requires_grad=True)
        scale = torch.tensor(host["layer_norm"]["scale"]) if use_scale else None
        bias = torch.tensor(host["layer_norm"]["bias"]) if use_bias else None
        hidden = torch.tensor(x) @ weight + torch.tensor(host["linear"]["bias"])
        y = torch.nn.functional.layer_norm(hidden, (6,), scale, bias, 1e-5)
        y.backward(torch.tensor(given))
        assert weight.grad is not None
        make = compiled.backend.array
        found, gradients = compiled.evaluate(params, {"input": make(x)}, {"output": make(given)})
        np.testing.assert_allclose(np.asarray(found["output"]), y.detach().numpy(), rtol=1e-10, atol=1e-12)
        slope = np.asarray(gradients["linear"]["weight"])
        np.testing.assert_allclose(slope, weight.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_layer_norm_takes_bools_only() -> None:
    with pytest.raises(ml.WiringError, match="use_scale=1 must be True or False"):
        ml.LayerNorm(use_scale=1)  # type: ignore[arg-type]
    with pytest.raises(ml.WiringError, match="use_bias='no'"):
        ml.LayerNorm(use_bias="no")  # type: ignore[arg-type]
