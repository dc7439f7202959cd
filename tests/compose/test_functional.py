"""Models in functional style: blocks called with connections, Model.create, @functional."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

BACKEND = ml.JaxBackend(dtype="float64")
X = np.random.default_rng(1).normal(size=(5, 3))


def numpy_linear(params: Any, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return x @ np.asarray(params["weight"]) + np.asarray(params["bias"])


def test_a_model_from_its_result() -> None:
    x = ml.IOKey("x")
    y = ml.Linear(4)(x)
    model = ml.Model.create(z=ml.Relu()(y + 1), total=y.sum())
    assert model.input_keys == ["x"]
    assert model.output_keys == ["z", "total"]
    compiled = ml.compile(model, BACKEND, shapes={"x": X.shape})
    params = compiled.randomize_params(0)
    out = compiled.evaluate(params, {"x": X})
    expected = numpy_linear(params["linear"], X)
    np.testing.assert_allclose(out["z"], np.maximum(expected + 1, 0), rtol=1e-12)
    np.testing.assert_allclose(out["total"], expected.sum(), rtol=1e-12)


def test_a_call_with_names_is_a_placement_and_an_expression() -> None:
    x = ml.IOKey("x")
    placed = ml.Linear(4)(input=x)
    model = ml.Model.create(y=placed * 2)
    compiled = ml.compile(model, BACKEND, shapes={"x": X.shape})
    params = compiled.randomize_params(0)
    np.testing.assert_allclose(
        compiled.evaluate(params, {"x": X})["y"], 2 * numpy_linear(params["linear"], X), rtol=1e-12
    )


def test_a_placement_that_was_added_is_not_added_again() -> None:
    model = ml.Model()
    placed = ml.Linear(4)(input="x")
    model |= placed
    model |= ml.Relu()(input=placed + 1, output="y")
    assert [c.name for c in model.children] == ["linear", "add", "relu"]
    called = ml.Tanh()(model.y)
    model |= called
    model |= ml.Exp()(input=called, output="z")
    assert [c.name for c in model.children] == ["linear", "add", "relu", "tanh", "exp"]


def test_positional_names_with_an_output() -> None:
    model = ml.Model()
    model |= ml.Add()("a", "b", output="c")
    assert (model.input_keys, model.output_keys) == (["a", "b"], ["c"])


def test_blocks_with_several_outputs_give_a_tuple() -> None:
    first, second = ml.Split(2, 1)(ml.IOKey("x", shape=(5, 4)))
    model = ml.Model.create(y=first - second)
    x = np.arange(20.0).reshape(5, 4)
    compiled = ml.compile(model, BACKEND)
    np.testing.assert_array_equal(compiled.evaluate({}, {"x": x})["y"], x[:, :2] - x[:, 2:])
    assert first.output("output_1").key == second.key


def test_keys_without_names_are_inputs() -> None:
    a, b = ml.IOKey(), ml.IOKey()
    model = ml.Model.create(y=a - b * ml.IOKey("input"))
    assert model.input_keys == ["input_1", "input", "input_2"]  # in the order in which they are read


def test_an_input_as_output() -> None:
    compiled = ml.compile(ml.Model.create(same=ml.IOKey("x"), two=2.0), BACKEND, shapes={"x": (5, 3)})
    out = compiled.evaluate({}, {"x": X})
    np.testing.assert_array_equal(out["same"], X)
    assert float(out["two"]) == 2.0


def test_models_go_on_after_create() -> None:
    model = ml.Model.create(h=ml.IOKey("x") * 2)
    model += ml.Exp()(output="y")
    model.expose("y")
    compiled = ml.compile(model, BACKEND, shapes={"x": X.shape})
    np.testing.assert_allclose(compiled.evaluate({}, {"x": X})["y"], np.exp(2 * X), rtol=1e-12)


def test_create_in_create() -> None:
    inner = ml.Model.create(out=ml.Linear(2)(ml.IOKey("x")))
    model = ml.Model.create(y=inner(ml.IOKey("pixels")) + 1)
    compiled = ml.compile(model, BACKEND, shapes={"pixels": X.shape})
    params = compiled.randomize_params(0)
    expected = numpy_linear(params["model"]["linear"], X) + 1
    np.testing.assert_allclose(compiled.evaluate(params, {"pixels": X})["y"], expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: ml.Model.create(), "at least one output"),
        (lambda x: ml.Model.create(x=x + 1), "name of an input"),
        (lambda x: ml.Model.create(x=x), "name of an input"),
        (lambda x: ml.Model.create(y=object()), "cannot be connected"),
        (lambda x: ml.Relu()(x, x), "1 inputs .* given 2"),
        (lambda x: ml.Relu()(x, input=x), "twice"),
        (lambda x: ml.Relu()(x, inputs=x), "no port 'inputs'"),
        (lambda x: (x + 1).output("left"), "no output 'left'"),
        (lambda x: ml.Model()(x), "0 inputs"),
    ],
)
def test_refused(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make(ml.IOKey("x"))


def test_one_block_is_one_place() -> None:
    relu = ml.Relu()
    twice = relu(relu(ml.IOKey("x")))
    with pytest.raises(ml.WiringError, match="already part of"):
        ml.Model.create(y=twice)
    linear = ml.Linear(2)
    result = linear(ml.IOKey("x"))
    ml.Model.create(y=result)
    with pytest.raises(ml.WiringError, match="already part of"):
        ml.Model.create(y=result)


def test_functional() -> None:
    @ml.functional
    def scores(x: Any, scale: float = 2.0, *, width: int = 4) -> dict[str, Any]:
        hidden = ml.Linear(width)(x)
        return {"scores": hidden * scale, "norm": (hidden**2).sum(-1)}

    assert scores.input_keys == ["x"]
    assert scores.output_keys == ["scores", "norm"]
    compiled = ml.compile(scores, BACKEND, shapes={"x": X.shape})
    params = compiled.randomize_params(0)
    out = compiled.evaluate(params, {"x": X})
    hidden = numpy_linear(params["linear"], X)
    np.testing.assert_allclose(out["scores"], hidden * 2, rtol=1e-12)
    np.testing.assert_allclose(out["norm"], (hidden**2).sum(-1), rtol=1e-12)


def test_functional_with_settings_tuples_and_unused_inputs() -> None:
    def pair(a: Any, unused: Any, *, by: float) -> tuple[Any, Any]:
        return a * by, a + by

    model = ml.functional(by=3.0)(pair)
    assert model.input_keys == ["a", "unused"]
    assert model.output_keys == ["output_0", "output_1"]
    assert ml.functional(lambda x: x + 1).output_keys == ["output"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ml.functional(lambda *x: x), r"takes \*x"),
        (lambda: ml.functional(lambda x: None), "return a connection"),
        (lambda: ml.functional(lambda x: {1: x}), "is not a name"),
        (lambda: ml.functional(lambda x, *, w: x), "needs the setting w"),
        (lambda: ml.functional(lambda x, *, w=1: x, v=2), "no keyword-only parameter 'v'"),
        (lambda: ml.functional(3), "is not a function"),  # type: ignore[arg-type]
    ],
)
def test_functional_refuses(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make()
