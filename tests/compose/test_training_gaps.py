"""``TrainModel`` and models with bound states: repeated blocks, and the way to JSON and back."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml


def around(block: Any) -> Any:
    model = ml.Model()
    model.add(ml.Linear(4), "first", input="input", output="hidden")
    model.add(block, "deep", input="hidden", output="output")
    model.expose("output")
    train = ml.TrainModel(model)
    train.add_loss(ml.SquaredError(), input="output", target="target")
    return train


BLOCKS = {
    "repeat": lambda: ml.Repeat(ml.Linear(4), 3, mode="unroll"),
    "scan": lambda: ml.Repeat(ml.Linear(4), 3, mode="scan"),
    "remat": lambda: ml.Remat(ml.Linear(4)),
    "both": lambda: ml.Repeat(ml.Remat(ml.Linear(4)), 3),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_parameters_inside_repeated_blocks_are_never_left_out_in_silence(name: str) -> None:
    train = around(BLOCKS[name]())
    compiled = ml.compile(around(BLOCKS[name]()), shapes={"input": [2, 4]})
    (path,) = [".".join(p[1:]) for p in compiled.params if p[1] == "deep" and p[-1] == "weight"]
    for given in (re.compile("weight"), path):
        with pytest.raises(ml.WiringError, match=rf"inside Repeat or Remat.*{re.escape(path)}.*final_cost"):
            train.add_regularization(ml.L2(), 0.1, input=given)
    # Those outside can be had.
    train.add_regularization(ml.L2(), 0.1, input=re.compile(r"^first\.weight"))
    whole = ml.compile(train, shapes={"input": [2, 4]})
    params = whole.randomize_params(0)
    ones = np.ones((2, 4), "float32")
    found = whole.evaluate(params, {"input": ones, "target": ones})
    penalty = 0.05 * np.sum(np.square(np.asarray(params["model"]["first"]["weight"])))
    np.testing.assert_allclose(found["final_cost"] - found["loss"], penalty, rtol=1e-4)


def train_model() -> Any:
    train = ml.TrainModel(ml.MLP(4, [5], 2), geometric_mean=True)
    train.add_loss(ml.SquaredError(), input="output", target="target", coef=2.0, key_name="squared")
    train.add_loss(ml.AbsoluteError(), [ml.Sum(1), ml.Mean()], input="output", target="target")
    train.add_regularization(ml.L2(), 0.1, input=re.compile("weight"), key_name="penalty")
    train.add_metric(ml.AbsoluteError(), [ml.Mean()], key_name="far", input="output", target="target")
    return train


@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_a_train_model_comes_back_from_json(kind: str) -> None:
    backend: Any = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend}[kind]()
    original = train_model()
    again = ml.from_json(ml.to_json(original))
    rng = np.random.default_rng(0)
    inputs = {"input": rng.normal(size=(3, 4)).astype("float32"), "target": np.ones((3, 2), "float32")}
    results = []
    for model in (original, again):
        compiled = ml.compile(model, backend, shapes={"input": [3, 4], "target": [3, 2]})
        params = compiled.randomize_params(2)
        results.append((compiled, compiled.evaluate(params, inputs, {"final_cost": np.ones((), "float32")})))
    (one, (outputs, gradients)), (other, (outputs1, gradients1)) = results
    assert one.source.splitlines()[1:] == other.source.splitlines()[1:]
    assert set(outputs) == set(outputs1) == {"output", "squared", "penalty", "far", "loss", "final_cost"}
    for key in outputs:
        np.testing.assert_array_equal(outputs[key], outputs1[key])
    for layer, row in gradients["model"].items():
        for key, value in row.items():
            np.testing.assert_array_equal(value, gradients1["model"][layer][key])


@pytest.mark.parametrize("kind", ["jax", "numpy", "torch"])
@pytest.mark.parametrize("start", [0, 2.5, [1.0, 2.0, 3.0], np.arange(3.0)])
def test_bound_states_come_back_from_json(kind: str, start: Any) -> None:
    if kind == "torch":
        pytest.importorskip("torch")
    backend: Any = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend}.get(kind, ml.TorchBackend)()
    model = ml.Model()
    model |= ml.Add()(left="x", right="before", output="after")
    model |= ml.Multiply()(left="after", right=2.0, output="y")
    model.expose("y")
    model.set_shapes(x=[3], before=[3])
    model.bind_state_keys("before", "after", start)
    x = backend.array([1.0, 1.0, 1.0])
    for each in (model, ml.from_json(ml.to_json(model))):
        compiled = ml.compile(each, backend)
        state = compiled.init_state()
        total = np.broadcast_to(np.asarray(start, "float64"), (3,))
        for _ in range(2):
            outputs, state = compiled.evaluate({}, {"x": x}, state=state)
            total = total + 1
            np.testing.assert_allclose(np.asarray(outputs["y"]), 2 * total, rtol=1e-6)
            np.testing.assert_allclose(np.asarray(state["before"]), total, rtol=1e-6)


@pytest.mark.parametrize(
    "value",
    [
        {"array": {"dtype": "float64", "shape": [10**9], "data": [1.0]}},
        {"array": {"dtype": "object", "shape": [1], "data": [1.0]}},
        "__import__('os')",
        {"array": {"dtype": "float64", "shape": [7], "data": [0.0] * 7}},
    ],
)
def test_a_starting_array_from_outside_is_checked(value: Any) -> None:
    import json

    model = ml.Model()
    model |= ml.Add()(left="x", right="before", output="after")
    model.bind_state_keys("before", "after", [1.0, 2.0, 3.0])
    model.expose("after")
    document = json.loads(ml.to_json(model))

    def put(node: Any) -> int:
        if isinstance(node, dict):
            if node.get("class") == "Given":
                node["value"] = value
                return 1
            return sum(map(put, node.values()))
        return sum(map(put, node)) if isinstance(node, list) else 0

    assert put(document) == 1
    with pytest.raises(ml.ComposeError):
        ml.compile(ml.from_json(json.dumps(document))).init_state()
