"""What is found out only when a compiled model is called, or when somebody does with it what cannot be done."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

BACKENDS: list[Any] = [ml.JaxBackend, lambda: ml.JaxBackend(jit=False), ml.NumpyBackend]
if importlib.util.find_spec("torch") is not None:
    BACKENDS.append(ml.TorchBackend)
IDS = ["jax", "jax without jit", "numpy", "torch"][: len(BACKENDS)]


def model() -> ml.Model:
    model = ml.Model()
    model |= ml.Multiply()(left="x", right=2.0, output="doubled")
    model |= ml.Add()(left="doubled", right="y", output="z")  # the sum
    model.expose("z")
    return model


@pytest.mark.parametrize("make", BACKENDS, ids=IDS)
@pytest.mark.parametrize("how", ["evaluate", "gradients", "apply"])
def test_sizes_that_do_not_fit_name_the_inputs_and_the_place(make: Any, how: str) -> None:
    whole = model()
    line = model.__code__.co_firstlineno + 3
    compiled = ml.compile(whole, make(), shapes={"x": [None], "y": [None]})
    inputs = {"x": np.ones(3, "float32"), "y": np.ones(4, "float32")}
    call: Any = compiled.apply if how == "apply" else compiled.evaluate
    more: Any = {"output_gradients": {"z": np.ones(3, "float32")}} if how == "gradients" else {}
    with pytest.raises(ml.InputError) as caught:
        call({}, inputs, **more)
    text = str(caught.value)
    assert "x (3,), y (4,)" in text
    assert "3 does not broadcast with 4" in text
    assert "add.left" in text
    assert f"test_misfits.py:{line}" in text
    # The model is as it was, and what fits is computed.
    assert compiled.shapes["x"] == (next(iter(compiled.shapes["x"] or ())),)
    fitting = compiled.evaluate({}, {"x": np.ones(4, "float32"), "y": np.ones(4, "float32")})
    np.testing.assert_array_equal(np.asarray(fitting["z"]), np.full(4, 3.0, "float32"))


@pytest.mark.parametrize("make", BACKENDS, ids=IDS)
def test_a_model_of_float32_takes_float64_and_gives_float32(make: Any) -> None:
    compiled = ml.compile(model(), make(), shapes={"x": [None], "y": [None]})
    found = compiled.evaluate({}, {"x": np.ones(2), "y": np.ones(2)})["z"]
    assert str(found.dtype).rpartition(".")[2] == "float32"


@pytest.mark.parametrize("make", BACKENDS, ids=IDS)
def test_compiled_models_are_shared_not_copied_and_not_pickled(make: Any) -> None:
    compiled = ml.compile(model(), make(), shapes={"x": [2], "y": [2]})
    assert copy.deepcopy({"model": compiled})["model"] is compiled
    assert copy.copy(compiled) is compiled
    with pytest.raises(TypeError, match="to_json"):
        pickle.dumps(compiled)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ml.CrossEntropy(weights=5), "weights=5"),  # pyright: ignore[reportArgumentType]
        (lambda: ml.Pad(2), "widths=2"),  # pyright: ignore[reportArgumentType]
        (lambda: ml.Transpose(axes=2), "axes=2"),  # pyright: ignore[reportArgumentType]
        (lambda: ml.Pad("ab"), "widths='ab'"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_one_thing_where_several_are_needed(make: Any, name: str) -> None:
    with pytest.raises(ml.WiringError, match=name):
        make()


@pytest.mark.parametrize("make", BACKENDS, ids=IDS)
def test_whole_numbers_have_no_negative_powers(make: Any) -> None:
    for exponent in (-1, ml.Tensor([2, -1])):
        whole = ml.Model()
        whole.add_input("x", (2,), "int")
        whole |= ml.Power()(left="x", right=exponent, output="y")
        whole.expose("y")
        with pytest.raises(ml.KindError, match=r"power: integers .*Cast"):
            ml.compile(whole, make())


@pytest.mark.parametrize("make", BACKENDS, ids=IDS)
@pytest.mark.parametrize(
    ("block", "want"),
    [
        (lambda: ml.Log(robust=True), np.log(0.7)),
        (lambda: ml.Sqrt(robust=True), np.sqrt(0.7)),
        (lambda: ml.StableReciprocal(), 1 / 0.7),
        (lambda: ml.NormModifier(), 1.3),
        (lambda: ml.NanToNum(), 0.7),
        (lambda: ml.Elu(), 0.7),
        (lambda: ml.Silu(), 0.7 / (1 + np.exp(-0.7))),
    ],
)
def test_operations_on_plain_numbers(make: Any, block: Any, want: float) -> None:
    whole = ml.Model()
    whole |= block()(input=0.7, output="number")
    whole |= ml.Multiply()(left="x", right="number", output="y")
    whole.expose("y")
    found = ml.compile(whole, make(), shapes={"x": [2]}).evaluate({}, {"x": np.array([1, 2], "float32")})["y"]
    assert str(found.dtype).rpartition(".")[2] == "float32"
    np.testing.assert_allclose(np.asarray(found), np.array([1, 2]) * want, rtol=1e-6)
