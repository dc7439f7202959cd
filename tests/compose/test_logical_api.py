"""What is said of connections afterwards: names, shapes, types, values, what is trained and kept; registered ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

BACKEND = ml.JaxBackend(dtype="float64")
X = np.random.default_rng(2).normal(size=(4, 3))


def chain() -> ml.Model:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="h")
    model |= ml.Exp()(input="h", output="y")
    return model


def run(model: ml.Model, params: Any = None, **inputs: Any) -> dict[str, np.ndarray[Any, Any]]:
    shapes = {k: np.shape(v) for k, v in inputs.items()}
    compiled = ml.compile(model, BACKEND, shapes=shapes, jit=False)
    return {k: np.asarray(v) for k, v in compiled.evaluate(params or {}, inputs).items()}


# ---- keys ---------------------------------------------------------------------------------------------------


def test_key_with_a_value_is_no_input() -> None:
    model = ml.Model()
    model |= ml.Multiply()(left="x", right=ml.IOKey("scale", 2.5), output="y")
    assert model.input_keys == ["x"]
    np.testing.assert_allclose(run(model, x=X)["y"], 2.5 * X)


@pytest.mark.parametrize(
    "value", [[1.0, 2.0, 3.0], (1, 2, 3), np.array([1.0, 2.0, 3.0]), ml.Tensor([1, 2, 3])]
)
def test_rows_as_values(value: Any) -> None:
    model = ml.Model.create(y=ml.IOKey("x") * ml.IOKey("row", value))
    np.testing.assert_allclose(run(model, x=X)["y"], X * [1, 2, 3])


def test_lists_have_the_compute_dtype() -> None:
    model = ml.Model.create(
        y=ml.IOKey("x") * [0.1, 0.2, 0.3], z=ml.IOKey("i", type=ml.Tensor[int]) - [-1, -2, -3]
    )
    for dtype in ("float64", "float32", "bfloat16"):
        compiled = ml.compile(model, ml.JaxBackend(dtype=dtype), shapes={"x": (3,), "i": (3,)})
        out = compiled.evaluate({}, {"x": np.ones(3, "float32"), "i": np.arange(3, dtype="int32")})
        assert str(out["z"].dtype) == "int32"
        np.testing.assert_array_equal(out["z"], [1, 3, 5])
        assert compiled.outputs["y"].dtype == dtype


@pytest.mark.parametrize(
    ("given", "kind", "shape"),
    [
        (float, "float", ()),
        (int, "int", ()),
        (bool, "bool", ()),
        ("int", "int", None),
        (ml.Tensor, None, None),
        (ml.Tensor[float], "float", None),
        (ml.Tensor[int], "int", None),
        (ml.int32, "int", None),
        (int | float, None, ()),
        (tuple[int, ...], "int", (None, ...)),
        (list, None, (None, ...)),
    ],
)
def test_types(given: Any, kind: str | None, shape: Any) -> None:
    model = ml.Model()
    model |= ml.Buffer()(input=ml.IOKey("x", type=given), output="y")
    wire = model.wires["x"].find()
    assert wire.kind.find().value == kind
    if shape == ():
        assert wire.shape.known == ()
    other = ml.Model()
    other |= ml.Buffer()(input="x", output="y")
    other.set_types(x=given)
    assert other.wires["y"].find().kind.find().value == kind


def test_interval() -> None:
    model = ml.Model.create(
        y=ml.IOKey("w", shape=(200,), differentiable=True, interval=(2, 3))
        * ml.IOKey("s", 0.5, interval=(0, 1))
    )
    w = np.asarray(ml.compile(model, BACKEND).randomize_params(0)["w"])
    assert 2 <= w.min() < 2.1 < 2.9 < w.max() <= 3
    for bad in (
        lambda: ml.Model.create(y=ml.IOKey("s", 2.0, interval=(0, 1)) + 1),
        lambda: ml.IOKey("x", interval=(0, 1)),
        lambda: ml.IOKey("x", 1.0, interval=(1, 0)),
        lambda: ml.IOKey("x", 1.0, interval="ab"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ml.WiringError, match="interval"):
            bad()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ml.IOKey(3),  # type: ignore[arg-type]
        lambda: ml.IOKey("x", ("n", 3)),
        lambda: ml.IOKey("x", type="double"),
        lambda: ml.IOKey("x", type=str),
        lambda: ml.IOKey("x", expose=1),  # type: ignore[arg-type]
        lambda: ml.Model.create(y=ml.IOKey("x", [[1], [2, 3]]) + 1),
        lambda: ml.Model.create(y=ml.IOKey("x", 1 + 2j) + 1),
        lambda: ml.Model.create(y=ml.IOKey("x") * [True, 2]),
    ],
)
def test_keys_that_are_none(make: Any) -> None:
    with pytest.raises(ml.WiringError):
        make()


# ---- names --------------------------------------------------------------------------------------------------


def test_expose_keys() -> None:
    model = chain()
    model.expose_keys("h", twice=model.y * 2, same="y")
    assert model.output_keys == ["h", "twice", "same"]
    out = run(model, x=X)
    np.testing.assert_allclose(out["twice"], 2 * np.exp(np.maximum(X, 0)), rtol=1e-12)
    np.testing.assert_allclose(out["same"] * 2, out["twice"], rtol=1e-12)
    with pytest.raises(ml.WiringError, match="no port 'z'"):
        model.expose_keys("z")
    with pytest.raises(ml.WiringError, match="already has a connection 'x'"):
        model.expose_keys(x="y")
    assert model.output_keys == ["h", "twice", "same"]


def test_rename_key() -> None:
    model = chain()
    model.expose("h", "y")
    model.rename_key("h", "hidden")
    model.rename_key(old=model.relu.input, new="pixels")
    assert (model.input_keys, model.output_keys) == (["pixels"], ["hidden", "y"])
    assert "h" not in model.wires
    model.rename_key(model.exp.output, "result")
    assert model.output_keys == ["hidden", "result"]
    np.testing.assert_allclose(run(model, pixels=X)["result"], np.exp(np.maximum(X, 0)), rtol=1e-12)
    for old, new in (("nothing", "a"), ("hidden", "result"), ("hidden", "1")):
        with pytest.raises(ml.WiringError):
            model.rename_key(old, new)


def test_connect_and_merge() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="a", output="b")
    model |= ml.Tanh()(input="c", output="d")
    model.merge_connections("a", "c", name="x")
    assert (model.input_keys, model.output_keys) == (["x"], ["b", "d"])
    assert set(run(model, x=X)) == {"b", "d"}
    model = ml.Model()
    model |= ml.Relu()(input="a", output="b")
    model |= ml.Tanh()(input="c", output="d")
    model.connect("b", model.tanh.input)
    assert (model.input_keys, model.output_keys) == (["a"], ["d"])
    np.testing.assert_allclose(run(model, a=X)["d"], np.tanh(np.maximum(X, 0)), rtol=1e-12)
    with pytest.raises(ml.WiringError, match="both are results"):
        model.connect("b", "d")
    with pytest.raises(ml.WiringError, match="at least two"):
        model.connect("b")
    model.connect(model.relu.input, key=ml.IOKey("image", shape=(4, 3)))
    assert ml.compile(model, BACKEND).shapes["d"] == (4, 3)


def test_connect_refused_leaves_the_model_as_it_was() -> None:
    model = ml.Model()
    model |= ml.Relu()(input=ml.IOKey("a", shape=(2, 3)), output="b")
    model |= ml.Relu()(input=ml.IOKey("c", shape=(2, 4)), output="d")
    with pytest.raises(ml.ShapeError, match="test_logical_api"):
        model.connect("a", "c", key="x")
    assert model.input_keys == ["a", "c"]
    assert "x" not in model.wires


# ---- values, types, shapes ----------------------------------------------------------------------------------


def test_set_values_and_shapes_by_port() -> None:
    model = ml.Model()
    model |= ml.Add()(left="x", right="bias", output="y")
    model.set_values(bias=[1.0, 2.0, 3.0])
    model.set_shapes({model.children[0].block.left: (4, None)})
    assert model.input_keys == ["x"]
    np.testing.assert_allclose(run(model, x=X)["y"], X + np.array([1, 2, 3]))
    with pytest.raises(ml.WiringError, match="result of a block"):
        model.set_values(y=1.0)
    with pytest.raises(ml.ShapeError):
        model.set_shapes({"y": (4, 5)})
    with pytest.raises(ml.KindError):
        model.set_types(y=ml.Tensor[int])


def test_set_differentiability() -> None:
    model = ml.Linear(2)
    model.set_differentiability(input=True, weight=False)
    model.set_shapes(input=X.shape)
    compiled = ml.compile(model, BACKEND)
    assert compiled.input_keys == ["weight"]
    assert set(compiled.params) == {("input",), ("bias",)}
    w = np.ones((3, 2))
    params = {"input": X, "bias": np.zeros(2)}
    out, grads = compiled.evaluate(params, {"weight": w}, output_gradients={"output": np.ones((4, 2))})
    np.testing.assert_allclose(out["output"], X @ w, rtol=1e-12)
    np.testing.assert_allclose(grads["input"], np.full((4, 3), 2.0))
    with pytest.raises(ml.WiringError, match="StopGradient"):
        model.set_differentiability(output=False)


def test_a_nested_parameter_becomes_an_input() -> None:
    model = ml.Model()
    model |= ml.Linear(2)(input="x", output="y")
    model.set_differentiability({model.linear.weight: False})
    assert model.input_keys == ["x", "linear_weight"]
    out = run(model, {"linear": {"bias": np.zeros(2)}}, x=X, linear_weight=np.ones((3, 2)))
    np.testing.assert_allclose(out["y"], X @ np.ones((3, 2)), rtol=1e-12)


@pytest.mark.parametrize("initial", [0.0, 2.0, [1.0, 2.0, 3.0]])
def test_bind_state_keys(initial: Any) -> None:
    running = ml.IOKey("running")
    after = running * 0.5 + ml.IOKey("x").mean(0)
    model = ml.Model.create(mean=after, out=ml.IOKey("x") * 1)
    model.bind_state_keys("running", "mean", initial)
    model.set_shapes(mean=(3,))
    assert model.input_keys == ["x"]
    compiled = ml.compile(model, BACKEND, shapes={"x": X.shape})
    state, expected = compiled.init_state(), np.broadcast_to(np.asarray(initial, float), (3,))
    for _ in range(3):
        expected = expected * 0.5 + X.mean(0)
        out, state = compiled.evaluate({}, {"x": X}, state=state)
        np.testing.assert_allclose(out["mean"], expected, rtol=1e-12)
        np.testing.assert_allclose(state["running"], expected, rtol=1e-12)


def test_bind_state_keys_refuses() -> None:
    model = chain()
    for pair, error in (
        (("y", "h"), ml.WiringError),
        (("x", "x"), ml.WiringError),
        (("nothing", "y"), ml.WiringError),
        (("x", "y", "a"), ml.WiringError),
        (("x", "y", True), ml.KindError),
    ):
        with pytest.raises(error):
            model.bind_state_keys(*pair)
    assert model.input_keys == ["x"]


# ---- canonical ends -----------------------------------------------------------------------------------------


def test_canonical_inputs_and_outputs() -> None:
    inner = ml.Model()
    inner |= ml.Subtract()(left="a", right="b", output="c")
    inner |= ml.Exp()(input="c", output="d")
    inner.expose("c", "d")
    inner.set_cins("b")
    inner.set_couts("c")
    assert (inner.cin.key, inner.cout.key) == ("b", "c")
    model = ml.Model()
    model |= ml.Relu()(input="x", output="h")
    model += inner(a="x")
    model += ml.Tanh()(output="y")
    np.testing.assert_allclose(run(model, x=X)["y"], np.tanh(X - np.maximum(X, 0)), rtol=1e-12)
    several = ml.Add()
    outer = ml.Model()
    outer |= several(left="a", right="b")
    outer.set_cins("a", "b")
    with pytest.raises(ml.WiringError, match="2 canonical inputs"):
        _ = outer.cin
    around = ml.Model()
    around |= ml.Relu()(input="x")
    with pytest.raises(ml.WiringError, match="several canonical inputs"):
        around += outer
    with pytest.raises(ml.WiringError, match="is not an input"):
        chain().set_cins("y")
    with pytest.raises(ml.WiringError, match="is not a result"):
        chain().set_couts("x")


def test_what_is_part_of_another_model_is_not_changed() -> None:
    inner, outer = chain(), ml.Model()
    outer |= inner(x="x")
    for change in (
        lambda: inner.rename_key("x", "z"),
        lambda: inner.expose_keys("h"),
        lambda: inner.connect("x", "h"),
        lambda: inner.set_cins("x"),
        lambda: inner.bind_state_keys("x", "y"),
    ):
        with pytest.raises(ml.WiringError, match="already part of"):
            change()


# ---- registered operations ----------------------------------------------------------------------------------


def test_registered_operations_on_two_backends() -> None:
    model = ml.Model()
    model |= ml.Linear(4)(input="input", output="hidden")
    model += ml.op("swish", beta=1.5)(input="hidden", output="hidden_act")
    model |= ml.op("mix")(first="hidden", second="hidden_act", output="mixed")
    model |= ml.Linear(2)(input="mixed", output="output")
    weights = np.random.default_rng(3).normal(size=(3, 4)), np.random.default_rng(4).normal(size=(4, 2))
    params = {
        "linear": {"weight": weights[0], "bias": np.zeros(4)},
        "linear_1": {"weight": weights[1], "bias": np.zeros(2)},
    }
    hidden = X @ weights[0]
    expected = (hidden - 2 * hidden / (1 + np.exp(-1.5 * hidden))) @ weights[1]
    for backend in (BACKEND, ml.NumpyBackend(dtype="float64")):

        @backend.register_op("swish")
        def swish(x: Any, beta: float, backend: Any = backend) -> Any:
            return x * backend.sigmoid(beta * x)

        @backend.register_op("mix")
        def mix(a: Any, b: Any) -> Any:
            return a - 2 * b

        compiled = ml.compile(model, backend, shapes={"input": X.shape})
        np.testing.assert_allclose(compiled.evaluate(params, {"input": X})["output"], expected, rtol=1e-10)


def test_an_operation_that_is_not_registered() -> None:
    backend = ml.JaxBackend()
    backend.register_op("gelu", lambda x: x)
    model = ml.Model.create(y=ml.op("gleu")(ml.IOKey("x")))
    with pytest.raises(
        ml.CompileError, match=r"test_logical_api.*'gleu'.*registered are gelu\. Did you mean 'gelu'"
    ):
        ml.compile(model, backend)
    with pytest.raises(ml.CompileError, match="registered are none"):
        ml.compile(model, ml.JaxBackend())


def test_an_operation_that_bears_the_name_of_a_built_in_one() -> None:
    backend = ml.JaxBackend(dtype="float64")
    backend.register_op("buffer", lambda x: x * 3)
    model = ml.Model.create(y=ml.op("buffer")(ml.IOKey("x")), z=ml.Buffer()(ml.IOKey("x")))
    out = ml.compile(model, backend, shapes={"x": X.shape}).evaluate({}, {"x": X})
    np.testing.assert_allclose(out["y"], 3 * X)
    np.testing.assert_array_equal(out["z"], X)


def test_shapes_of_registered_operations() -> None:
    backend = ml.JaxBackend(dtype="float64")
    backend.register_op("total", lambda x: x.sum(-1))
    x = ml.IOKey("x")
    wrong = ml.Model.create(y=ml.op("total")(x))
    with pytest.raises(ml.ShapeError, match=r"\(4,\).*\(4, 3\)"):
        ml.compile(wrong, backend, shapes={"x": X.shape})
    right = ml.Model.create(y=ml.op("total", shapes={"input": "*b n", "output": "*b"})(ml.IOKey("x")))
    compiled = ml.compile(right, backend, shapes={"x": X.shape})
    assert compiled.shapes["y"] == (4,)
    np.testing.assert_allclose(compiled.evaluate({}, {"x": X})["y"], X.sum(-1), rtol=1e-12)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ml.op("a b"),
        lambda: ml.op("class"),
        lambda: ml.op("f", inputs="ab"),
        lambda: ml.op("f", inputs=["a", "a"]),
        lambda: ml.op("f", inputs=["output"]),
        lambda: ml.op("f", inputs=[]),
        lambda: ml.op("f", inputs=["a"], shapes={"b": ()}),
        lambda: ml.op("f", outputs=()),
        lambda: ml.op("f", rate=[1, 2]),
        lambda: ml.op("f", rate=float("nan")),
        lambda: ml.op("f", inputs=["a"])(b="x"),
    ],
)
def test_operations_that_cannot_be(make: Any) -> None:
    with pytest.raises(ml.WiringError):
        make()
