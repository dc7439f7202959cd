"""Logical axis names: whose typing errors are found, when, and how one makes names of one's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import ones
from capibara.config.axes import AxisRules
from capibara.errors import ConfigError


def one_device_mesh() -> Any:
    return jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))


def named(axis: Any, inputs: Any = "embed") -> ml.Model:
    model = ml.Model()
    model.add_input("x", ("batch", 4), "float", axes=("batch", inputs))
    model.add_parameter("gain", (4,), ones, axes=(axis,))
    model |= ml.Multiply()(left="x", right="gain", output="y")
    return model


def test_without_rules_or_mesh_names_are_only_names() -> None:
    compiled = ml.compile(named("embd"))
    assert compiled.params["gain",].axes == ("embd",)
    compiled.evaluate(compiled.randomize_params(), {"x": jnp.ones((2, 4))})


@pytest.mark.parametrize("given", ["rules", "mesh", "both"])
def test_a_typing_error_is_found_when_the_model_is_compiled(given: str) -> None:
    options: Any = {} if given == "mesh" else {"rules": AxisRules()}
    if given != "rules":
        options["device_mesh"] = one_device_mesh()
    backend = ml.JaxBackend(**options)
    ml.compile(named("embed"), backend)
    with pytest.raises(
        ml.CompileError, match=r"parameter 'gain' has the axis name 'embd'.*Did you mean 'embed'"
    ):
        ml.compile(named("embd"), backend)
    with pytest.raises(ml.CompileError, match=r"'x' has the axis name 'hiden'.*Did you mean 'hidden'"):
        ml.compile(named(None, "hiden"), backend)


def test_states_and_blocks_further_inside_are_looked_at() -> None:
    block = ml.Model()
    block.add_state("count", (2,), ones, axes=("cods",))
    block |= ml.Add()(left="input", right="count", output="output")
    model = ml.Model()
    model.add(ml.Repeat(block, 2), "deep", input="x", output="y")
    with pytest.raises(ml.CompileError, match=r"state 'deep\.count' has the axis name 'cods'.*'codes'"):
        ml.compile(model, ml.JaxBackend(rules=AxisRules()))


def test_names_of_ones_own_are_rows_of_the_rules() -> None:
    rules = AxisRules(parameters={**AxisRules().parameters, "wavelets": ("data",), "taps": ()})
    backend = ml.JaxBackend(rules=rules, device_mesh=one_device_mesh())
    compiled = ml.compile(named("wavelets", "taps"), backend)
    params = compiled.randomize_params()
    assert params["gain"].sharding.spec == jax.sharding.PartitionSpec("data")
    compiled.evaluate(params, {"x": jnp.ones((2, 4))})
    # Known in one table, a name is known; the other table just says nothing about it.
    for kind in ("parameters", "activations"):
        spec = rules.spec(("taps", "wavelets"), one_device_mesh(), kind=kind)  # type: ignore[arg-type]
        assert spec == jax.sharding.PartitionSpec(None, "data" if kind == "parameters" else None)
    with pytest.raises(ml.CompileError, match=r"'wavelet'.*Did you mean 'wavelets'"):
        ml.compile(named("wavelet"), backend)
    with pytest.raises(ConfigError, match=r"'tap' is neither.*AxisRules"):
        rules.spec(("tap",), one_device_mesh())


def test_axes_of_the_mesh_may_be_named_directly() -> None:
    ml.compile(named("data"), ml.JaxBackend(device_mesh=one_device_mesh()))
    with pytest.raises(ml.CompileError, match=r"'dada'.*'data'"):
        ml.compile(named("dada"), ml.JaxBackend(device_mesh=one_device_mesh()))
    with pytest.raises(ml.CompileError, match="there is none"):
        ml.compile(named("data"), ml.JaxBackend(rules=AxisRules()))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"parameters": [("embed", "data")]}, "parameters=.* must be a dict"),
        ({"activations": {"batch": "data"}}, r"activations\['batch'\]='data' must be a tuple.*\('data',\)"),
        ({"parameters": {"embed": None}}, r"parameters\['embed'\]=None must be a tuple"),
        ({"parameters": {"embed": (1,)}}, r"must be a tuple of names"),
        ({"parameters": {1: ("data",)}}, "has the key 1"),
    ],
)
def test_tables_that_are_none(tables: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        AxisRules(**tables)


def test_rules_of_another_kind_are_refused() -> None:
    with pytest.raises(ml.CompileError, match=r"must be a capibara\.config\.axes\.AxisRules"):
        ml.JaxBackend(rules={"embed": "data"})  # type: ignore[arg-type]
