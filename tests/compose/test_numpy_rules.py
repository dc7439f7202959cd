"""Operators of connections follow NumPy on all three backends: indices, signs, empty arrays, NaN, integers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch_oracle import HAS_TORCH

from capibara import compose as ml

BACKENDS = {
    "jax": lambda: ml.JaxBackend(dtype="float64"),
    "numpy": lambda: ml.NumpyBackend("float64"),
}
if HAS_TORCH:
    BACKENDS["torch"] = lambda: ml.TorchBackend("float64")
KINDS = {"f": "float", "i": "int", "b": "bool"}
NAN, INF = np.nan, np.inf

X = np.random.default_rng(0).normal(size=(3, 4, 5))
I, J = np.array([[5, -7, 3], [0, 2, -1]]), np.array([3, -2, 4])  # noqa: E741
B = np.array([[True, False, True], [False, False, True]])
PICKS = np.array([[0, -1], [2, -3]])
EDGES = np.array([-5.5, 5.5, 0.0, -0.0, NAN, INF, -INF, 1.0, -1.0])
OTHERS = np.array([-2.0, -2.0, 3.0, 3.0, 1.0, 2.0, 2.0, INF, INF])

Row = tuple[Callable[..., Any], Callable[..., Any], list[Any]]


def same(function: Callable[..., Any], *arrays: Any) -> Row:
    """The same expression of connections and of arrays."""
    return function, function, list(arrays)


PLACES: list[Any] = [
    0,
    -1,
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(2, 1),
    slice(-100, 100),
    (..., 1),
    (..., slice(None, None, 2)),
    (slice(1, None), None, 2),
    (None, ..., None),
    (-1, slice(-2, None)),
    (0, 0, 0),
    (np.int64(1),),
]
BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "floor_divide": lambda a, b: a // b,
    "modulo": lambda a, b: a % b,
    "divide": lambda a, b: a / b,
    "subtract": lambda a, b: a - b,
    "less": lambda a, b: a < b,
}
REDUCED = ("sum", "mean", "max", "min", "prod", "var")
ROWS: dict[str, Row] = {
    **{f"index {place}": same(lambda x, place=place: x[place], X) for place in PLACES},
    "picked": same(lambda x, i: x[i], X, PICKS),
    "picked by a scalar": same(lambda x, i: x[i], X, np.array(-1)),
    "picked by none": same(lambda x, i: x[i], X, np.zeros(0, int)),
    "picked by a list": same(lambda x: x[[0, -1]], X),
    "picked in the middle": same(lambda x, i: x[:, i], X, np.array([3, -1])),
    "picked after dots": same(lambda x, i: x[..., i, :], X, np.array([3, -1])),
    "picked last": same(lambda x, i: x[..., i], X, np.array([3, -1])),
    "picked before dots": same(lambda x, i: x[i, ...], X, np.array([2, -1])),
    **{f"{name} whole": same(f, I, J) for name, f in BINARY.items()},
    **{f"{name} 7": same(lambda a, f=f: f(7, a), J) for name, f in BINARY.items()},
    **{f"{name} by -3": same(lambda a, f=f: f(a, -3), I) for name, f in BINARY.items()},
    **{f"{name} edges": same(f, EDGES, OTHERS) for name, f in BINARY.items()},
    **{f"{name} by 0": same(f, EDGES[:4], 0 * EDGES[:4]) for name, f in BINARY.items()},
    "power whole": same(lambda a, b: a**b, I, np.array([2, 3, 0])),
    "power of 2": same(lambda a: 2**a, np.array([0, 1, 5])),
    "power edges": same(lambda a, b: a**b, np.array([-2.0, -2, 0, 0, -3]), np.array([2.0, 3, 0, -1, 0.5])),
    **{
        f"{name} axis={axis} {keep}": (
            lambda x, name=name, axis=axis, keep=keep: getattr(x, name)(axis, keep),
            lambda x, name=name, axis=axis, keep=keep: getattr(x, name)(axis=axis, keepdims=keep),
            [X],
        )
        for name, axis, keep in itertools.product(REDUCED, (None, -1, (0, 2), ()), (False, True))
    },
    **{
        f"{name} NaN": same(lambda x, name=name: getattr(x, name)(0), np.array([[1, NAN], [NAN, 2], [3, 4]]))
        for name in (*REDUCED, "argmax", "argmin")
    },
    **{
        f"{name} ties": same(lambda x, name=name: getattr(x, name)(), np.ones((3, 2)))
        for name in ("argmax", "argmin")
    },
    **{
        f"{name} of none": same(lambda x, name=name: getattr(x, name)(0), np.zeros((0, 3)))
        for name in ("sum", "mean", "prod", "var")
    },
    "max beside none": same(lambda x: x.max(1), np.zeros((0, 3))),
    "sign": (lambda x: ml.primitives.Sign()(input=x), np.sign, [EDGES]),
    "product of none": same(lambda a, b: a @ b, np.zeros((2, 0)), np.zeros((0, 3))),
    "broadcast to none": same(lambda a, b: a + b, np.ones((3, 1)), np.ones((1, 0))),
    "reshape of none": same(lambda x: x.reshape(3, 0), np.zeros((0, 3))),
    "shift": same(lambda a, b: (a << b) >> 1, I, np.array([1, 2, 0])),
    "logic": same(lambda a, b: (a & ~b) | (a ^ True), B, ~B),
    "equal NaN": (lambda a: a.eq(a), lambda a: a == a, [EDGES]),
    "clip": same(lambda a: a.clip(-1, 2), I),
    "clip NaN": same(lambda a: a.clip(-1, 2), EDGES),
}


def value(function: Callable[..., Any], arrays: list[Any], backend: Any) -> tuple[np.ndarray, Any]:
    """What the expression gives, and the shape that was declared for it."""
    names = "abc"[: len(arrays)]
    keys = [ml.IOKey(n, shape=a.shape, kind=KINDS[a.dtype.kind]) for n, a in zip(names, arrays, strict=True)]
    model = ml.Model()
    model |= ml.Buffer()(input=function(*keys), output="out")
    model.expose("out")
    compiled = ml.compile(model, backend)
    given = {
        n: backend.array(a.astype("int32") if a.dtype.kind == "i" else a)
        for n, a in zip(names, arrays, strict=True)
    }
    return backend.to_numpy(compiled.evaluate({}, given)["out"]), compiled.outputs["out"].shape


@pytest.mark.thin(3)
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore:.*degrees of freedom.*:UserWarning")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROWS)
def test_as_numpy(name: str, backend: str) -> None:
    function, oracle, arrays = ROWS[name]
    got, declared = value(function, arrays, BACKENDS[backend]())
    with np.errstate(all="ignore"):
        want = np.asarray(oracle(*arrays))
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)
    assert got.shape == want.shape == declared
    assert got.dtype.kind == want.dtype.kind


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
@pytest.mark.parametrize("axis", [None, 0, -2])
def test_nothing_to_pick_from(name: str, axis: int | None) -> None:
    with pytest.raises(ml.ShapeError, match=r"of no elements"):
        value(lambda x: getattr(x, name)(axis), [np.zeros((0, 3))], ml.NumpyBackend("float64"))


def test_negative_indices_have_gradients() -> None:
    for make in BACKENDS.values():
        backend = make()
        x = ml.IOKey("x", shape=(3,), kind="float")
        model = ml.Model()
        model |= ml.Buffer()(input=x[[-1, 0, -1]], output="out")
        compiled = ml.compile(model, backend, trainable_keys=["x"])
        given = {"x": backend.array(np.array([1.0, 2.0, 3.0]))}
        _, gradients = compiled.evaluate(given, {}, {"out": backend.array(np.array([1.0, 10.0, 100.0]))})
        np.testing.assert_array_equal(backend.to_numpy(gradients["x"]), [10.0, 0.0, 101.0])
