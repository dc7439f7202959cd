"""What a user gets wrong: each is one of Capibara's own errors, that names what came and what to do."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.models import IOKey

BACKENDS = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}


@pytest.fixture(params=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "torch":
        pytest.importorskip("torch")
    return BACKENDS[request.param]()


def network() -> ml.Model:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="h")
    model += ml.Tanh()
    model += ml.Linear(2)(output="y")
    return model


# ---- what calls are given -----------------------------------------------------------------------------------------


def test_unknown_parameters(backend: Any) -> None:
    compiled = ml.compile(network(), backend, shapes={"x": [None, 3]})
    params = compiled.randomize_params()
    x = {"x": backend.ones(2, 3)}
    for wrong, text in (
        ({**params, "linaer": params["linear"]}, "'linaer'.*Did you mean 'linear'"),
        ({**params, "linear": {**params["linear"], "wieght": backend.ones(3, 4)}}, "'wieght'.*'weight'"),
        ({**params, 3: backend.ones(2)}, "params has 3"),
    ):
        with pytest.raises(ml.InputError, match=text):
            compiled.evaluate(wrong, x)
        with pytest.raises(ml.InputError, match=text):
            compiled.evaluate(wrong, x, {"y": backend.ones(2, 2)})
        with pytest.raises(ml.InputError, match=text):
            compiled.apply(wrong, x)


def test_parameters_of_the_whole_model_fit_a_part_of_it(backend: Any) -> None:
    def two() -> ml.Model:
        model = network()
        model |= ml.Linear(3)(input="h", output="other")
        model.expose("y", "other")
        return model

    whole = ml.compile(two(), backend, shapes={"x": [None, 3]})
    params, x = whole.randomize_params(), {"x": backend.ones(2, 3)}
    part = ml.compile(two(), backend, shapes={"x": [None, 3]}, discard_keys=["other"])
    assert len(part.params) == len(whole.params) - 2
    y = whole.evaluate(params, x)["y"]
    np.testing.assert_array_equal(backend.to_numpy(part.evaluate(params, x)["y"]), backend.to_numpy(y))
    moved = ml.compile(two(), backend, shapes={"x": [None, 3]}, data_keys=["linear.weight"])
    out = moved.evaluate(params, {**x, "linear_weight": params["linear"]["weight"]})
    np.testing.assert_array_equal(backend.to_numpy(out["y"]), backend.to_numpy(y))


def test_unknown_states() -> None:
    compiled = ml.compile(ml.VectorQuantiser(8, 4), shapes={"input": [None, 4]})
    state = compiled.init_state()
    with pytest.raises(ml.InputError, match="state has 'codebok'"):
        compiled.evaluate({}, {"input": np.ones((3, 4), "float32")}, state={**state, "codebok": 1})


@pytest.mark.parametrize("kind", [MappingProxyType, OrderedDict, dict])
def test_any_mapping_holds_parameters(backend: Any, kind: Any) -> None:
    compiled = ml.compile(network(), backend, shapes={"x": [None, 3]})
    params = compiled.randomize_params()
    given = kind({k: kind(v) for k, v in params.items()})
    x, back = {"x": backend.ones(2, 3)}, {"y": backend.ones(2, 2)}
    outputs, gradients = compiled.evaluate(params, x, back)
    mine, found = compiled.evaluate(given, kind(x), kind(back))
    np.testing.assert_array_equal(backend.to_numpy(mine["y"]), backend.to_numpy(outputs["y"]))
    for block, arrays in gradients.items():
        for key, value in arrays.items():
            np.testing.assert_array_equal(backend.to_numpy(found[block][key]), backend.to_numpy(value))
    assert set(compiled.evaluate(given, kind(x))) == set(compiled.apply(given, kind(x))) == {"y"}


# ---- methods of backends ------------------------------------------------------------------------------------------

WRONG: dict[str, Any] = {
    "rand of 10**30": lambda b: b.rand(10**30),
    "zeros of -1": lambda b: b.zeros(-1),
    "zeros that overflow": lambda b: b.zeros(10**12, 10**9),
    "zeros by nothing": lambda b: b.zeros(0, 10**12, 10**9),
    "normal of 10**30": lambda b: b.random_normal(shape=(10**30,)),
    "eye of 10**20": lambda b: b.eye(10**20),
    "arange to 10**30": lambda b: b.arange(10**30),
    "arange to infinity": lambda b: b.arange(float("inf")),
    "arange of text": lambda b: b.arange("3"),
    "linspace of 10**30": lambda b: b.linspace(0, 1, 10**30),
    "full of text": lambda b: b.full((2,), "a"),
    "full of complex": lambda b: b.full((2,), 1j),
    "randint to 10**30": lambda b: b.randint(0, 10**30, 3),
    "randint of floats": lambda b: b.randint(0.5, 3, 3),
    "randint in float32": lambda b: b.randint(0, 3, 3, dtype=ml.float32),
    "uniform of text": lambda b: b.rand_uniform("a", 1, 3),
    "reshape": lambda b: b.reshape(b.ones(12), (5,)),
    "reshape to floats": lambda b: b.reshape(b.ones(12), (2.0, 6)),
    "broadcast to 10**30": lambda b: b.broadcast_to(b.ones(3), (10**30,)),
    "sum of different shapes": lambda b: b.add(b.ones(3), b.ones(4)),
    "matrix product": lambda b: b.matmul(b.ones(3, 4), b.ones(3, 4)),
    "sum over an axis": lambda b: b.sum(b.ones(3), axis=4),
    "mean over an axis": lambda b: b.mean(b.ones(3), axis=-2),
    "max over an axis": lambda b: b.max(b.ones(3), axis=(0, 1)),
    "flip": lambda b: b.flip(b.ones(3), 4),
    "flip of a scalar": lambda b: b.flip(b.ones(()), 0),
    "split over an axis": lambda b: b.split(b.ones(4), 2, axis=3),
    "split of text": lambda b: b.split("ab", 2),
    "expand_dims": lambda b: b.expand_dims(b.ones(3), 5),
    "swapaxes": lambda b: b.swapaxes(b.ones(3, 2), 0, 3),
    "concat": lambda b: b.concat([b.ones(3), b.ones(3, 3)]),
    "concat of nothing": lambda b: b.concat([]),
    "concat of a number": lambda b: b.concat(3),
    "stack of nothing": lambda b: b.stack([]),
    "text": lambda b: b.relu("a"),
    "text and an array": lambda b: b.add("a", b.ones(3)),
    "softmax": lambda b: b.softmax(b.ones(2), 7),
    "transpose": lambda b: b.transpose(b.ones(2, 3), (0, 0)),
    "take by floats": lambda b: b.take(b.ones(3), b.ones(2)),
    "gather by floats": lambda b: b.gather(b.ones(3), b.ones(2)),
    "pad of text": lambda b: b.pad(b.ones(3), "a"),
    "pad by 10**30": lambda b: b.pad(b.ones(3), 10**30),
    "topk": lambda b: b.topk(b.ones(3), 1.5),
    "IOKey": lambda b: b.exp(IOKey("x")),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_methods_refuse(backend: Any, what: str) -> None:
    with pytest.raises(ml.InputError):
        WRONG[what](backend)


def test_refusals_name_the_method_and_what_it_was_given(backend: Any) -> None:
    with pytest.raises(ml.InputError, match=r"^add\(float32\[3\], float32\[4\]\): "):
        backend.add(backend.ones(3), backend.ones(4))
    with pytest.raises(ml.InputError, match=r"dimensions has no such axis|^sum\("):
        backend.sum(backend.ones(3), axis=4)


def test_errors_of_functions_that_are_transformed_are_their_own(backend: Any) -> None:
    def broken(x: Any) -> Any:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        backend.grad(broken)(backend.ones(()))
    assert not isinstance(caught.value, ml.ComposeError)


@pytest.mark.parametrize("name", ["class", "None", "lambda", "a b", "1st", "", 3])
def test_names_of_operations(backend: Any, name: Any) -> None:
    with pytest.raises(ml.WiringError, match="must be an identifier"):
        backend.register_op(name, lambda x: x)


# ---- models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [True, np.bool_(True), 2.0, -1, 10**40, "9" * 5000, b"a", [3], IOKey("n")])
def test_sizes(size: Any) -> None:
    with pytest.raises(ml.ShapeError, match=r"neither a size nor a name|negative|more than any array"):
        ml.compile(network(), shapes={"x": [size, 3]})


def test_integers_meet_floats() -> None:
    model = ml.Model()
    model.add_input("count", ("n",), "int")
    model.add_input("price", ("n",), "float")
    with pytest.raises(ml.KindError, match=r"float is not int: make the int a float with Cast\('float32'\)"):
        model |= ml.Multiply()(left="count", right="price", output="cost")
    model |= ml.Cast("float32")(input="count", output="counted")
    model |= ml.Multiply()(left="counted", right="price", output="cost")
    out = ml.compile(model, shapes={"count": [2]}).evaluate(
        {}, {"count": np.array([1, 2], "int32"), "price": np.array([0.5, 2], "float32")}
    )
    assert out["cost"].tolist() == [0.5, 4.0]


def test_matrix_products_of_vectors_say_what_to_do() -> None:
    left, right = IOKey("left"), IOKey("right")
    with pytest.raises(ml.ShapeError, match=r"x\[None, :\]"):
        ml.compile(ml.Model.create(y=left @ right), shapes={"left": [3], "right": [3, 2]})
    left, right = IOKey("left"), IOKey("right")
    compiled = ml.compile(ml.Model.create(y=left[None, :] @ right), shapes={"left": [3], "right": [3, 2]})
    assert compiled.outputs["y"].shape == (1, 2)


LOSSES = [
    ml.SquaredError,
    ml.AbsoluteError,
    ml.HuberLoss,
    ml.QuantileLoss,
    ml.HingeLoss,
    ml.QuadHingeLoss,
    ml.KLDivergence,
    ml.BinaryCrossEntropy,
    lambda: ml.BinaryCrossEntropy(input_type="logits"),
]


@pytest.mark.parametrize("number", range(len(LOSSES)))
def test_losses_compare_nothing_all_with_all(backend: Any, number: int) -> None:
    make = LOSSES[number]
    for given, target in (([5, 1], [5]), ([None, 1], ["n"]), ([5, 1], [1, 5])):
        with pytest.raises(ml.ShapeError, match=r"all with all.*Reshape or Squeeze"):
            ml.compile(make(), backend, shapes={"input": given, "target": target})
    for given, target in (([5, 1], [5, 1]), ([5, 3], [3]), ([3], [5, 3]), ([1, 1], [1]), ([4], [])):
        compiled = ml.compile(make(), backend, shapes={"input": given, "target": target})
        assert compiled.outputs["output"].shape == np.broadcast_shapes(tuple(given), tuple(target))
    half = np.full((5, 1), 0.5, "float32")
    open_ = ml.compile(make(), backend, shapes={"input": [None, 1]})
    with pytest.raises(ml.InputError, match="all with all"):
        open_.evaluate({}, {"input": half, "target": half[:, 0]})
    fits = open_.evaluate({}, {"input": half, "target": half})["output"]
    assert tuple(fits.shape) == (5, 1)


# ---- copies -------------------------------------------------------------------------------------------------------


def test_models_and_backends_are_not_pickled(backend: Any) -> None:
    model = network()
    for thing in (
        model,
        model.linear.weight,
        ml.compile(model, backend, shapes={"x": [1, 2]}),
        IOKey("x") + 1,
    ):
        if isinstance(thing, ml.Connection):
            continue  # of no model yet
        with pytest.raises(ml.PicklingError, match="to_json"):
            pickle.dumps(thing)
    with pytest.raises(ml.PicklingError, match="make another"):
        pickle.dumps(backend)
    with pytest.raises(ml.PicklingError, match="make another"):
        copy.deepcopy(backend)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_of_models_are_models_of_their_own(copied: Any) -> None:
    model = ml.Model()
    model |= ml.op("joined")(a="a", b="b", c="c", output="y")
    model |= ml.Linear(3)(input="y", output="z")
    other = copied(model)
    other += ml.Relu()(output="more")
    assert model.output_keys == ["z"]
    assert other.output_keys == ["more"]
    backend = ml.JaxBackend()
    backend.register_op("joined", lambda a, b, c: a + b + c)
    small = ml.compile(model, backend, shapes={"a": [4, 2], "b": [2], "c": [2]})
    large = ml.compile(other, backend, shapes={"a": [7, 5], "b": [5], "c": [1]})
    assert (small.outputs["z"].shape, large.outputs["more"].shape) == ((4, 3), (7, 3))
    assert large.params["linear", "weight"].shape == (5, 3)
