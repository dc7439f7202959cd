"""Names that users of other model compilers know, and what they do here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose import models


def test_models_grow_by_plus_and_bar() -> None:
    model = ml.Model()
    grown = model + ml.Linear(4) + ml.Relu() | ml.Exp()(input="other", output="grown")
    assert grown is model
    by_steps = ml.Model()
    by_steps += ml.Linear(4)
    by_steps += ml.Relu()
    by_steps |= ml.Exp()(input="other", output="grown")
    assert ml.to_json(model) == ml.to_json(by_steps)
    train = ml.TrainModel(ml.MLP(input_size=2, hidden_sizes=[3], output_size=1))
    with pytest.raises(ml.WiringError, match="add_loss"):
        _ = train + ml.Relu()


def test_canonical_ends_in_the_singular() -> None:
    def add(cin: str) -> ml.Model:
        inner = ml.Model()
        inner |= ml.Subtract()(left="a", right="b", output="low")
        inner |= ml.Add()(left="a", right="b", output="high")
        inner.expose("low", "high")
        inner.set_cin(cin)
        inner.set_cout("low")
        outer = ml.Model()
        outer |= ml.Exp()(input="x", output="e")
        outer += inner(**{"b" if cin == "a" else "a": "other"})
        outer += ml.Negate()(output="y")
        return outer

    x = {"x": np.array([0.0, 1.0], "float32"), "other": np.array([5.0, 7.0], "float32")}
    for cin, sign in (("a", 1), ("b", -1)):
        out = ml.compile(add(cin), ml.NumpyBackend()).evaluate({}, x)["y"]
        np.testing.assert_allclose(out, -sign * (np.exp(x["x"]) - x["other"]), rtol=1e-6)


def test_connections() -> None:
    x = ml.IOKey("x")
    model = ml.Model.create(floor=x.floor(), clamped=x.clamp(-1.0, 1.0), row=x.sum().atleast_1d())
    out = ml.compile(model, ml.NumpyBackend()).evaluate({}, {"x": np.array([-2.5, 0.5, 1.5], "float32")})
    assert out["floor"].tolist() == [-3, 0, 1]
    assert out["clamped"].tolist() == [-1, 0.5, 1]
    assert out["row"].shape == (1,)


def test_blocks() -> None:
    assert models.ToTuple is models.ToList is ml.Stack


@pytest.mark.parametrize("kind", [ml.JaxBackend, ml.NumpyBackend])
def test_backends(kind: Any) -> None:
    backend = kind()
    assert (backend.pi, backend.e) == (math.pi, math.e)
    key = backend.get_random_key()
    for draw in (
        lambda **k: backend.randn(3, **k),
        lambda **k: backend.rand(3, **k),
        lambda **k: backend.rand_uniform(0, 2, 3, **k),
        lambda **k: backend.randint(0, 99, 3, **k),
    ):
        np.testing.assert_array_equal(draw(key=key), draw(prng_key=key))
        with pytest.raises(ml.InputError, match="same argument"):
            draw(key=key, prng_key=key)
