"""Decoding writes a token's keys and values into its donated cache where it stands, and copies nothing as large."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from small_models import quick_jit, small_config, small_params, small_tokens

from capibara import compose as ml
from capibara.compose.initializers import zeros
from capibara.compose.physical import codegen
from capibara.core import ModularCapibaraModel

# What gives an array without making one.
FREE = {"parameter", "tuple", "get-tuple-element", "bitcast", "while", "call", "dynamic-update-slice"}
LENGTH = 4096


def moved(program: str, elements: int) -> list[str]:
    """The instructions of a compiled program that make an array of at least so many elements.

    A fusion that ends in a ``dynamic-update-slice`` writes into its operand: with the operand shared, as is looked
    at by ``memory_analysis``, it makes none.
    """
    roots = {}
    for name, body in re.findall(r"^(?:ENTRY )?%?([\w.-]+) [^\n]*\{\n(.*?)^\}", program, re.M | re.S):
        roots[name] = re.search(r"ROOT [^=]+ = .*? ([a-z-]+)\(", body)
    inside = set(re.findall(r"fusion\([^\n]*calls=%?([\w.-]+)", program))
    found, here = [], ""
    for line in program.splitlines():
        if line and not line.startswith(" "):
            here = line.removeprefix("ENTRY ").lstrip("%").split(" ")[0]
        match = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]*)\]\S* ([a-z-]+)\(", line)
        if not match or here in inside:
            continue  # inside of a fusion nothing is put into memory
        size = math.prod(int(n) for n in match[2].split(",") if n)
        called = re.search(r"calls=%?([\w.-]+)", line)
        root = roots.get(called[1]) if called else None
        operation = root[1] if match[3] == "fusion" and root else match[3]
        if size >= elements and operation not in FREE:
            found.append(line.strip())
    return found


def step(model: Any) -> Any:
    def decode(params: Any, cache: Any, tokens: Any) -> Any:
        logits, cache = model.decode(params, tokens, cache, state=model.state)
        return jnp.argmax(logits[:, -1:], -1), cache

    return jax.jit(decode, donate_argnums=1)


def compiled(kind: str, layers: str, batch: int = 2) -> tuple[Any, int]:
    model = ModularCapibaraModel(small_config(kind, model__scan_layers=layers, model__num_layers=6))
    params, model.state = small_params(model)
    cache = jax.eval_shape(lambda: model.init_cache(batch, LENGTH))
    largest = max(leaf.size for leaf in jax.tree.leaves(cache))
    return step(model).lower(params, cache, jnp.zeros((batch, 1), jnp.int32)).compile(), largest


@pytest.mark.thin(3)
@pytest.mark.parametrize(("kind", "layers"), [("grouped", "scan"), ("grouped", "unroll"), ("mixed", "scan")])
def test_nothing_as_large_as_the_cache_is_copied(kind: str, layers: str) -> None:
    program, largest = compiled(kind, layers)
    assert moved(program.as_text(), largest) == []
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes > 2 * 4 * largest  # keys and values come out where they went in
    if kind == "grouped":  # of two layers only in the other: one layer's part, read out, is half of it
        assert memory.temp_size_in_bytes < 4 * largest


@pytest.mark.parametrize("layers", ["scan", "unroll"])
def test_what_is_told_of_no_place_is_copied(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above would see if states were taken apart for each layer."""
    monkeypatch.setattr(codegen, "written_in_place", lambda graph: None)
    program, largest = compiled("grouped", layers)
    assert moved(program.as_text(), largest)
    assert program.memory_analysis().temp_size_in_bytes > 2 * 4 * largest


@pytest.mark.parametrize(("kind", "layers"), [("grouped", "unroll"), ("mixed", "scan")])
def test_the_numbers_are_those_of_states_taken_apart(
    kind: str, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(kind, model__scan_layers=layers)
    results = []
    for told in (True, False):
        if not told:
            monkeypatch.setattr(codegen, "written_in_place", lambda graph: None)
        model = ModularCapibaraModel(config)
        params, state = small_params(model)
        assert ("in_place" in model.decoder.source) is told
        cache = model.init_cache(2, 9)
        run = quick_jit(lambda t, c, m=model, p=params, s=state: m.decode(p, t, c, state=s))
        first, second = np.split(small_tokens(2, 8), 2, axis=1)
        _, cache = run(device_array(first), cache)
        results.append(run(device_array(second), cache))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), *results)


def test_only_what_decodes_is_told_and_only_in_jax() -> None:
    config = small_config("mixed").model
    for cached in (False, True):
        for backend in (ml.JaxBackend(), ml.NumpyBackend()):
            source = ml.compile(_decoder(config, cached), backend).source
            assert ("in_place=" in source) is (cached and isinstance(backend, ml.JaxBackend))


def _decoder(config: Any, cached: bool) -> Any:
    from capibara.core.decoder import build_decoder

    return build_decoder(config, cached=cached)


# ---- blocks of one's own --------------------------------------------------------------------------------------


def block(shown: str | None = None) -> Any:
    """Attention of every token to itself and the earlier ones; ``shown``: a port that comes out too."""
    body = ml.Model()
    body.add_input("input", ("batch", "sequence", 2, 4), "float")
    body.add_input("position", (), "int")
    for name in ("keys", "values"):
        body.add_state(name, ("batch", 2, 6, 4), zeros)
    attend = body.add(
        ml.CachedAttention(),
        "attend",
        query="input",
        key="input",
        value="input",
        key_cache="keys",
        value_cache="values",
        position="position",
        output="output",
    )
    body.update_state("keys", attend.next_key_cache)
    body.update_state("values", attend.next_value_cache)
    if shown == "before":
        body.add(ml.Sum(), "summed", input="keys", output="shown")
    elif shown == "after":
        body.add(ml.Sum(), "summed", input=attend.next_key_cache, output="shown")
    body.expose("output", *(["shown"] if shown else []))
    return body


def repeated(mode: str, remat: str = "none", shown: str | None = None) -> Any:
    model = ml.Model()
    model.add_input("position", (), "int")
    model.add(
        ml.Repeat(block(shown), 3, mode=mode, remat=remat),
        "layers",
        input="x",
        position="position",
        output="y",
        **({"shown": "shown"} if shown else {}),
    )
    model.expose("y", *(["shown"] if shown else []))
    return ml.compile(model, ml.JaxBackend(), shapes={"x": [2, 1, 2, 4]})


def ran(model: Any) -> Any:
    state = model.init_state()

    def advance(x: Any, position: Any, state: Any) -> Any:
        return model.apply({}, {"x": x, "position": position}, state=state)

    run, rows = quick_jit(advance), []
    for at in range(3):
        x = np.random.default_rng(at).normal(size=(2, 1, 2, 4)).astype("float32")
        outputs, state = run(x, np.int32(at), state)
        rows.append(outputs)
    return rows, state


@pytest.mark.parametrize("shown", [None, "before", "after"])
def test_what_something_else_reads_is_not_written_in_place(shown: str | None) -> None:
    """The numbers are those of layers one after the other, outside of a trace; which states are told is as said."""
    plain = repeated("unroll", shown=shown)
    places = (("keys",), ("values",)) if shown is None else (("values",),)
    assert f"in_place={places!r}" in plain.source
    state, want = plain.init_state(), []
    for at in range(3):
        x = np.random.default_rng(at).normal(size=(2, 1, 2, 4)).astype("float32")
        outputs, state = plain.apply({}, {"x": x, "position": np.int32(at)}, state=state)
        want.append(outputs)
    for mode, remat in (("scan", "none"), ("scan", "full"), ("unroll", "full")):
        found = ran(repeated(mode, remat, shown))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, (want, state)
        )


def test_gradients_go_through_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(mode: str, x: Any) -> Any:
        model = repeated(mode)
        state = model.init_state()
        total = 0.0
        for at in range(2):
            outputs, state = model.apply({}, {"x": x[at], "position": jnp.int32(at)}, state=state)
            total = total + jnp.sum(outputs["y"] ** 2)
        return total

    x = device_array(np.random.default_rng(5).normal(size=(2, 2, 1, 2, 4)), jnp.float32)
    found = [quick_jit(jax.grad(lambda x, mode=mode: loss(mode, x)))(x) for mode in ("scan", "unroll")]
    monkeypatch.setattr(codegen, "written_in_place", lambda graph: None)
    plain = quick_jit(jax.grad(lambda x: loss("unroll", x)))(x)
    assert float(jnp.abs(plain).max()) > 0
    for gradient in found:
        np.testing.assert_allclose(gradient, plain, rtol=1e-4, atol=1e-5)
