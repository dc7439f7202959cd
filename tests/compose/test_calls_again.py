"""Calls of NumPy and PyTorch models after the first: the same results, and the same errors for bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml


@pytest.fixture(params=["numpy", "torch"])
def backend(request: Any) -> Any:
    if request.param == "torch":
        pytest.importorskip("torch")
    return {"numpy": ml.NumpyBackend, "torch": ml.TorchBackend}[request.param]()


@pytest.fixture
def called(backend: Any) -> Any:
    """A model, its parameters and inputs, called twice with and without gradients."""
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="h")
    model |= ml.Relu()(input="h", output="y")
    model |= ml.Add()(left="y", right="z", output="sum")
    model.expose("sum")
    compiled = ml.compile(model, backend, shapes={"x": ["n", 4], "z": ["n", 3]})
    params = compiled.randomize_params(0)
    given = {"x": backend.array(np.ones((2, 4))), "z": backend.array(np.zeros((2, 3)))}
    for _ in range(2):
        compiled.evaluate(params, given)
        compiled.evaluate(params, given, {"sum": backend.ones(2, 3)})
    return compiled, params, given


def plain(params: Any, given: Any, backend: Any) -> Any:
    x, z, weight, bias = (
        backend.to_numpy(a)
        for a in (given["x"], given["z"], params["linear"]["weight"], params["linear"]["bias"])
    )
    return np.maximum(x @ weight + bias, 0) + z


def test_results_follow_the_values_and_the_sizes(called: Any, backend: Any) -> None:
    compiled, params, given = called
    for count in (2, 5, 2):
        given = {
            "x": backend.array(np.random.default_rng(count).normal(size=(count, 4))),
            "z": backend.array(np.full((count, 3), 2.0)),
        }
        params = compiled.randomize_params(count)
        want = plain(params, given, backend)
        np.testing.assert_allclose(
            backend.to_numpy(compiled.evaluate(params, given)["sum"]), want, rtol=1e-5, atol=1e-6
        )
        got, back = compiled.evaluate(params, given, {"sum": backend.ones(count, 3)})
        np.testing.assert_allclose(backend.to_numpy(got["sum"]), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            backend.to_numpy(back["linear"]["bias"]), (want > 2).sum(0), rtol=1e-5, atol=1e-6
        )


def test_gradients_are_arrays_of_their_own(called: Any, backend: Any) -> None:
    compiled, params, given = called
    ones = backend.ones(2, 3)
    _, back = compiled.evaluate(params, given, {"sum": ones})
    back["linear"]["bias"] *= 0
    np.testing.assert_array_equal(backend.to_numpy(ones), np.ones((2, 3)))
    _, again = compiled.evaluate(params, given, {"sum": ones})
    assert np.abs(backend.to_numpy(again["linear"]["weight"])).sum() >= 0


BAD: dict[str, tuple[Any, str]] = {
    "shape": (lambda b, p, g: (p, {**g, "x": b.ones(2, 5)}), r"inputs\['x'\] has shape"),
    "sizes that differ": (lambda b, p, g: (p, {**g, "z": b.ones(3, 3)}), r"inputs\['z'\] has shape"),
    "dtype": (lambda b, p, g: (p, {**g, "x": b.ones(2, 4, dtype=ml.int32)}), r"inputs\['x'\] has dtype"),
    "missing": (lambda b, p, g: (p, {"x": g["x"]}), r"missing \['z'\]"),
    "unknown": (lambda b, p, g: (p, {**g, "w": g["x"]}), r"unknown \['w'\]"),
    "renamed": (lambda b, p, g: (p, {"x": g["x"], "w": g["z"]}), r"missing \['z'\]; unknown \['w'\]"),
    "number": (lambda b, p, g: (p, {**g, "x": 1.0}), r"not an array"),
    "no dict": (lambda b, p, g: (p, g["x"]), r"inputs must be a dict"),
    "parameter": (lambda b, p, g: ({"linear": {"weight": p["linear"]["weight"]}}, g), r"linear\.bias"),
    "parameter's shape": (
        lambda b, p, g: ({"linear": {**p["linear"], "bias": b.ones(4)}}, g),
        r"params\['linear'\]\['bias'\] has shape",
    ),
    "unknown parameter": (
        lambda b, p, g: ({"linear": {**p["linear"], "scale": b.ones(4)}}, g),
        r"has 'scale', which the model does not",
    ),
    "no parameters": (lambda b, p, g: (b.ones(2), g), r"params"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_after_good_calls(case: str, called: Any, backend: Any) -> None:
    compiled, params, given = called
    make, words = BAD[case]
    params, given = make(backend, params, given)
    with pytest.raises(ml.InputError, match=words):
        compiled.evaluate(params, given)
    with pytest.raises(ml.InputError, match=words):
        compiled.evaluate(params, given, {"sum": backend.ones(2, 3)})


@pytest.mark.parametrize(
    ("cotangents", "words"),
    [
        ({"other": 1.0}, "names 'other'"),
        ({"sum": "text"}, r"output_gradients\['sum'\] is"),
        ([1.0], "must be a dict"),
        ({"sum": np.ones((2, 3), "int32")}, r"output_gradients\['sum'\] is int32"),
        ({"sum": np.ones((2, 2), "float32")}, r"has shape \(2, 2\), expected \(2, 3\)"),
    ],
)
def test_bad_cotangents_are_named_after_good_calls(cotangents: Any, words: str, called: Any) -> None:
    compiled, params, given = called
    with pytest.raises(ml.InputError, match=words):
        compiled.evaluate(params, given, cotangents)


def test_arrays_of_float64_stay_narrow(backend: Any, called: Any) -> None:
    compiled, params, given = called
    wide = {k: backend.to_numpy(v).astype("float64") for k, v in given.items()}
    for _ in range(2):
        assert "float32" in str(compiled.evaluate(params, wide)["sum"].dtype)


def test_a_mode_that_is_not_a_bool(called: Any) -> None:
    compiled, params, given = called
    with pytest.raises(ml.InputError, match="train is int"):
        compiled.evaluate(params, given, train=0)
