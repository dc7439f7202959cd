"""Parameters that a repeated or rematerialised block shares with others: ``Repeat(…, shared=[…])``."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from capibara import compose as ml
from capibara.compose.initializers import zeros

wrong: Any = 0
X = {"x": np.random.default_rng(0).normal(size=(2, 4)).astype("float32")}


def tied(block: Any, **names: str) -> ml.CompiledModel:
    """``first`` and then ``block``, whose weight is that of ``first``."""
    model = ml.Model()
    first = model.add(ml.Linear(4), "first", input="x", output="h")
    model.add(block, "rest", input="h", output="y", **{names.get("key", "weight"): first.weight})
    return ml.compile(model, shapes={"x": [2, 4]})


def by_hand(params: Any, x: np.ndarray, count: int) -> Any:
    h = x @ params["first"]["weight"] + params["first"]["bias"]
    bias = params["rest"]["bias"].reshape(-1, 4)
    for i in range(count):
        h = h @ params["first"]["weight"] + bias[i]
    return h


def check(compiled: ml.CompiledModel, count: int) -> None:
    assert set(compiled.params) == {("first", "weight"), ("first", "bias"), ("rest", "bias")}
    params = jax.tree.map(lambda a: a + 0.1, compiled.randomize_params(1))
    out = compiled.evaluate(params, X)["y"]
    np.testing.assert_allclose(out, by_hand(params, X["x"], count), rtol=1e-5)
    mine = jax.grad(lambda p: (compiled.apply(p, X)["y"] ** 2).sum())(params)
    theirs = jax.grad(lambda p: (by_hand(p, X["x"], count) ** 2).sum())(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), mine, theirs)


@pytest.mark.parametrize(
    ("mode", "remat"), [("scan", "none"), ("unroll", "none"), ("scan", "full"), ("unroll", "dots")]
)
def test_a_repeated_block_shares_a_weight(mode: str, remat: str) -> None:
    check(tied(ml.Repeat(ml.Linear(4), 3, mode=mode, remat=remat, shared=["weight"])), 3)


@pytest.mark.parametrize("policy", ["full", "dots", "none"])
def test_a_rematerialised_block_shares_a_weight(policy: str) -> None:
    compiled = tied(ml.Remat(ml.Linear(4), policy, shared=["weight"]))
    check(compiled, 1)
    loss = lambda p: (compiled.apply(p, X)["y"] ** 2).sum()  # noqa: E731
    names = {eqn.primitive.name for eqn in jax.make_jaxpr(loss)(compiled.randomize_params()).jaxpr.eqns}
    assert any("checkpoint" in name or "remat" in name for name in names) == (policy != "none")


def test_a_parameter_further_inside_is_shared_by_the_name_it_is_given() -> None:
    body = ml.Model()
    body |= ml.Linear(4, False)(input="input", weight="table", output="h")
    body |= ml.Relu()(input="h", output="output")
    repeat = ml.Repeat(body, 2, mode="scan", shared=["table"])
    assert repeat.input_keys == ["input", "table"]
    compiled = tied(repeat, key="table")
    assert set(compiled.params) == {("first", "weight"), ("first", "bias")}
    params = compiled.randomize_params()
    h = np.asarray(X["x"] @ params["first"]["weight"] + params["first"]["bias"])
    for _ in range(2):
        h = np.maximum(h @ np.asarray(params["first"]["weight"]), 0)
    np.testing.assert_allclose(compiled.evaluate(params, X)["y"], h, rtol=1e-5, atol=1e-6)


def test_a_shared_weight_is_computed_with_in_the_compute_dtype() -> None:
    model = ml.Model()
    first = model.add(ml.Linear(4), "first", input="x", output="h")
    rest = ml.Repeat(ml.Linear(4), 2, mode="scan", shared=["weight"])
    model.add(rest, input="h", weight=first.weight, output="y")
    backend = ml.JaxBackend(policy=ml.Precision("float32", "bfloat16", "float32"))
    compiled = ml.compile(model, backend, shapes={"x": [2, 4]})
    assert compiled.apply(compiled.randomize_params(), X)["y"].dtype == "bfloat16"


def test_shared_parameters_come_after_the_main_input() -> None:
    body = ml.Model()
    body.add_parameter("w", (4, 4), zeros)
    body |= ml.Dense()(input="data", weight="w", output="result")
    repeat = ml.Repeat(body, 2, shared=["w"])
    assert (repeat.carry_in, repeat.input_keys) == ("data", ["data", "w"])


def test_without_a_connection_it_is_an_unconnected_input() -> None:
    model = ml.Model()
    model |= ml.Repeat(ml.Linear(4), 2, shared=["weight"])(input="x", output="y")
    with pytest.raises(ml.UnconnectedError, match="the input 'weight' of repeat"):
        ml.compile(model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda m, w: ml.Repeat(ml.Linear(4), 3)(weight=w),
            r"parameter inside of Repeat.*shared=\['weight'\]",
        ),
        (
            lambda m, w: m.add(ml.Repeat(ml.Linear(4), 3), weight=w),
            r"Each of the 3 repetitions has one of its own",
        ),
        (lambda m, w: ml.Remat(ml.Linear(4))(weight=w), r"inside of Remat.*Remat\(…, shared=\['weight'\]\)"),
        (lambda m, w: ml.Repeat(ml.VectorQuantiser(4, 4), 3)(codebook=w), "'codebook' is a state inside of"),
        (lambda m, w: ml.Repeat(ml.Linear(4), 3)(wieght=w), "no port 'wieght'"),
        (
            lambda m, w: ml.Repeat(ml.Linear(4), 3, shared=["wieght"]),
            "not a parameter of Linear.*Did you mean 'weight'",
        ),
        (lambda m, w: ml.Repeat(ml.Linear(4), 3, shared=["input"]), "'input', which is not a parameter"),
        (
            lambda m, w: ml.Repeat(ml.Linear(4), 3, shared="weight"),
            r"must be a list of names, as shared=\['weight'\]",
        ),
        (lambda m, w: ml.Repeat(ml.Linear(4), 3, shared=[wrong]), "shared names 0"),
    ],
)
def test_what_cannot_be_tied_says_why_and_what_to_do(make: Any, words: str) -> None:
    model = ml.Model()
    first = model.add(ml.Linear(4), "first", input="x", output="h")
    before = list(model.wires), len(model.children)
    with pytest.raises(ml.WiringError, match=words):
        make(model, first.weight)
    assert (list(model.wires), len(model.children)) == before


def test_values_inside_of_a_region_do_not_exist_outside() -> None:
    model = ml.Model()
    repeat = model.add(ml.Repeat(ml.Linear(4), 3), "deep", input="x", output="h")
    with pytest.raises(AttributeError, match=r"'weight' is a parameter inside of deep.*shared="):
        repeat.weight
    with pytest.raises(ml.WiringError, match=r"inside of deep \(Repeat\) and does not exist outside.*output"):
        model.add(ml.Linear(4), input="h", weight=repeat.body.weight)


def test_a_refused_region_gives_the_parameters_back() -> None:
    block = ml.Linear(5)
    block.set_shapes(input=[2, 4])
    with pytest.raises(ml.ShapeError, match="5 is not 4"):
        ml.Repeat(block, 2, shared=["weight"])
    with pytest.raises(ml.WiringError):
        ml.Remat(block, shared=["weight", "nothing"])
    assert block.input_keys == ["input"]
    assert set(ml.compile(block).params) == {("weight",), ("bias",)}
