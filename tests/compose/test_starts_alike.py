"""Parameters start from the same distribution on every backend, and a model with any of them can be written down."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

BACKENDS = ["JaxBackend", "NumpyBackend", "TorchBackend"]


def started(kind: str, model: Any, key: str, **shapes: Any) -> np.ndarray:
    if kind == "TorchBackend":
        pytest.importorskip("torch")
    backend = getattr(ml, kind)()
    return backend.to_numpy(ml.compile(model, backend, shapes=shapes or None).randomize_params(3)[key])


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_kernel_keeps_the_variance_of_its_input(kind: str) -> None:
    weight = started(kind, ml.Convolution2D(3, 96), "weight", input=[1, 16, 8, 8])
    assert weight.shape == (96, 16, 3, 3)
    assert abs(weight.var() * 16 * 3 * 3 - 1) < 5 * np.sqrt(2 / weight.size)
    row = started(kind, ml.Convolution1D(5, 64), "weight", input=[1, 32, 9])
    assert abs(row.var() * 32 * 5 - 1) < 5 * np.sqrt(2 / row.size)


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize(("key", "inputs"), [("gate", 64), ("up", 64), ("down", 48)])
def test_each_expert_keeps_the_variance_of_its_input(kind: str, key: str, inputs: int) -> None:
    weight = started(kind, ml.MixtureOfExperts(64, 48, 4), key, input=[3, 64])
    assert weight.shape[:2] == (4, inputs)
    assert abs(weight.var() * inputs - 1) < 5 * np.sqrt(2 / weight.size)


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_parameter_over_an_interval(kind: str) -> None:
    place = ml.IOKey("w", shape=(4000,), differentiable=True, interval=[2, 3])
    values = started(kind, ml.Model.create(y=ml.IOKey("x", shape=(4000,)) * place), "w")
    assert 2 <= values.min() < 2.01
    assert 2.99 < values.max() <= 3
    assert abs(values.mean() - 2.5) < 5 * np.sqrt(1 / 12 / 4000)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: ml.Convolution2D(3, 4), [1, 2, 6, 6]),
        (lambda: ml.Convolution1D(3, 4), [1, 2, 6]),
        (lambda: ml.MixtureOfExperts(8, 6, 2), [3, 8]),
    ],
)
def test_the_start_is_written_with_the_model(make: Any, shape: list[int]) -> None:
    first = ml.compile(make(), shapes={"input": shape}).randomize_params(5)
    again = ml.compile(ml.from_json(ml.to_json(make())), shapes={"input": shape}).randomize_params(5)
    assert first.keys() == again.keys()
    for key in ("weight",) if "weight" in first else ("gate", "up", "down"):
        np.testing.assert_array_equal(first[key], again[key])
