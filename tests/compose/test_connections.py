"""Expressions of connections against NumPy, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from capibara import compose as ml

BACKEND = ml.JaxBackend(dtype="float64")
RANDOM = np.random.default_rng(0)
A = RANDOM.uniform(0.5, 2.0, (2, 3, 4))
B = RANDOM.uniform(0.5, 2.0, (3, 4))
WHOLE = np.array([[7, -3, 2], [0, 5, -6]], "int32")


def run(expression: Any, **inputs: Any) -> np.ndarray[Any, Any]:
    model = ml.Model.create(result=expression)
    given = {k: v for k, v in inputs.items() if k in model.input_keys}
    compiled = ml.compile(model, BACKEND, shapes={k: v.shape for k, v in given.items()}, jit=False)
    result = np.asarray(compiled.evaluate({}, given)["result"])
    assert compiled.shapes["result"] == result.shape
    return result


FLOATS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "radd": lambda a, b: 2 + a,
    "sub": lambda a, b: a - b,
    "rsub": lambda a, b: 1.5 - a,
    "mul": lambda a, b: a * b,
    "rmul": lambda a, b: 3 * a,
    "div": lambda a, b: a / b,
    "rdiv": lambda a, b: 1 / a,
    "floordiv": lambda a, b: a // b,
    "rfloordiv": lambda a, b: 5 // a,
    "mod": lambda a, b: a % b,
    "rmod": lambda a, b: 5 % a,
    "pow": lambda a, b: a**b,
    "rpow": lambda a, b: 2.0**a,
    "square": lambda a, b: a**2,
    "matmul": lambda a, b: a @ b.T,
    "neg": lambda a, b: -a,
    "pos": lambda a, b: +a,
    "abs": lambda a, b: abs(a - b),
    "array right": lambda a, b: a + B,
    "array left": lambda a, b: B - a,
    "greater": lambda a, b: a > b,
    "greater equal": lambda a, b: a >= b,
    "less": lambda a, b: a < b,
    "less equal": lambda a, b: a <= b,
    "number less": lambda a, b: a > 1,
    "logic": lambda a, b: ((a > 1) & (b > 1)) | ~(a < b) ^ (a > 1.5),
    "logic with a value": lambda a, b: (a > 1) & True,
    "index": lambda a, b: a[1],
    "negative index": lambda a, b: a[-1, :, 0],
    "slice": lambda a, b: a[:, 1:, ::2],
    "reversed": lambda a, b: b[::-1],
    "new axis": lambda a, b: b[None, :, None],
    "ellipsis": lambda a, b: a[..., 0],
    "numpy index": lambda a, b: a[np.int64(1)],
    "rows": lambda a, b: a[:, [2, 0]],
    "mean": lambda a, b: a.mean(),
    "sum": lambda a, b: a.sum(1),
    "sum of several": lambda a, b: a.sum((0, 2)),
    "max": lambda a, b: a.max(-1),
    "min": lambda a, b: a.min(0),
    "prod": lambda a, b: a.prod(2),
    "var": lambda a, b: a.var(1),
    "transpose": lambda a, b: a.transpose(2, 0, 1),
    "transpose all": lambda a, b: a.transpose(),
    "reshape": lambda a, b: a.reshape(4, -1),
    "flatten": lambda a, b: a.flatten(),
    "squeeze": lambda a, b: b[None].squeeze(0),
    "swapaxes": lambda a, b: a.swapaxes(0, 2),
    "shape": lambda a, b: a.shape + np.zeros(3, "int32"),
    "several": lambda a, b: (a - a.mean(0)) / (a.var(0) + 1e-5) ** 0.5 @ b.T,
}


@pytest.mark.parametrize("name", FLOATS)
def test_operators_equal_numpy(name: str) -> None:
    function = FLOATS[name]
    expected = np.asarray(function(A, B))
    result = run(function(ml.IOKey("a"), ml.IOKey("b")), a=A, b=B)
    assert result.shape == expected.shape
    assert result.dtype.kind == expected.dtype.kind
    np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda x: x.sqrt(), np.sqrt(A)),
        (lambda x: x.exp(), np.exp(A)),
        (lambda x: x.log(), np.log(A)),
        (lambda x: x.abs(), np.abs(A)),
        (lambda x: x.sin(), np.sin(A)),
        (lambda x: x.cos(), np.cos(A)),
        (lambda x: x.clip(0.7, 1.1), np.clip(A, 0.7, 1.1)),
        (lambda x: x.eq(x), np.full(A.shape, True)),
        (lambda x: x.ne(1.0), np.full(A.shape, True)),
        (lambda x: x.T, A.T),
        (lambda x: x.size(), np.asarray(24)),
        (lambda x: x.size((0, 2)), np.asarray(8)),
        (lambda x: x.len(), np.asarray(2)),
        (lambda x: x.cast("int32"), A.astype("int32")),
        (lambda x: (x > 1).cast(ml.float64), (A > 1).astype(float)),
        (lambda x: x.split(3, 1)[1], A[:, 1:2]),
        (lambda x: x.sum(axis=1, keepdim=True), A.sum(1, keepdims=True)),
        (lambda x: x.var(axis=0, correction=1), A.var(0, ddof=1)),
        (lambda x: (x > 1).any(0), (A > 1).any(0)),
        (lambda x: (x > 1).all(-1), (A > 1).all(-1)),
        (lambda x: x.argmax(1), A.argmax(1)),
        (lambda x: x.argmin(), np.asarray(A.argmin())),
        (lambda x: x.expand_dims(1), A[:, None]),
        (lambda x: x[0, 0, 0].broadcast_to((2, 2)), np.full((2, 2), A[0, 0, 0])),
        (lambda x: x.sum().item(), np.asarray(A.sum())),
        (lambda x: x * [1, 2, 3, 4], A * [1, 2, 3, 4]),
        (lambda x: x * ml.Tensor([[0.5], [1.0], [2.0]]).value, A * [[0.5], [1.0], [2.0]]),
    ],
)
def test_methods_equal_numpy(expression: Callable[[Any], Any], expected: np.ndarray[Any, Any]) -> None:
    result = run(expression(ml.IOKey("x")), x=A)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "function",
    [
        lambda i: i // 2,
        lambda i: i % 3,
        lambda i: i << 2,
        lambda i: i >> 1,
        lambda i: -i * 2 + 1,
        lambda i: 7 - i,
    ],
)
def test_whole_numbers_stay_whole(function: Callable[[Any], Any]) -> None:
    result = run(function(ml.IOKey("i", type="int")), i=WHOLE)
    assert result.dtype == np.int32
    np.testing.assert_array_equal(result, function(WHOLE))


def test_gradients_flow_through_expressions() -> None:
    w = ml.IOKey("w", shape=(3,), differentiable=True)
    model = ml.Model.create(y=((w * ml.IOKey("x")) ** 2).sum())
    compiled = ml.compile(model, BACKEND, shapes={"x": (3,)})
    x, value = np.array([1.0, 2.0, 3.0]), np.array([0.5, -1.0, 2.0])
    _, gradients = compiled.evaluate({"w": value}, {"x": x}, output_gradients={"y": 1.0})
    np.testing.assert_allclose(gradients["w"], 2 * x * x * value, rtol=1e-12)


def test_a_connection_picks_rows() -> None:
    expression = ml.IOKey("x")[ml.IOKey("rows")]
    result = run(expression, x=A, rows=np.array([1, 0, 1], "int32"))
    np.testing.assert_array_equal(result, A[[1, 0, 1]])


def test_ports_in_a_model_are_expressions_too() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="h")
    model |= ml.Add()(left=model.h * 2, right=model.x.mean(0), output="y")
    names = [child.name for child in model.children]
    assert names == ["relu", "multiply", "mean", "add"]
    compiled = ml.compile(model, BACKEND, shapes={"x": (3, 4)})
    assert compiled.output_keys == ["y"]
    x = B - 1
    np.testing.assert_allclose(
        compiled.evaluate({}, {"x": x})["y"], np.maximum(x, 0) * 2 + x.mean(0), rtol=1e-12
    )


def test_an_expression_is_added_once() -> None:
    x = ml.IOKey("x")
    shared = x.exp()
    model = ml.Model.create(a=shared + 1, b=shared + shared)
    assert [child.name for child in model.children] == ["exp", "add", "add_1"]


def test_a_list_with_connections_is_stacked() -> None:
    x = ml.IOKey("x", shape=(3, 4))
    model = ml.Model()
    model |= ml.Add()(left=[x[0], x[1] * 2], right=[[1.0], [2.0]], output="y")
    compiled = ml.compile(model, BACKEND)
    np.testing.assert_allclose(
        compiled.evaluate({}, {"x": B})["y"], np.stack([B[0], B[1] * 2]) + np.array([[1], [2]])
    )


def test_plus_equals_goes_on_from_blocks_not_from_expressions() -> None:
    model = ml.Model()
    model |= ml.Relu()(input="x", output="h")
    model |= ml.Tanh()(input="x", output="t")
    model.expose_keys(z=model.h + 1)
    model += ml.Exp()(output="e")
    model.expose("e")
    both = ml.compile(model, BACKEND, shapes={"x": (3, 4)}).evaluate({}, {"x": B})
    np.testing.assert_allclose(both["e"], np.exp(np.tanh(B)), rtol=1e-12)


def test_connections_are_keys_of_dicts() -> None:
    relu = ml.Relu()
    assert relu.output == relu.port("output")
    assert relu.output != relu.input
    assert {relu.output: 1}[relu.output] == 1
    x = ml.IOKey("x")
    assert len({x + 1, x + 1}) == 2
    assert len({x, x, ml.IOKey("x")}) == 2


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "truth": (lambda x: bool(x > 1), "neither true nor false"),
    "a name": (lambda x: x + "y", r"IOKey\('y'\)"),
    "an object": (lambda x: x * object(), "cannot be used in an expression"),
    "an index": (lambda x: x[1.5], "integer"),
    "two arrays": (lambda x: x[[0], [1]], "others must be ':'"),
    "an axis": (lambda x: x.sum("a"), "axis"),
    "a step": (lambda x: x[::0], "step of 0"),
    "parts": (lambda x: x.split(10**12), "ports"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_once(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(ml.WiringError, match=message):
        function(ml.IOKey("x"))


def test_not_iterable() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        list(ml.IOKey("x"))


def test_shape_errors_name_the_line_of_the_expression() -> None:
    x = ml.IOKey("x", shape=(2, 3))
    wrong = x + np.ones((2, 4))  # this line
    site = wrong.call.site
    assert site is not None
    line = site.line
    with pytest.raises(ml.ShapeError, match=rf"(?s)3 does not broadcast with 4.*test_connections\.py:{line}"):
        ml.Model.create(y=wrong)


def test_truth_values_are_no_numbers() -> None:
    x = ml.IOKey("x")
    with pytest.raises(ml.KindError, match="does not support arithmetic"):
        ml.Model.create(y=(x > 1) + (x < 2))
    with pytest.raises(ml.KindError, match="boolean"):
        ml.Model.create(y=(x > 1).eq(1))


def test_refused_expression_leaves_the_model_as_it_was() -> None:
    model = ml.Model()
    model |= ml.Linear(4)(input="x", output="h")
    before = (repr(model), dict(model.wires), [c.name for c in model.children])
    block = ml.Add()
    with pytest.raises(ml.ShapeError):
        model |= block(left=model.h * 2, right=(model.h + 1) @ ml.IOKey("w", shape=(5, 5)), output="y")
    assert (repr(model), dict(model.wires), [c.name for c in model.children]) == before
    model |= block(left=model.h * 2, right=1.0, output="y")
    assert ml.compile(model, shapes={"x": [2, 3]}).shapes["y"] == (2, 4)


def test_an_expression_of_another_model_is_refused() -> None:
    first, second = ml.Model(), ml.Model()
    first |= ml.Relu()(input="x", output="y")
    with pytest.raises(ml.WiringError, match="not part of"):
        second |= ml.Relu()(input=first.y + 1)


def test_long_expressions_need_no_recursion() -> None:
    x = ml.IOKey("x")
    y: Any = x
    for _ in range(3000):
        y = y + 1
    compiled = ml.compile(ml.Model.create(y=y), BACKEND, shapes={"x": (2,)}, jit=False)
    np.testing.assert_array_equal(compiled.evaluate({}, {"x": np.zeros(2)})["y"], [3000.0, 3000.0])
