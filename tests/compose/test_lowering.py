"""``CompiledModel.lower``: the program of ``evaluate`` without arrays, for platforms that need not be here."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import zeros


def model() -> Any:
    result = ml.Model()
    result.add_input("x", ("batch", 4), "float", axes=("batch", None))
    result |= ml.Linear(3)(input="x", output="y")
    result.expose("y")
    return result


def test_what_is_lowered_is_what_evaluate_runs() -> None:
    compiled = ml.compile(model(), ml.JaxBackend())
    program = compiled.lower(gradients=True, batch=5).compile()
    params, x = compiled.randomize_params(0), jnp.arange(20.0).reshape(5, 4)
    given = jnp.ones((5, 3))
    outputs, after, gradients = program(params, {"x": x}, {}, None, {"y": given})
    expected = compiled.evaluate(params, {"x": x}, {"y": given})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (outputs, gradients), expected)
    assert after == {}


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_platform_that_is_not_here(platform: str) -> None:
    compiled = ml.compile(model(), ml.JaxBackend(platform=platform), shapes={"x": [2, 4]})
    assert "dot_general" in compiled.lower().as_text()
    assert compiled.lower(gradients=True).as_text().count("dot_general") > 1


def test_states_keys_and_training() -> None:
    counted = ml.Model()
    counted.add_input("x", ("batch", 4), "float")
    counted.add_state("total", ("batch", 4), zeros)
    counted |= ml.Dropout(0.5)(input="x", output="dropped")
    counted |= ml.Add()(left="dropped", right="total", output="sum")
    counted.update_state("total", "sum")
    counted |= ml.Linear(2)(input="sum", output="y")
    counted.expose("y")
    compiled = ml.compile(counted, ml.JaxBackend())
    program = compiled.lower(train=True, batch=3).compile()
    key = jax.random.key(7)
    params, state, x = compiled.randomize_params(0), compiled.init_state(batch=3), jnp.ones((3, 4))
    outputs, after, _ = program(params, {"x": x}, state, key, None)
    expected = compiled.evaluate(params, {"x": x}, state=state, key=key, train=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (outputs, after), expected)


def test_parameters_lie_over_the_mesh() -> None:
    compiled = ml.compile(model(), ml.JaxBackend(device_mesh=(1,)))
    lowered = compiled.lower({"x": jax.ShapeDtypeStruct((6, 4), "bfloat16")})
    assert lowered.in_avals[0][1]["x"].dtype == jnp.bfloat16
    shardings = lowered.compile().input_shardings[0]
    assert shardings[0]["linear"]["weight"].mesh.axis_names == ("data",)


def test_a_mesh_without_devices() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    lowered = ml.compile(model(), ml.JaxBackend(device_mesh=mesh)).lower(batch=8)
    assert "num_partitions = 8" in lowered.as_text()


def test_what_cannot_be_lowered_is_refused() -> None:
    compiled = ml.compile(model(), ml.JaxBackend())
    with pytest.raises(ml.CompileError, match="'batch' is not known"):
        compiled.lower()
    with pytest.raises(ml.CompileError, match="not a free size"):
        compiled.lower(bach=3)
    with pytest.raises(ml.InputError, match="not an input; the inputs are"):
        compiled.lower({"z": jax.ShapeDtypeStruct((2, 4), "float32")})
    with pytest.raises(ml.InputError, match="'x'"):
        compiled.lower({"x": jax.ShapeDtypeStruct((2, 5), "float32")})
    frozen = ml.compile(model(), ml.JaxBackend(), inference=True)
    with pytest.raises(ml.InputError, match="inference=True"):
        frozen.lower(gradients=True, batch=2)
    portable = ml.compile(model(), ml.NumpyBackend())
    with pytest.raises(ml.CompileError, match="JaxBackend"):
        portable.lower(batch=2)
