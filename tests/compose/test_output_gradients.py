"""Cotangents handed to ``evaluate``: their shapes, dtypes and keys, and outputs that have no gradient."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.dtypes import float0

from capibara import compose as ml


@cache
def compiled(jit: bool = True, dtype: str = "float32") -> ml.CompiledModel:
    """Outputs ``y`` [batch, 3], the scalar ``total`` and ``places`` int [2]."""
    model = ml.Model()
    model |= ml.Linear(3)(input="x", output="y")
    model |= ml.Sum()(input="y", output="total")
    model |= ml.Positions()(like="x", start=0, output="places")
    model.expose("y", "total", "places")
    return ml.compile(model, ml.JaxBackend(dtype), shapes={"x": [None, 2]}, jit=jit)


X = {"x": np.arange(8, dtype="float32").reshape(4, 2)}


def gradients(c: ml.CompiledModel, given: Any) -> Any:
    return c.evaluate(c.randomize_params(), X, given)[1]["linear"]["weight"]


@pytest.mark.parametrize("jit", [True, False])
def test_gradients_beside_an_integer_output(jit: bool) -> None:
    c = compiled(jit)
    rows = np.arange(12, dtype="float32").reshape(4, 3)
    want = X["x"].T @ rows
    np.testing.assert_allclose(gradients(c, {"y": rows}), want)
    np.testing.assert_allclose(gradients(c, {"y": rows, "places": np.zeros(2, float0)}), want)
    total = np.repeat(X["x"].sum(0)[:, None], 3, 1)
    for one in (1, 1.0, np.float32(1), jnp.ones(())):
        np.testing.assert_allclose(gradients(c, {"total": one}), total)
    np.testing.assert_allclose(gradients(c, {"y": rows, "total": 2}), want + 2 * total)
    np.testing.assert_array_equal(gradients(c, {}), np.zeros((2, 3)))


def test_cotangents_take_the_dtype_of_their_output() -> None:
    c = compiled(dtype="bfloat16")
    want = X["x"].T @ np.ones((4, 3))
    for dtype in ("float32", jnp.bfloat16, "float16", "float64"):
        got = gradients(c, {"y": np.ones((4, 3), dtype)})
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(got.astype("float32"), want, rtol=1e-2)


@pytest.mark.parametrize("jit", [True, False])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"z": np.ones((4, 3), "float32")}, r"'z', which is not an output.*\['y', 'total', 'places'\]"),
        ({"Y": np.ones((4, 3), "float32")}, "'Y', which is not an output"),
        (np.ones((4, 3), "float32"), "output_gradients must be a dict.*not ndarray"),
        (1.0, "output_gradients must be a dict"),
        ([("y", 1)], "output_gradients must be a dict.*not list"),
        ({"y": np.ones((4, 2), "float32")}, r"\['y'\] has shape \(4, 2\), expected \(4, 3\)"),
        ({"y": np.ones(3, "float32")}, r"\['y'\] has shape \(3,\), expected \(4, 3\)"),
        ({"y": 1.0}, r"\['y'\] has shape \(\), expected \(4, 3\)"),
        ({"total": np.ones(1, "float32")}, r"\['total'\] has shape \(1,\), expected \(\)"),
        ({"y": np.ones((4, 3), "int32")}, r"\['y'\] has dtype int32, expected float32"),
        ({"y": np.ones((4, 3), bool)}, "has dtype bool"),
        ({"y": np.ones((4, 3), "complex64")}, "has dtype complex64"),
        ({"y": np.zeros((4, 3), float0)}, "has dtype .*float0"),
        ({"y": [[1.0] * 3] * 4}, "is list, not an array"),
        ({"y": None}, "is NoneType, not an array"),
        ({"y": True}, "is bool, not an array"),
        ({"y": "ones"}, "is str, not an array"),
        ({"places": np.ones(2, "int32")}, "'places' is int32 and has no gradient; leave it out"),
        ({"places": np.ones(2, "float32")}, "'places' is int32 and has no gradient"),
        ({"places": 0}, "'places' is int32 and has no gradient"),
    ],
)
def test_wrong_cotangents(given: Any, words: str, jit: bool) -> None:
    with pytest.raises(ml.InputError, match=words):
        gradients(compiled(jit), given)


def test_an_output_whose_kind_shows_only_in_running() -> None:
    model = ml.Model()
    model |= ml.Add()(left="a", right="b", output="c")
    c = ml.compile(model)
    ones = {"a": np.ones(2, "int32"), "b": np.ones(2, "int32")}
    floats = jax.tree.map(lambda a: a.astype("float32"), ones)
    out, _ = c.evaluate({}, floats, {"c": np.ones(2, "float32")})
    np.testing.assert_array_equal(out["c"], [2, 2])
    with pytest.raises(ml.InputError, match=r"dtype|no gradient"):
        c.evaluate({}, ones, {"c": np.ones(2, "float32")})
