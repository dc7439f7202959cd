"""What ``compile`` is told beside the model: fixed, trained and discarded keys, inference, names, text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import Normal


def two_layers() -> ml.Model:
    model = ml.Model()
    model.add(ml.Linear(4), "first", input="x", output="h")
    model |= ml.Relu()(input="h", output="r")
    model.add(ml.Linear(2), "second", input="r", output="y")
    model.expose("h", "y")
    return model


def product() -> ml.Model:
    model = ml.Model()
    model |= ml.Multiply()(left="a", right="b", output="output")
    model.expose("output")
    return model


def test_backend_is_the_second_argument_and_may_be_named() -> None:
    backend = ml.JaxBackend()
    assert ml.compile(product(), backend).backend is backend
    assert ml.compile(model=product(), backend=backend).backend is backend


@pytest.mark.parametrize("value", [[1.0, 2.0], np.array([1.0, 2.0]), jnp.array([1.0, 2.0])])
def test_constant_keys_are_no_inputs(value: Any) -> None:
    model = product()
    compiled = ml.compile(model, constant_keys={"a": value})
    assert compiled.input_keys == ["b"]
    out = compiled.evaluate({}, {"b": jnp.array([3.0, 4.0])})["output"]
    np.testing.assert_array_equal(out, [3.0, 8.0])
    assert out.dtype == jnp.float32
    # The model is as it was.
    assert model.input_keys == ["a", "b"]
    free = ml.compile(model)
    np.testing.assert_array_equal(
        free.evaluate({}, {"a": jnp.ones(3), "b": jnp.ones(3)})["output"], np.ones(3)
    )


def test_constant_keys_with_every_input_leave_nothing_to_give() -> None:
    compiled = ml.compile(product(), constant_keys={"a": 2.0, "b": [1.0, 2.0]})
    np.testing.assert_array_equal(compiled.evaluate({}, {})["output"], [2.0, 4.0])


def test_constants_have_the_compute_dtype() -> None:
    compiled = ml.compile(product(), ml.JaxBackend(dtype="bfloat16"), constant_keys={"a": np.ones(2)})
    assert compiled.evaluate({}, {"b": jnp.ones(2, "bfloat16")})["output"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"z": 1.0}, "constant_keys names 'z'"),
        ({"a": "text"}, "of dtype"),
        ({"a": [[1.0], [1.0, 2.0]]}, "is not an array|of dtype"),
        ({"a": object()}, "of dtype"),
        ([1], "must be a dict"),
        ({"output": 1.0}, "is not an input"),
        ({"a": [2**40]}, "int32"),
        ({3: 1.0}, "give a name"),
    ],
)
def test_wrong_constants(fixed: Any, words: str) -> None:
    with pytest.raises(ml.ComposeError, match=words):
        ml.compile(product(), constant_keys=fixed)


def test_constants_that_do_not_fit() -> None:
    with pytest.raises(ml.ShapeError, match="constant_keys: 'x'"):
        ml.compile(two_layers(), constant_keys={"x": 1.0})
    with pytest.raises(ml.KindError, match="constant_keys: 'x'"):
        ml.compile(two_layers(), constant_keys={"x": np.ones((1, 3), "int32")})


def test_trainable_input_is_a_parameter() -> None:
    compiled = ml.compile(product(), trainable_keys={"a"}, shapes={"a": [3]})
    assert compiled.input_keys == ["b"]
    params = compiled.randomize_params(0)
    assert params["a"].shape == (3,)
    b = jnp.array([1.0, 2.0, 3.0])
    outputs, gradients = compiled.evaluate(params, {"b": b}, {"output": jnp.ones(3)})
    np.testing.assert_array_equal(outputs["output"], params["a"] * b)
    np.testing.assert_array_equal(gradients["a"], b)


def test_trainable_by_port() -> None:
    model = ml.Model()
    product = ml.Multiply()
    model |= product(left="a", right="b", output="output")
    compiled = ml.compile(model, trainable_keys=[product.left], shapes={"a": [2]})
    assert list(compiled.randomize_params()) == ["a"]


def test_trainable_must_be_an_input_of_floats() -> None:
    with pytest.raises(ml.CompileError, match="'r', which is not an input"):
        ml.compile(two_layers(), trainable_keys="r")
    model = ml.Model()
    model |= ml.Embedding(3, 2)(input="tokens", output="y")
    with pytest.raises(ml.KindError, match="trainable_keys: 'tokens'"):
        ml.compile(model, trainable_keys={"tokens"})
    with pytest.raises(ml.CompileError, match="both data_keys and trainable_keys"):
        ml.compile(two_layers(), trainable_keys={"x"}, data_keys={"x"})


def test_parameter_as_data() -> None:
    compiled = ml.compile(two_layers(), shapes={"x": [3, 5]}, data_keys={"first.weight"})
    assert compiled.input_keys == ["x", "first_weight"]
    params = compiled.randomize_params()
    assert list(params["first"]) == ["bias"]
    x, weight = jnp.ones((3, 5)), jnp.full((5, 4), 2.0)
    outputs, gradients = compiled.evaluate(params, {"x": x, "first_weight": weight}, {"h": jnp.ones((3, 4))})
    np.testing.assert_allclose(outputs["h"], np.full((3, 4), 10.0))
    assert list(gradients["first"]) == ["bias"]


def test_discarded_outputs_take_with_them_what_only_they_need() -> None:
    model = two_layers()
    compiled = ml.compile(model, shapes={"x": [3, 5]}, discard_keys={"y"})
    assert compiled.output_keys == ["h"]
    assert list(compiled.randomize_params()) == ["first"]
    assert "relu" not in compiled.source
    with pytest.raises(ml.CompileError, match="nothing would be left"):
        ml.compile(model, discard_keys=["y", "h"])
    with pytest.raises(ml.CompileError, match=r"'yy', which is not an output.*Did you mean"):
        ml.compile(model, discard_keys=["yy"])


def test_inference_has_no_gradients() -> None:
    model = ml.Model()
    model.add(ml.Linear(3), "layer", input="x", output="h")
    model |= ml.Dropout(0.9)(input="h", output="y")
    compiled = ml.compile(model, shapes={"x": [2, 3]}, inference=True)
    params, x = compiled.randomize_params(), {"x": jnp.ones((2, 3))}
    with pytest.raises(ml.InputError, match="inference=True and has no gradients"):
        compiled.evaluate(params, x, {"y": jnp.ones((2, 3))})
    with pytest.raises(ml.InputError, match="cannot be trained"):
        compiled.evaluate(params, x, train=True)
    with pytest.raises(ml.InputError, match="cannot be trained"):
        compiled.apply(params, x, train=True)
    np.testing.assert_allclose(
        compiled.evaluate(params, x)["y"],
        x["x"] @ params["layer"]["weight"] + params["layer"]["bias"],
        rtol=1e-5,
    )


def test_unnamed_inputs() -> None:
    model = ml.Model()
    model.add(ml.Add(), "sum", left="x", output="y")
    with pytest.raises(ml.UnconnectedError, match="'right'"):
        ml.compile(model)
    compiled = ml.compile(model, safe_names=False)
    assert compiled.input_keys == ["x", "sum_right"]
    out = compiled.evaluate({}, {"x": jnp.ones(2), "sum_right": jnp.ones(2)})["y"]
    np.testing.assert_array_equal(out, [2, 2])


def test_shapes_are_compared_unless_told_otherwise() -> None:
    given = {"a": jnp.ones((2, 3)), "b": jnp.ones((2, 1))}
    shapes = {"a": [2, 3], "b": [2, 3]}
    for jit in (True, False):
        with pytest.raises(ml.InputError, match="expected"):
            ml.compile(product(), shapes=shapes, jit=jit).evaluate({}, given)
        out = ml.compile(product(), shapes=shapes, jit=jit, safe_shapes=False).evaluate({}, given)["output"]
        assert out.shape == (2, 3)


def test_names_short_and_long() -> None:
    inner, outer, whole = ml.Model(), ml.Model(), ml.Model()
    inner.add(ml.Linear(2), "deep", input="input", output="output")
    outer.add(inner, "inner", input="input", output="output")
    whole.add(outer, "outer", input="x", output="y")
    source = ml.compile(whole).source
    assert "inner_deep_sum = " in source
    assert "outer_inner_deep_sum" not in source
    assert "outer_inner_deep_sum = " in ml.compile(whole, use_short_namings=False).source


def test_verbose_prints_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    compiled = ml.compile(two_layers(), shapes={"x": [3, 5]}, verbose=True)
    text = capsys.readouterr().out
    assert text == compiled.summary(verbose=False) + "\n"
    assert capsys.readouterr().out == ""
    assert compiled.summary() + "\n" == text == capsys.readouterr().out
    for part in ("x", "(3, 5)", "first.weight", "(5, 4)", "20", "operations: 5"):
        assert part in text, part


@pytest.mark.parametrize("flag", ["inference", "verbose", "safe_shapes", "safe_names", "use_short_namings"])
def test_flags_are_bools(flag: str) -> None:
    with pytest.raises(ml.CompileError, match=f"{flag}=1 must be True or False"):
        ml.compile(product(), **{flag: 1})  # type: ignore[arg-type]


def test_get_shapes() -> None:
    compiled = ml.compile(two_layers(), shapes={"x": [None, 5]})
    assert compiled.get_shapes()["first.weight"] == (5, 4)
    assert isinstance(compiled.get_shapes()["x"][0], str)  # type: ignore[index]
    assert compiled.get_shapes(symbolic=False)["x"] == (None, 5)


def test_initialisers_by_name_and_pattern() -> None:
    compiled = ml.compile(two_layers(), shapes={"x": [3, 5]})
    usual = compiled.randomize_params(1)
    params = compiled.randomize_params(1, init={"second.weight": Normal(5.0), "*.bias": 0.25})
    np.testing.assert_array_equal(params["first"]["bias"], np.full(4, 0.25))
    np.testing.assert_array_equal(params["first"]["weight"], usual["first"]["weight"])
    assert np.std(params["second"]["weight"]) > 1
    everything = compiled.randomize_params(1, init=jax.nn.initializers.ones)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(everything))
    np.testing.assert_array_equal(compiled.randomize_params(1)["second"]["weight"], usual["second"]["weight"])
    with pytest.raises(ml.CompileError, match=r"fits no parameter.*Did you mean 'first.weight'"):
        compiled.randomize_params(init={"fist.weight": 1.0})
    with pytest.raises(ml.CompileError, match="must be an initialiser"):
        compiled.randomize_params(init={"*": "ones"})


def test_proposed_shardings_are_where_parameters_land() -> None:
    backend = ml.JaxBackend(device_mesh=(1,))
    compiled = ml.compile(ml.MLP(4, [8], 2), backend, shapes={"input": [4, 4]})
    proposed = compiled.propose_shardings()
    params = compiled.randomize_params()
    jax.tree.map(lambda a, s: np.testing.assert_equal(a.sharding, s), params, proposed["params"])
    assert set(proposed["inputs"]) == {"input"}
    with pytest.raises(ml.CompileError, match="no mesh"):
        ml.compile(ml.Linear(2)).propose_shardings()
