"""The edges of compose: functions of JAX with odd results, random keys, second derivatives, files and folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml

X = np.ones((3, 4), "float32")


def test_functions_that_draw_random_numbers() -> None:
    def noisy(x: Any, key: Any) -> Any:
        return x + jax.random.normal(key, x.shape)

    model = ml.Model()
    model |= ml.from_jax(noisy, uses_key=True)(x="x", output="a")
    model |= ml.from_jax(noisy, uses_key=True)(x="x", output="b")
    body = ml.from_jax(
        lambda p, x, key: x * p["s"] + jax.random.normal(key, x.shape), params={"s": 1.0}, uses_key=True
    )
    model |= ml.Repeat(body, 2, mode="scan")(x="x", output="c")
    compiled = ml.compile(model, shapes={"x": [None, 4]})
    params = compiled.randomize_params()
    first = compiled.evaluate(params, {"x": X}, key=jax.random.key(1))
    again = compiled.evaluate(params, {"x": X}, key=jax.random.key(1))
    other = compiled.evaluate(params, {"x": X}, key=jax.random.key(2))
    for name in "abc":
        np.testing.assert_array_equal(first[name], again[name])
        assert not np.array_equal(first[name], other[name])
    assert not np.array_equal(first["a"], first["b"])
    with pytest.raises(ml.InputError, match="draws random numbers: give the model a key="):
        compiled.evaluate(params, {"x": X})


def test_functions_with_results_that_models_have_not() -> None:
    for function, message in (
        (jnp.fft.fft, "returns complex64"),
        (lambda x: jax.random.key(0), "returns key<fry>"),
    ):
        with pytest.raises(ml.KindError, match=message):
            ml.compile(ml.from_jax(function, inputs=["a"]), shapes={"a": [4]})
    half = ml.compile(ml.from_jax(lambda x: x.astype("bfloat16")), shapes={"x": [4]})
    assert half.evaluate({}, {"x": X[0]})["output"].dtype == "bfloat16"


def test_arguments_of_from_jax() -> None:
    with pytest.raises(ml.WiringError, match=r"params\['a'\] is tuple"):
        ml.from_jax(lambda p, x: x, params={"a": (np.ones(4), np.ones(3))})
    with pytest.raises(ml.WiringError, match="kinds names 'z'"):
        ml.from_jax(lambda x: x, kinds={"z": "int"})
    with pytest.raises(ml.WiringError, match="must be one of 'float', 'int', 'bool'"):
        ml.from_jax(lambda x: x, kinds={"x": "complex"})
    with pytest.raises(ml.WiringError, match="uses_key=1"):
        ml.from_jax(lambda x: x, uses_key=1)  # type: ignore[arg-type]


def test_second_derivatives_through_evaluate() -> None:
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="h")
    model += ml.Gelu()
    model += ml.Linear(1)(output="y")
    compiled = ml.compile(model, ml.JaxBackend("float64"), shapes={"x": [None, 4]})
    params = compiled.randomize_params()

    def by_evaluate(p: Any) -> Any:
        gradients = compiled.evaluate(p, {"x": X.astype("float64")}, {"y": jnp.ones((3, 1))})[1]
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))

    def by_hand(p: Any) -> Any:
        def total(p: Any) -> Any:
            h = X.astype("float64") @ p["linear"]["weight"] + p["linear"]["bias"]
            return jnp.sum(jax.nn.gelu(h) @ p["linear_1"]["weight"] + p["linear_1"]["bias"])

        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(jax.grad(total)(p)))

    with jax.enable_x64(True):
        want, found = jax.grad(by_hand)(params), jax.grad(by_evaluate)(params)
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    compiled = ml.compile(ml.Linear(2), shapes={"input": [3, 4]})
    params = compiled.randomize_params()
    path = tmp_path / "p.safetensors"
    for call in (compiled.load_params, ml.load_exported):
        with pytest.raises(ml.MissingFileError, match="there is no file") as caught:
            call(tmp_path / "nothing")
        assert isinstance(caught.value, FileNotFoundError)
        for wrong in (tmp_path, None, 3.5, "", "a\0b"):
            with pytest.raises(ml.InputError, match=r"is not a file|must be the name|is not a name"):
                call(wrong)  # type: ignore[arg-type]
    with pytest.raises(ml.MissingFileError, match="there is no folder"):
        compiled.save_params(tmp_path / "a" / "b", params)
    with pytest.raises(ml.InputError, match="is a folder"):
        compiled.save_params(tmp_path, params)
    with pytest.raises(ml.InputError, match="params has 'extra'"):
        compiled.save_params(path, {**params, "extra": jnp.ones(1)})
    assert not path.exists()


@pytest.mark.parametrize("backend", [ml.JaxBackend, ml.NumpyBackend])
def test_initialisers_that_give_other_shapes(backend: Any) -> None:
    compiled = ml.compile(ml.Linear(2), backend(), shapes={"input": [3, 4]})
    for init in (lambda k, s, d: np.ones((1,), "float32"), lambda k, s, d: np.ones((*s, 1), "float32")):
        with pytest.raises(ml.CompileError, match=r"the initialiser of the parameter 'weight' gives shape"):
            compiled.randomize_params(init={"weight": init})
    params = compiled.randomize_params(init={"weight": lambda k, s, d: np.full(s, 3, "float32")})
    assert params["weight"].tolist() == [[3, 3]] * 4


def test_arrays_larger_than_any_machine_are_not_compiled() -> None:
    huge = 10**8
    model = ml.Model()
    model |= ml.Zeros((huge, huge))(output="y")
    with pytest.raises(ml.CompileError, match=r"at most 2\*\*48 elements"):
        ml.compile(ml.from_json(ml.to_json(model)))
    model = ml.Model()
    model |= ml.BroadcastTo((huge, huge, 2))(input="x", output="y")
    with pytest.raises(ml.CompileError, match=r"output has shape"):
        ml.compile(model, shapes={"x": [2]})
    with pytest.raises(ml.CompileError, match=r"'weight' has shape"):
        ml.compile(ml.Linear(huge), shapes={"input": [1, huge]})
    assert ml.compile(ml.Zeros((0, huge, huge))).evaluate({}, {})["output"].shape == (0, huge, huge)


def test_a_device_and_a_mesh_are_two_answers_to_one_question() -> None:
    with pytest.raises(ml.CompileError, match="give one of them"):
        ml.JaxBackend(device="cpu:0", device_mesh=(1,))
