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
