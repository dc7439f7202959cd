"""TrainModel: the cost is the one written by hand, whatever is added and however it is combined."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from primitive_table import draw

from capibara import compose as ml

m: Any = ml.models  # many calls here are wrong on purpose

QUICK = {"xla_backend_optimization_level": 0}
X, T = draw(6, 3), draw(6, 2, seed=3)


def mlp() -> ml.Model:
    return ml.MLP(3, [4], 2, activation=ml.Tanh)


def forward(p: Any, x: Any) -> Any:
    p = p["model"]
    hidden = jnp.tanh(x @ p["layer_0"]["weight"] + p["layer_0"]["bias"])
    return hidden @ p["layer_1"]["weight"] + p["layer_1"]["bias"]


def check(train: ml.TrainModel, cost: Any, **inputs: Any) -> Any:
    """Outputs, after the cost and its gradient were compared with those of a function written by hand."""
    backend = ml.JaxBackend(dtype="float64")
    shapes = {k: np.shape(v) for k, v in inputs.items()}
    compiled = ml.compile(train, backend, shapes=shapes)
    params = compiled.randomize_params(0)
    with backend.scope():

        def both(p: Any) -> Any:
            out = compiled.apply(p, inputs)
            return out["final_cost"], out

        (got, out), gradient = jax.jit(jax.value_and_grad(both, has_aux=True), compiler_options=QUICK)(params)
        want, wanted = jax.value_and_grad(cost)(params)
        np.testing.assert_allclose(got, want, rtol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14), gradient, wanted)
        return jax.tree.map(np.asarray, out)


def l1(x: Any) -> Any:
    return (x * jnp.sign(x)).sum()  # jnp.abs has the gradient 1 at 0, where biases start


def squared(p: Any) -> Any:
    return jnp.mean((forward(p, X) - T) ** 2)


def test_one_loss() -> None:
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), input="output", target="target")
    out = check(train, squared, input=X, target=T)
    assert set(out) == {"output", "loss", "final_cost"}
    assert out["loss"] == out["final_cost"]


def test_losses_with_steps_factors_and_names() -> None:
    train = m.TrainModel(mlp())
    steps = [m.Sum(1), m.Max()]
    train.add_loss(m.AbsoluteError(), steps, "far", 0.5, input="output", target="target")
    train.add_loss(m.SquaredError(), [m.Mean], input="output", target="target")
    train.add_loss(m.SquaredError(), key_name="plain", input="output", target=0.25)

    def cost(p: Any) -> Any:
        y = forward(p, X)
        far = 0.5 * jnp.max(jnp.abs(y - T).sum(1))
        return far + jnp.mean((y - T) ** 2) + jnp.mean((y - 0.25) ** 2)

    out = check(train, cost, input=X, target=T)
    np.testing.assert_allclose(out["far"], 0.5 * abs(out["output"] - T).sum(1).max())
    np.testing.assert_allclose(out["plain"], ((out["output"] - 0.25) ** 2).mean())


@pytest.mark.parametrize(("combiner", "how"), [(m.Max, jnp.maximum), (m.Prod, jnp.multiply)])
def test_another_combination_of_losses(combiner: Any, how: Any) -> None:
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), input="output", target="target")
    train.add_loss(m.AbsoluteError(), input="output", target="target")
    train.set_loss_combiner(combiner())

    def cost(p: Any) -> Any:
        return how(squared(p), jnp.mean(jnp.abs(forward(p, X) - T)))

    check(train, cost, input=X, target=T)


def test_regularisation_by_key_and_by_pattern() -> None:
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), input="output", target="target")
    train.add_regularization(m.L1(), 0.3, "sizes", input="layer_1.bias")
    train.add_regularization(m.L2(), 0.2, "squares", input=re.compile(r"weight$"))
    train.add_regularization(m.L2(), 0.1, input=train.model.layer_0.bias)

    def cost(p: Any) -> Any:
        q = p["model"]
        weights = sum(0.5 * (q[k]["weight"] ** 2).sum() for k in ("layer_0", "layer_1"))
        bias = 0.5 * (q["layer_0"]["bias"] ** 2).sum()
        return squared(p) + 0.3 * l1(q["layer_1"]["bias"]) + 0.2 * weights + 0.1 * bias

    out = check(train, cost, input=X, target=T)
    assert set(out) == {"output", "loss", "sizes", "squares", "final_cost"}
    np.testing.assert_allclose(out["final_cost"] - out["loss"], 0.2 * out["squares"], rtol=1e-9)


@pytest.mark.parametrize("steps", [None, [m.Mean(0), m.Sum()], [m.Mean(0), m.Mean()], [m.Sum()]])
def test_regularisation_for_any_batch_size(steps: Any) -> None:
    """Divided by what the loss is averaged over; by the geometric mean for two losses."""
    train = m.TrainModel(mlp(), geometric_mean=True)
    train.add_loss(m.SquaredError(), steps, input="output", target="target")
    train.add_loss(m.AbsoluteError(), [m.Mean()], input="output", target="target")
    train.add_regularization(m.L2(), 0.2, input="layer_0.weight")
    names = [type(s).__name__ for s in steps] if steps else ["Mean"]
    average = {("Mean",): 12, ("Mean", "Sum"): 6, ("Mean", "Mean"): 12, ("Sum",): None}[tuple(names)]
    count = 12 if average is None else (average * 12) ** 0.5
    total = {("Mean",): 1 / 12, ("Mean", "Sum"): 1 / 6, ("Mean", "Mean"): 1 / 12, ("Sum",): 1}[tuple(names)]

    def cost(p: Any) -> Any:
        error = forward(p, X) - T
        both = total * (error**2).sum() + jnp.mean(jnp.abs(error))
        return both + 0.2 * 0.5 * (p["model"]["layer_0"]["weight"] ** 2).sum() / count

    check(train, cost, input=X, target=T)


def test_only_the_losses_of_a_parameter_count() -> None:
    model = ml.Model()
    model |= ml.Linear(2, name="one")(input="x", output="a")
    model |= ml.Linear(5, name="two")(input="x", output="b")
    model.expose("a", "b")
    train = m.TrainModel(model, geometric_mean=True)
    train.add_loss(m.SquaredError(), input="a", target=0.0)
    train.add_loss(m.SquaredError(), input="b", target=0.0)
    train.add_regularization(m.L2(), 1.0, input=re.compile("weight"))

    def cost(p: Any) -> Any:
        one, two = (p["model"][k] for k in ("one", "two"))
        a, b = (X @ q["weight"] + q["bias"] for q in (one, two))
        sizes = [0.5 * (q["weight"] ** 2).sum() for q in (one, two)]
        return (a**2).mean() + (b**2).mean() + sizes[0] / 12 + sizes[1] / 30

    check(train, cost, x=X)


def test_metrics_are_outputs_and_no_cost() -> None:
    train = m.TrainModel(mlp())
    train.add_loss(m.CrossEntropy(), input="output", target="label")
    train.add_metric(m.Accuracy(is_label_one_hot=False), key_name="accuracy", pred="output", label="label")
    train.add_metric(m.Absolute(), [m.Sum(1), m.Max()], input="output")
    label = np.array([0, 1, 1, 0, 1, 1], "int32")

    def cost(p: Any) -> Any:
        y = forward(p, X)
        return (jax.nn.logsumexp(y, axis=1) - y[jnp.arange(6), label]).mean()

    out = check(train, cost, input=X, label=label)
    np.testing.assert_allclose(out["accuracy"], (out["output"].argmax(1) == label).mean())
    np.testing.assert_allclose(out["metric"], abs(out["output"]).sum(1).max())


def test_it_trains() -> None:
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), input="output", target="target")
    train.add_regularization(m.L2(), 1e-3, input=re.compile("weight"))
    compiled = ml.compile(train, shapes={"input": (32, 3), "target": (32, 2)})
    x = draw(32, 3).astype("float32")
    inputs = {"input": x, "target": np.stack([x[:, 0] * x[:, 1], np.sin(x[:, 2])], 1)}
    params = compiled.randomize_params(0)
    costs = []
    for _ in range(60):
        outputs, gradients = compiled.evaluate(params, inputs, {"final_cost": np.float32(1)})
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        costs.append(float(outputs["final_cost"]))
    assert costs[-1] < 0.6 * costs[0]


def bad(what: str) -> Any:
    train = m.TrainModel(mlp())
    loss = {"input": "output", "target": "target"}
    if what == "no loss":
        return ml.compile(train)
    if what == "finalized":
        train.add_loss(m.SquaredError(), **loss)
        ml.compile(train)
        return train.add_loss(m.SquaredError(), **loss)
    return {
        "no model": lambda: m.TrainModel(m.Relu()),
        "unconnected": lambda: train.add_loss(m.SquaredError(), input="outputs", target="target"),
        "missing": lambda: train.add_loss(m.SquaredError(), input="output"),
        "port": lambda: train.add_loss(m.SquaredError(), inputs="output", target="target"),
        "steps": lambda: train.add_loss(m.SquaredError(), m.Mean(), **loss),
        "step": lambda: train.add_loss(m.SquaredError(), ["mean"], **loss),
        "coef": lambda: train.add_loss(m.SquaredError(), coef="1", **loss),
        "taken": lambda: train.add_loss(m.SquaredError(), key_name="output", **loss),
        "parameter": lambda: train.add_regularization(m.L2(), 1.0, input="layer_0.wieght"),
        "pattern": lambda: train.add_regularization(m.L2(), 1.0, input=re.compile("scale")),
        "two": lambda: train.add_regularization(
            m.QuadraticFormRegularizer(), 1.0, input=re.compile("weight"), kernel="k"
        ),
        "extend": lambda: train.__ior__(m.Relu()(input="output")),
        "combiner": lambda: train.set_loss_combiner("sum"),
        "metric": lambda: train.add_metric(m.Accuracy(), pred="prediction", label="label"),
    }[what]()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("no loss", r"needs a loss"),
        ("finalized", r"is finalized"),
        ("no model", r"must be a Model"),
        ("unconnected", r"nothing joins the loss SquaredError.*did you mean 'output'"),
        ("missing", r"connect target too"),
        ("port", r"no port 'inputs'"),
        ("steps", r"reduce_steps=.*must be a list"),
        ("step", r"'mean' is not a block"),
        ("coef", r"coef='1'"),
        ("taken", r"already has a connection 'output'"),
        ("parameter", r"not a parameter of the model.*did you mean 'layer_0\.weight'"),
        ("pattern", r"no parameter matches 'scale'; the parameters are layer_0\.weight"),
        ("two", r"one input"),
        ("extend", r"add_loss, add_regularization and add_metric only"),
        ("combiner", r"loss_combiner='sum'"),
        ("metric", r"nothing joins the metric"),
    ],
)
def test_what_is_refused(what: str, message: str) -> None:
    with pytest.raises(ml.WiringError, match=f"(?i){message}"):
        bad(what)


def test_a_scalar_is_what_is_left() -> None:
    """A loss that keeps a dimension makes no scalar cost."""
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), [m.Mean(0)], input="output", target="target")
    with pytest.raises(ml.ShapeError, match="more than one element"):
        ml.compile(train, shapes={"input": (6, 3), "target": (6, 2)})
    train = m.TrainModel(mlp())
    train.add_loss(m.SquaredError(), [m.Mean(0)], input="output", target="target")
    compiled = ml.compile(train)
    with pytest.raises(ml.InputError, match="not one element"):
        compiled.evaluate(compiled.randomize_params(), {"input": X, "target": T})
