"""What somebody does wrong on the first day is answered with what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from capibara import compose as ml


@pytest.mark.parametrize("make", [ml.JaxBackend, ml.NumpyBackend])
def test_an_array_instead_of_a_dict_of_arrays(make: Any) -> None:
    compiled = ml.compile(ml.Linear(3), make(), shapes={"input": [None, 4]})
    with pytest.raises(
        ml.InputError, match=r"must be a dict of arrays with the keys \['input'\], not an array"
    ):
        compiled.evaluate(compiled.randomize_params(), np.ones((2, 4), "float32"))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [ml.JaxBackend, ml.NumpyBackend])
def test_a_list_instead_of_an_array(make: Any) -> None:
    compiled = ml.compile(ml.Linear(3), make(), shapes={"input": [None, 4]})
    with pytest.raises(ml.InputError, match=r"inputs\['input'\] is list, not an array: make it one"):
        compiled.evaluate(compiled.randomize_params(), {"input": [[1.0, 2.0, 3.0, 4.0]]})


def test_sizes_for_an_input_that_nobody_named() -> None:
    model = ml.Model()
    model |= ml.Linear(4)
    model += ml.Relu()
    with pytest.raises(
        ml.CompileError, match=r"no input of the model has a name: .*Linear\(8\)\(input='x'\)"
    ):
        ml.compile(model, shapes={"x": [2, 3]})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: ml.RMSNorm(), "rms_norm"),
        (lambda: ml.BatchNorm2D(), "batch_norm2d"),
        (lambda: ml.Convolution1D(3, 2), "convolution1d"),
        (lambda: ml.LSTM(3), "lstm"),
        (lambda: ml.MixtureOfExperts(4, 8, 2), "mixture_of_experts"),
    ],
)
def test_blocks_get_names_that_can_be_guessed(make: Any, name: str) -> None:
    model = ml.Model()
    model |= make()
    assert [child.name for child in model.children] == [name]
