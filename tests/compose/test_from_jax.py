"""Functions of JAX as blocks: values, gradients and shapes are those of the function, wherever the block stands."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def chain(block: ml.Block) -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="hidden")
    model.add(block, "wrapped", input="hidden", output="y")
    model.expose("y")
    return model


def test_values_and_gradients_beside_other_blocks() -> None:
    compiled = ml.compile(chain(ml.from_jax(lambda input: jnp.sin(input) ** 2)), shapes={"x": [None, 3]})
    assert compiled.outputs["y"].shape == (*(compiled.inputs["x"].shape or ("?",))[:1], 4)
    params, x = compiled.randomize_params(0), draw(5, 3)

    def hand(p: Any) -> Any:
        return jnp.sin(x @ p["linear"]["weight"] + p["linear"]["bias"]) ** 2

    out, gradients = compiled.evaluate(params, {"x": x}, {"y": np.ones((5, 4), "float32")})
    np.testing.assert_allclose(out["y"], hand(params), rtol=1e-6)
    want = jax.grad(lambda p: hand(p).sum())(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), gradients, want)
    # The program that JAX sees is one function: all transformations go through it.
    rows = jax.vmap(lambda row: compiled.apply(params, {"x": row[None]})["y"][0])(x)
    np.testing.assert_allclose(rows, out["y"], rtol=1e-5)


def test_a_derivative_of_the_users_own() -> None:
    @jax.custom_vjp
    def straight(input: Any) -> Any:
        return jnp.round(input)

    straight.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (3 * g,))
    model = ml.Model()
    model |= ml.from_jax(straight, inputs=["input"])(input="x", output="y")
    model.expose("y")
    compiled = ml.compile(model, shapes={"x": [3]}, trainable_keys=["x"])
    x = np.array([0.4, 1.6, -2.2], "float32")
    out, gradients = compiled.evaluate({"x": x}, {}, {"y": np.ones(3, "float32")})
    np.testing.assert_array_equal(out["y"], [0, 2, -2])
    np.testing.assert_array_equal(gradients["x"], [3, 3, 3])


def test_parameters_start_as_given_and_train() -> None:
    start = {"dense": {"w": draw(4, 2)}, "b": np.zeros(2, "float32")}

    def head(p: Any, input: Any) -> Any:
        return jnp.tanh(input @ p["dense"]["w"] + p["b"])

    compiled = ml.compile(chain(ml.from_jax(head, params=start)), shapes={"x": [None, 3]})
    params, x = compiled.randomize_params(1), draw(5, 3)
    np.testing.assert_array_equal(params["wrapped"]["dense_w"], start["dense"]["w"])
    out, gradients = compiled.evaluate(params, {"x": x}, {"y": np.ones((5, 2), "float32")})

    def hand(p: Any) -> Any:
        hidden = x @ p["linear"]["weight"] + p["linear"]["bias"]
        return jnp.tanh(hidden @ p["wrapped"]["dense_w"] + p["wrapped"]["b"])

    np.testing.assert_allclose(out["y"], hand(params), rtol=1e-5)
    want = jax.grad(lambda p: hand(p).sum())(params)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradients, want)


@pytest.mark.parametrize("mode", ["scan", "unroll"])
def test_inside_repetition_and_rematerialisation(mode: Any) -> None:
    body = ml.Model()
    body |= ml.Linear(4)(input="input", output="hidden")
    body |= ml.Remat(ml.from_jax(lambda input: jnp.cos(input)))(input="hidden", output="output")
    body.expose("output")
    model = ml.Model()
    model |= ml.Repeat(body, 3, mode=mode)(input="x", output="y")
    model.expose("y")
    compiled = ml.compile(model, shapes={"x": [2, 4]})
    params, x = compiled.randomize_params(0), draw(2, 4)
    (stack,) = params.values()
    layer = next(iter(stack.values()))
    want = x
    for i in range(3):
        want = np.cos(want @ layer["weight"][i] + layer["bias"][i])
    np.testing.assert_allclose(compiled.evaluate(params, {"x": x})["y"], want, rtol=1e-5)


def test_several_outputs_and_kinds() -> None:
    def split(a: Any, b: Any) -> Any:
        return {"low": jnp.minimum(a, b), "which": jnp.argmin(jnp.stack([a, b]), 0), "less": a < b}

    kinds = {"which": "int", "less": "bool"}
    model = ml.Model()
    block = ml.from_jax(split, outputs=["low", "which", "less"], kinds=kinds)
    model |= block(a="a", b="b", low="low", which="which", less="less")
    model.expose("low", "which", "less")
    compiled = ml.compile(model, shapes={"a": [3], "b": [3]})
    a, b = draw(3), draw(3, seed=1)
    out = compiled.evaluate({}, {"a": a, "b": b})
    np.testing.assert_array_equal(out["low"], np.minimum(a, b))
    np.testing.assert_array_equal(out["which"], np.argmin([a, b], 0))
    np.testing.assert_array_equal(out["less"], a < b)
    assert [s.dtype for s in compiled.outputs.values()] == ["float32", "int32", "bool"]


def test_shapes_follow_open_sizes() -> None:
    model = ml.Model()
    model.add_input("x", ("batch", 3))
    model |= ml.from_jax(lambda x: jnp.concatenate([x, x], 1))(x="x", output="twice")
    model |= ml.from_jax(lambda x: x.reshape(-1))(x="twice", output="flat")
    model.expose("twice", "flat")
    compiled = ml.compile(model)
    assert compiled.shapes["twice"] == ("batch", 6)
    assert len(compiled.shapes["flat"] or ()) == 1  # 6·batch, which has no name
    fixed = ml.compile(model, shapes={"x": [4, 3]})
    assert fixed.shapes["flat"] == (24,)


def test_a_refused_shape_names_the_place_and_the_line() -> None:
    model = ml.Model()
    model |= ml.from_jax(lambda a, b: a @ b)(a="a", b="b", output="c")
    model.expose("c")
    with pytest.raises(
        ml.ShapeError, match=r"(?s)refuses a \(2, 3\), b \(4, 5\).*test_from_jax\.py"
    ) as caught:
        ml.compile(model, shapes={"a": [2, 3], "b": [4, 5]})
    assert "contracting" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ml.from_jax(5), ml.WiringError, "function=5"),  # type: ignore[arg-type]
        (lambda: ml.from_jax(lambda *x: x), ml.WiringError, "inputs="),
        (lambda: ml.from_jax(lambda x: x, inputs="x"), ml.WiringError, "list of names"),
        (lambda: ml.from_jax(lambda x: x, outputs=["x"]), ml.WiringError, "none of them an input"),
        (lambda: ml.from_jax(lambda x: x, outputs=[]), ml.WiringError, "at least one"),
        (lambda: ml.from_jax(lambda p, x: x, params={"x": 1.0}), ml.WiringError, "must differ"),
        (lambda: ml.from_jax(lambda p, x: x, params={"n": 1}), ml.WiringError, "float array"),
        (lambda: ml.from_jax(lambda p, x: x, params=[1.0]), ml.WiringError, "dict of arrays"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments(make: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (lambda x: (x, x), ml.ShapeError, "returns 2 values"),
        (lambda x: {"other": x}, ml.ShapeError, "other"),
        (lambda x: "text", ml.ShapeError, "expected an array"),
        (lambda x: x > 0, ml.KindError, "kinds="),
    ],
)
def test_results_that_are_not_as_said(function: Any, error: Any, text: str) -> None:
    model = ml.Model()
    model |= ml.from_jax(function)(x="x", output="y")
    model.expose("y")
    with pytest.raises(error, match=text):
        ml.compile(model, shapes={"x": [2]})


def test_other_backends_and_json_say_what_to_do() -> None:
    model = chain(ml.from_jax(jnp.tanh, inputs=["input"]))
    with pytest.raises(ml.CompileError, match="wraps a function of jax"):
        ml.compile(model, ml.NumpyBackend(), shapes={"x": [2, 3]})
    with pytest.raises(ml.ModelFormatError):
        ml.to_json(model)
