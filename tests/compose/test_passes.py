"""Simplifying the flat graph: what goes away, what must stay, and that results do not change."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import compose as ml
from capibara.compose.physical.passes import FOLD_LIMIT


def calls(compiled: ml.CompiledModel) -> list[str]:
    """The operations in the source, in order."""
    return re.findall(r"= ops\.(\w+)\(", compiled.source)


def build(*parts: Any, expose: tuple[str, ...] = ("output",)) -> ml.Model:
    model = ml.Model()
    for part in parts:
        model |= part
    model.expose(*expose)
    return model


def test_equal_operations_are_done_once() -> None:
    model = build(
        ml.Sine()(input="x", output="a"),
        ml.Sine()(input="x", output="b"),
        ml.Add()(left="a", right="y", output="c"),
        ml.Add()(left="y", right="b", output="d"),  # the other way round
        ml.Subtract()(left="c", right="d", output="output"),
    )
    compiled = ml.compile(model)
    assert calls(compiled) == ["sine", "add", "subtract"]
    out = compiled.apply({}, {"x": jnp.arange(3.0), "y": jnp.ones(3)})["output"]
    np.testing.assert_array_equal(out, np.zeros(3))


def test_different_attributes_and_orders_are_not_shared() -> None:
    model = build(
        ml.Subtract()(left="x", right="y", output="a"),
        ml.Subtract()(left="y", right="x", output="b"),
        ml.Softmax(axis=-1)(input="a", output="c"),
        ml.Softmax(axis=0)(input="a", output="d"),
        expose=("b", "c", "d"),
    )
    assert sorted(calls(ml.compile(model))) == ["softmax", "softmax", "subtract", "subtract"]


def test_numbers_are_told_apart_by_type_and_value() -> None:
    model = build(
        ml.Multiply()(left="x", right=2.0, output="a"),
        ml.Multiply()(left="x", right=2.0, output="b"),
        ml.Multiply()(left="x", right=3.0, output="c"),
        expose=("a", "b", "c"),
    )
    assert calls(ml.compile(model)) == ["multiply", "multiply"]


def test_randomness_is_never_shared_nor_folded() -> None:
    model = build(
        ml.Randn((3,))(output="a"),
        ml.Randn((3,))(output="b"),
        ml.Subtract()(left="a", right="b", output="output"),
    )
    compiled = ml.compile(model)
    assert calls(compiled) == ["randn", "randn", "subtract"]
    out = compiled.apply({}, {}, key=jax.random.key(0))["output"]
    assert np.all(np.abs(out) > 0)


def test_dropout_keeps_its_numbers_whatever_else_goes_away() -> None:
    def model(extra: bool) -> ml.Model:
        parts = [ml.Sine()(input="x", output="first")]
        parts += [ml.Sine()(input="x", output="again"), ml.Dropout(0.5)(input="first", output="output")]
        return build(*parts, *([ml.Cosine()(input="again", output="more")] if extra else []))

    outs = [
        ml.compile(model(extra)).apply({}, {"x": jnp.ones(64)}, key=jax.random.key(1), train=True)["output"]
        for extra in (False, True)
    ]
    np.testing.assert_array_equal(*outs)


def test_constants_are_computed_once_and_bounded() -> None:
    model = build(
        ml.Exp()(input="c", output="e"),
        ml.Sum()(input="e", output="s"),
        ml.Multiply()(left="x", right="s", output="output"),
    )
    fixed = {"c": np.linspace(0, 1, 7)}
    compiled = ml.compile(model, constant_keys=fixed)
    assert calls(compiled) == ["multiply"]
    assert compiled.effects["constants"] == 2
    out = compiled.apply({}, {"x": jnp.ones(2)})["output"]
    np.testing.assert_allclose(out, np.exp(fixed["c"]).sum() * np.ones(2), rtol=1e-6)
    large = ml.compile(
        build(ml.Exp()(input="c", output="output")), constant_keys={"c": np.zeros(FOLD_LIMIT + 1)}
    )
    assert calls(large) == ["exp"]


def test_arrays_from_nothing_are_not_written_down_unless_needed() -> None:
    plain = build(ml.Ones((3,))(output="o"), ml.Multiply()(left="x", right="o", output="output"))
    assert calls(ml.compile(plain)) == ["full", "multiply"]
    used = build(
        ml.Ones((3,))(output="o"),
        ml.Sine()(input="o", output="s"),
        ml.Multiply()(left="x", right="s", output="output"),
    )
    compiled = ml.compile(used)
    assert calls(compiled) == ["multiply"]
    out = compiled.apply({}, {"x": jnp.ones(3)})["output"]
    np.testing.assert_allclose(out, np.full(3, np.sin(1.0)), rtol=1e-6)


def test_a_huge_array_from_nothing_is_never_made() -> None:
    model = build(ml.Zeros((10**6, 10**6))(output="z"), ml.Sum()(input="z", output="output"))
    assert calls(ml.compile(model)) == ["full", "sum"]


def test_an_output_that_is_constant_stays_an_array() -> None:
    compiled = ml.compile(build(ml.Multiply()(left=2.0, right=3.0, output="output")))
    out = compiled.evaluate({}, {})["output"]
    assert out.shape == ()
    assert float(out) == 6.0


def test_bfloat16_is_not_widened_by_a_folded_number() -> None:
    model = build(
        ml.Multiply()(left=2.0, right=3.0, output="six"),
        ml.Multiply()(left="x", right="six", output="output"),
    )
    compiled = ml.compile(model, ml.JaxBackend(dtype="bfloat16"))
    assert calls(compiled) == ["multiply"]
    assert compiled.evaluate({}, {"x": jnp.ones(2, "bfloat16")})["output"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("block", "inference", "left"),
    [
        (lambda: ml.Buffer(), False, []),
        (lambda: ml.Dropout(0.0), False, []),
        (lambda: ml.Dropout(0.5), False, ["dropout"]),
        (lambda: ml.Dropout(0.5), True, []),
        (lambda: ml.Reshape((2, 3)), False, []),
        (lambda: ml.Reshape((3, 2)), False, ["reshape"]),
        (lambda: ml.BroadcastTo((2, 3)), False, []),
        (lambda: ml.BroadcastTo((4, 2, 3)), False, ["broadcast_to"]),
        (lambda: ml.StopGradient(), False, ["stop_gradient"]),
    ],
)
def test_identities(block: Any, inference: bool, left: list[str]) -> None:
    model = build(block()(input="x", output="h"), ml.Sine()(input="h", output="output"))
    compiled = ml.compile(model, shapes={"x": [2, 3]}, inference=inference)
    assert calls(compiled) == [*left, "sine"]


def test_products_with_one() -> None:
    model = build(
        ml.Multiply()(left=1.0, right="x", output="h"),
        ml.Divide()(left="h", right=1, output="g"),
        ml.Sine()(input="g", output="output"),
    )
    compiled = ml.compile(model)
    assert calls(compiled) == ["sine"]
    x = np.array([1.0, -0.0, 3.0], "float32")
    np.testing.assert_array_equal(compiled.apply({}, {"x": x})["output"], jnp.sin(x))


def test_an_input_may_be_an_output() -> None:
    compiled = ml.compile(build(ml.Buffer()(input="x", output="output")))
    assert calls(compiled) == []
    np.testing.assert_array_equal(compiled.evaluate({}, {"x": jnp.arange(3.0)})["output"], np.arange(3.0))


def test_what_nothing_needs_is_dropped_inside_repeats_too() -> None:
    body = ml.Model()
    body |= ml.Sine()(input="input", output="a")
    body |= ml.Sine()(input="input", output="b")
    body |= ml.Add()(left="a", right="b", output="output")
    body.expose("output")
    compiled = ml.compile(ml.Repeat(body, 2, mode="scan"))
    assert calls(compiled) == ["sine", "add", "repeat"]


OPS = [ml.Sine, ml.Tanh, ml.Buffer, ml.Relu, ml.Negate]
ORACLE: dict[Any, Any] = {
    ml.Sine: np.sin,
    ml.Tanh: np.tanh,
    ml.Buffer: np.positive,
    ml.Negate: np.negative,
    ml.Relu: lambda v: np.maximum(v, 0),
    ml.Add: np.add,
    ml.Multiply: np.multiply,
    ml.Subtract: np.subtract,
    ml.Maximum: np.maximum,
}
PAIRS = [ml.Add, ml.Multiply, ml.Subtract, ml.Maximum]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=12)
)
def test_random_graphs_give_what_numpy_gives(steps: list[tuple[int, int, int]]) -> None:
    model = ml.Model()
    x = np.linspace(-1, 1, 5)
    names, values = ["x", "c"], [x, np.float64(0.7)]
    for i, (which, a, b) in enumerate(steps):
        left, right, name = a % len(names), b % len(names), f"v{i}"
        if which < len(OPS):
            kind = OPS[which]
            model |= kind()(input=names[left], output=name)
            values.append(ORACLE[kind](values[left]))
        else:
            kind = PAIRS[which - len(OPS)]
            model |= kind()(left=names[left], right=names[right], output=name)
            values.append(ORACLE[kind](values[left], values[right]))
        names.append(name)
    for name in ("x", "c"):
        if name not in model.wires:
            model |= ml.Buffer()(input=name, output=f"unused_{name}")
    model.expose(*names[2:])
    compiled = ml.compile(
        model, ml.JaxBackend(dtype="float64"), constant_keys={"c": 0.7}, shapes={"x": [5]}, jit=False
    )
    outputs = compiled.evaluate({}, {"x": x} if "x" in compiled.inputs else {})
    assert len(calls(compiled)) <= len(steps)
    for name, value in zip(names[2:], values[2:], strict=True):
        np.testing.assert_allclose(outputs[name], value, rtol=1e-12, atol=1e-12)


def test_many_nodes_do_not_recurse() -> None:
    model = ml.Model()
    for _ in range(2000):
        model += ml.Sine()
    compiled = ml.compile(model)
    assert compiled.source.count("ops.sine") == 2000
