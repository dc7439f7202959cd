"""Sizes that are connections: shapes are inferred through them, and they follow the arrays of each call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from capibara import compose as ml

BACKENDS: dict[str, Any] = {"jax": ml.JaxBackend, "numpy": ml.NumpyBackend, "torch": ml.TorchBackend}


@pytest.fixture(params=BACKENDS)
def backend(request: Any) -> Any:
    if request.param == "torch":
        pytest.importorskip("torch")
    return BACKENDS[request.param]()


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def many() -> ml.Model:
    x = ml.IOKey("x", shape=("batch", "length", 8))
    y = ml.IOKey("y", shape=("rows", 2))
    heads = x.reshape((x.shape[0], x.shape[1], 4, -1))
    return ml.Model.create(
        heads=heads,
        places=ml.Arange()(stop=x.shape[1]),
        later=ml.Arange(start=None)(start=x.shape[0], stop=x.shape[0] + x.shape[1]),
        flat=x.reshape(x.shape[0] * x.shape[1], -1),
        halves=x.reshape((x.shape[0], -1, x.shape[2] // 2)),
        same=x.reshape(x.shape),
        first=x[:, : y.shape[0]],
        wide=y.expand_dims(0).broadcast_to((x.shape[0], y.len(), 2)),
        ones=ml.Ones((None, 2))(size_0=y.size() - y.shape[1]),
    )


def test_they_follow_the_arrays_of_each_call(backend: Any) -> None:
    compiled = ml.compile(many(), backend)
    for batch, length, rows in ((2, 3, 2), (4, 5, 1)):
        x, y = draw(batch, length, 8), draw(rows, 2)
        want = {
            "heads": x.reshape(batch, length, 4, 2),
            "places": np.arange(length),
            "later": np.arange(batch, batch + length),
            "flat": x.reshape(batch * length, 8),
            "halves": x.reshape(batch, -1, 4),
            "same": x,
            "first": x[:, :rows],
            "wide": np.broadcast_to(y, (batch, rows, 2)),
            "ones": np.ones((2 * rows - 2, 2)),
        }
        got = compiled.evaluate({}, {"x": x, "y": y})
        assert got.keys() == want.keys()
        for key, value in want.items():
            np.testing.assert_array_equal(backend.to_numpy(got[key]), value, err_msg=key)


def test_shapes_are_inferred_through_them() -> None:
    compiled = ml.compile(many())
    assert compiled.shapes["heads"] == ("batch", "length", 4, 2)
    assert compiled.shapes["places"] == ("length",)
    assert compiled.shapes["flat"][1] == 8  # type: ignore[index]
    assert compiled.shapes["same"] == ("batch", "length", 8)
    assert "x.shape[0] * x.shape[1]" in compiled.source


def test_parameters_get_their_shapes_through_them(backend: Any) -> None:
    x = ml.IOKey("x", shape=("batch", "length", 8))
    hidden = ml.Linear(5)(x.reshape((x.shape[0], x.shape[1], 4, -1)))
    model = ml.Model.create(y=hidden.reshape((x.shape[0], x.shape[1], -1)))
    compiled = ml.compile(model, backend)
    assert compiled.shapes["linear.weight"] == (2, 5)
    params = compiled.randomize_params(0)
    weight, bias = (backend.to_numpy(params["linear"][k]) for k in ("weight", "bias"))
    for sizes in ((2, 3), (1, 4)):
        given = draw(*sizes, 8)
        got, gradients = compiled.evaluate(params, {"x": given}, {"y": np.ones((*sizes, 20), "float32")})
        want = (given.reshape(*sizes, 4, 2) @ weight + bias).reshape(*sizes, 20)
        np.testing.assert_allclose(backend.to_numpy(got["y"]), want, rtol=1e-5, atol=1e-5)
        want = np.broadcast_to(given.reshape(-1, 2).sum(0)[:, None], (2, 5))
        np.testing.assert_allclose(
            backend.to_numpy(gradients["linear"]["weight"]), want, rtol=1e-4, atol=1e-4
        )


def test_they_are_known_under_jit_vmap_and_after_json() -> None:
    compiled = ml.compile(ml.from_json(ml.to_json(many())))
    x, y = draw(3, 2, 4, 8), draw(2, 2)
    run = jax.jit(jax.vmap(lambda one: compiled.apply({}, {"x": one, "y": y})["heads"]))
    np.testing.assert_array_equal(run(x), x.reshape(3, 2, 4, 4, 2))


def test_whole_sizes_that_are_given_as_constants(backend: Any) -> None:
    model = ml.Model()
    model |= ml.Arange()(stop="n", output="places")
    compiled = ml.compile(model, backend, constant_keys={"n": 3})
    np.testing.assert_array_equal(backend.to_numpy(compiled.evaluate({}, {})["places"]), [0, 1, 2])


BAD: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda x: x.reshape((x.shape[0], x.sum().cast("int32"))), ml.CompileError, "is computed by"),
    (
        lambda x: x.reshape((ml.IOKey("n", kind="int"), -1)),
        ml.CompileError,
        "is given when the model is called",
    ),
    (lambda x: x.reshape((x.shape[0], 3)), ml.ShapeError, "do not fill the shape"),
    (lambda x: x.reshape((-1, x.shape[0], -1)), ml.WiringError, "more than one -1"),
    (lambda x: x.reshape((x.shape[0], None)), ml.WiringError, "None is not a size"),
    (lambda x: x.transpose((x.shape[0], 1)), ml.WiringError, "cannot be a connection"),
    (lambda x: x.reshape((x.shape[0] // 0, -1)), ml.CompileError, "divided by 0"),
]


@pytest.mark.parametrize(("make", "kind", "words"), BAD)
def test_what_is_not_a_size_is_said(make: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        ml.compile(ml.Model.create(y=make(ml.IOKey("x", shape=("batch", 8)))))


def test_a_size_that_does_not_fit_at_run_time(backend: Any) -> None:
    x, y = ml.IOKey("x", shape=("n", 4)), ml.IOKey("y", shape=("m", 2))
    compiled = ml.compile(ml.Model.create(z=x.reshape((y.shape[0], 2))), backend)
    compiled.evaluate({}, {"x": draw(3, 4), "y": draw(6, 2)})
    with pytest.raises((ml.InputError, TypeError, ValueError, RuntimeError)):
        compiled.evaluate({}, {"x": draw(3, 4), "y": draw(5, 2)})


def test_the_shape_of_a_parameter_of_a_trained_model() -> None:
    inner = ml.Model()
    inner |= ml.Linear()(input="x", output="y")
    train = ml.TrainModel(inner)
    train.add_loss(ml.SquaredError(), input="y", target="t")
    compiled = ml.compile(train, shapes={"model.linear.weight": [4, 3]})
    assert compiled.shapes["model.linear.weight"] == (4, 3)
    with pytest.raises(ml.ShapeError, match="4 is not 5"):
        ml.compile(train, shapes={"model.linear.weight": [4, 3], "x": [2, 5]})
    with pytest.raises(ml.CompileError, match=r"shapes names 'model\.linear\.wieght'"):
        ml.compile(train, shapes={"model.linear.wieght": [4, 3]})
