"""Arithmetic, activations, comparisons, logic and reductions against PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from primitive_table import Case, check, check_dtypes, draw, run
from torch_oracle import functional as F
from torch_oracle import torch

from capibara import compose as ml

p: Any = ml.primitives  # many calls here are wrong on purpose

X, Y, POSITIVE = draw(2, 3, 4), draw(3, 1, seed=1), draw(2, 3, low=0.1)
INTS = np.array([[5, -7, 3], [0, 2, -1]])
TRUE = np.array([[True, False, True], [False, False, True]])
TRUE2 = np.array([[True, True, False], [False, True, True]])


def unary(make: Any, want: Any, x: Any = X, **options: Any) -> Case:
    return Case(make, {"input": x}, lambda input: want(input), **options)


def binary(make: Any, want: Any, left: Any = X, right: Any = Y, **options: Any) -> Case:
    return Case(make, {"left": left, "right": right}, lambda left, right: want(left, right), **options)


CASES = {
    "relu": unary(p.Relu, F.relu),
    "leaky_relu": unary(lambda: p.LeakyRelu(0.2), lambda x: F.leaky_relu(x, 0.2)),
    "elu": unary(lambda: p.Elu(0.5), lambda x: F.elu(x, 0.5)),
    "elu_large": unary(p.Elu, F.elu, np.array([800.0, -800.0])),
    "gelu": unary(p.Gelu, lambda x: F.gelu(x, approximate="tanh")),
    "gelu_exact": unary(lambda: p.Gelu(approximate=False), F.gelu),
    "silu": unary(p.Silu, F.silu),
    "sigmoid": unary(p.Sigmoid, torch.sigmoid, np.array([-800.0, -1.0, 800.0])),
    "tanh": unary(p.Tanh, torch.tanh),
    "softplus": unary(p.Softplus, lambda x: torch.logaddexp(x, 0 * x), np.array([-800.0, 0.5, 800.0])),
    "exp": unary(p.Exp, torch.exp),
    "log": unary(p.Log, torch.log, POSITIVE),
    "log_robust": unary(
        lambda: p.Log(robust=True, threshold=0.5),
        lambda x: torch.where(x < 0.5, np.log(0.5) + (x - 0.5) / 0.5, x.log()),
        POSITIVE,
    ),
    "sqrt": unary(p.Sqrt, torch.sqrt, POSITIVE),
    "sqrt_robust": unary(
        lambda: p.Sqrt(robust=True, threshold=0.25),
        lambda x: torch.where(x.abs() < 0.25, 2 * x.abs(), torch.where(x.abs() < 0.25, 1.0, x.abs()).sqrt()),
        np.array([0.0, 0.1, -0.2, 0.3, -2.0]),
    ),
    "sine": unary(p.Sine, torch.sin),
    "cosine": unary(p.Cosine, torch.cos),
    "square": unary(p.Square, torch.square),
    "square_int": unary(p.Square, torch.square, INTS),
    "absolute": unary(p.Absolute, torch.abs, np.array([-1.5, 0.5, 2.0])),
    "negate": unary(p.Negate, torch.neg),
    "power_of_nothing": binary(
        p.Power,
        lambda left, right: left**right,
        np.array([0.0, 0.0, 2.0, -2.0]),
        np.array([0.0, 2.0, 0.0, 0.0]),
        but="right",
    ),
    "sign": unary(
        p.Sign, lambda x: x * 0 + torch.sign(x), np.array([-1.5, 0.0, 2.0, np.nan]), gradient=False
    ),
    "floor": unary(p.Floor, torch.floor),
    "ceil": unary(p.Ceil, torch.ceil),
    "buffer": unary(p.Buffer, lambda x: x * 1),
    "stop_gradient": unary(p.StopGradient, lambda x: x.detach(), gradient=False),
    "reciprocal": unary(p.Reciprocal, torch.reciprocal, POSITIVE),
    "stable_reciprocal": unary(
        lambda: p.StableReciprocal(0.5),
        lambda x: torch.where(
            x.abs() < 0.5, torch.where(x < 0, -4.0, 4.0) - 4 * x, 1 / torch.where(x == 0, 1.0, x)
        ),
        np.array([-2.0, -0.25, 0.0, 0.125, 3.0]),
    ),
    "norm_modifier": unary(
        p.NormModifier,
        lambda x: torch.where(x < 1, 2 - x, torch.where(x > 5, 10 - x, x)),
        np.array([-2.5, 0.5, 1.5, 4.9, 5.5, 8.5]),
    ),
    "clip": unary(lambda: p.Clip(-1, 0.5), lambda x: x.clamp(-1, 0.5)),
    "clip_low": unary(lambda: p.Clip(low=-1), lambda x: x.clamp(min=-1)),
    "clip_int": unary(lambda: p.Clip(-3, 3.5), lambda x: x.clamp(-3, 3), INTS),
    "is_nan": unary(p.IsNan, torch.isnan, np.array([1.0, np.nan, np.inf]), gradient=False),
    "nan_to_num": unary(
        lambda: p.NanToNum(1.0, posinf=7.0),
        lambda x: torch.nan_to_num(x, 1.0, 7.0),
        np.array([np.nan, np.inf, -np.inf, 2.0]),
    ),
    "decay": unary(p.Decay, lambda x: -x.exp()),
    "softmax": unary(p.Softmax, lambda x: x.softmax(-1), 400 * X),
    "softmax_axis": unary(lambda: p.Softmax(1), lambda x: x.softmax(1)),
    "cast_int": unary(lambda: p.Cast("int32"), lambda x: x.to(torch.int32), gradient=False),
    "cast_bool": unary(lambda: p.Cast("bool"), lambda x: x != 0, INTS),
    "cast_float": unary(lambda: p.Cast("float64"), lambda x: x.double(), INTS),
    "add": binary(p.Add, torch.add),
    "subtract": binary(p.Subtract, torch.sub),
    "multiply": binary(p.Multiply, torch.mul),
    "divide": binary(p.Divide, torch.div),
    "divide_ints": binary(p.Divide, lambda a, b: a.double() / b.double(), INTS, INTS + 10),
    "floor_divide": binary(p.FloorDivide, torch.floor_divide, gradient=False),
    "floor_divide_ints": binary(p.FloorDivide, torch.floor_divide, INTS, np.array([2, -2, 3])),
    "modulo": binary(p.Modulo, torch.remainder),
    "modulo_ints": binary(p.Modulo, torch.remainder, INTS, np.array([2, -2, 3])),
    "power": binary(p.Power, torch.pow, POSITIVE, draw(3)),
    "power_at_0": binary(p.Power, torch.pow, np.array([0.0, 0.0]), np.array([2.0, 3.0])),
    "power_robust": binary(
        lambda: p.Power(robust=True, threshold=0.25),
        lambda x, e: torch.where(
            (x.abs() < 0.25) & (e < 1),
            0.25**e * (1 + e * (x.abs() / 0.25 - 1)),
            torch.where((x.abs() < 0.25) & (e < 1), 1.0, x.abs()) ** e,
        ),
        np.array([0.0, 0.1, -0.2, 0.5, -2.0])[:, None],
        np.array([0.5, 0.9, 2.0, -1.0]),
    ),
    "minimum": binary(p.Minimum, torch.minimum),
    "maximum": binary(p.Maximum, torch.maximum, np.array([1.0, 2.0]), np.array([1.0, 5.0])),
    "equal": binary(p.Equal, torch.eq, INTS, np.array([5, 2, 3])),
    "not_equal": binary(p.NotEqual, torch.ne, INTS, np.array([5, 2, 3])),
    "less": binary(p.Less, torch.lt, gradient=False),
    "less_equal": binary(p.LessEqual, torch.le, INTS, np.array([5, 2, 3])),
    "greater": binary(p.Greater, torch.gt, INTS, np.array([5, 2, 3])),
    "greater_equal": binary(p.GreaterEqual, torch.ge, INTS, np.array([5, 2, 3])),
    "logical_and": binary(p.LogicalAnd, torch.logical_and, TRUE, TRUE2),
    "logical_or": binary(p.LogicalOr, torch.logical_or, TRUE, TRUE2),
    "logical_xor": binary(p.LogicalXor, torch.logical_xor, TRUE, TRUE2),
    "logical_not": unary(p.LogicalNot, torch.logical_not, TRUE),
    "shift_left": binary(p.ShiftLeft, torch.bitwise_left_shift, INTS, np.array([1, 2, 3])),
    "shift_right": binary(p.ShiftRight, torch.bitwise_right_shift, INTS, np.array([1, 2, 1])),
    "where": Case(
        p.Where,
        {"cond": TRUE[:, :, None], "input1": X, "input2": Y},
        lambda cond, input1, input2: torch.where(cond, input1, input2),
    ),
}
REDUCED = {
    "sum": (p.Sum, torch.sum),
    "mean": (p.Mean, torch.mean),
    "max": (p.Max, torch.amax),
    "min": (p.Min, torch.amin),
    "variance": (p.Variance, lambda x, **k: torch.var(x, correction=0, **k)),
}
for _name, (_make, _want) in REDUCED.items():
    for _axis in (None, 0, -1, (0, 2)):
        for _keep in (False, True):
            CASES[f"{_name}_{_axis}_{_keep}"] = unary(
                lambda make=_make, axis=_axis, keep=_keep: make(axis, keepdim=keep),
                lambda x, want=_want, axis=_axis, keep=_keep: want(
                    x, dim=tuple(range(x.ndim)) if axis is None else axis, keepdim=keep
                ),
            )
CASES |= {
    "max_ties": unary(p.Max, torch.amax, np.array([1.0, 3.0, 3.0])),
    "variance_sample": unary(lambda: p.Variance(1, correction=1), lambda x: torch.var(x, 1)),
    "prod": unary(lambda: p.Prod(1), lambda x: torch.prod(x, 1)),
    "prod_with_zeros": unary(p.Prod, torch.prod, np.array([2.0, 0.0, 3.0])),
    "sum_int": unary(lambda: p.Sum(0), lambda x: torch.sum(x, 0), INTS),
    "prod_int": unary(lambda: p.Prod(1), lambda x: torch.prod(x, 1), INTS),
    "mean_int": unary(p.Mean, lambda x: x.double().mean(), INTS),
    "max_int": unary(lambda: p.Max(1), lambda x: torch.amax(x, 1), INTS),
    "any": unary(lambda: p.Any(0), lambda x: torch.any(x, 0), TRUE),
    "all": unary(lambda: p.All((0, 1), True), lambda x: torch.all(x).reshape(1, 1), TRUE),
    "argmax": unary(lambda: p.ArgMax(-1), lambda x: torch.argmax(x, -1), gradient=False),
    "argmax_all": unary(p.ArgMax, torch.argmax, gradient=False),
    "argmin": unary(lambda: p.ArgMin(0, keepdim=True), lambda x: torch.argmin(x, 0, True), gradient=False),
    "argmin_int": unary(lambda: p.ArgMin(1), lambda x: torch.argmin(x, 1), INTS),
}


@pytest.fixture(scope="module")
def found() -> Iterator[Any]:
    yield run(CASES)
    jax.clear_caches()


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", CASES)
def test_against_torch(name: str, found: Any) -> None:
    check(f"elements/{name}", CASES[name], found[name])


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_dtypes(compute: str) -> None:
    check_dtypes({k: v for k, v in CASES.items() if k != "cast_float"}, compute)  # that one asks for float64


@pytest.mark.parametrize(
    "block", [p.Log(True), p.Sqrt(True), p.StableReciprocal(), p.Reciprocal(), p.Absolute(), p.Sign()]
)
def test_at_zero(block: ml.Block) -> None:
    """The safe forms are finite at 0 in float32 with their default thresholds; those of kinks are in test_kinks."""
    compiled = ml.compile(block, shapes={"input": (2,)})
    zero = np.array([0.0, -0.0], "float32")
    value = compiled.apply({}, {"input": zero})["output"]
    gradient = jax.grad(lambda x: compiled.apply({}, {"input": x})["output"].sum())(zero)
    finite = not isinstance(block, p.Reciprocal)
    assert np.isfinite(value).all() == finite
    assert np.isfinite(gradient).all() == finite


def test_root_of_a_distance_of_zero() -> None:
    compiled = ml.compile(p.Power(robust=True), shapes={"left": (1,), "right": ()})

    def root(x: Any, exponent: Any) -> Any:
        return compiled.apply({}, {"left": x, "right": exponent})["output"].sum()

    value, pulled = jax.value_and_grad(root, (0, 1))(np.zeros(1, "float32"), np.float32(0.5))
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in pulled)


def test_sum_of_bools_is_refused() -> None:
    compiled = ml.compile(p.Sum(), jit=False)
    with pytest.raises(ml.ComposeError, match=r"bool"):
        compiled.apply({}, {"input": np.array([True])})


BAD = [
    (lambda: p.LeakyRelu("a"), r"slope='a'"),
    (lambda: p.Log(threshold=0.1), r"threshold=0\.1 is only used with robust=True"),
    (lambda: p.Power(True, -1.0), r"threshold=-1\.0"),
    (lambda: p.Clip(2, 1), r"low=2 is above high=1"),
    (lambda: p.Cast("int"), r"dtype='int' must be one of"),
    (lambda: p.Gelu(approximate=1), r"approximate=1"),
    (lambda: p.Sum("0"), r"axis='0'"),
    (lambda: p.Sum((0, 0)), r"axis=\(0, 0\) names a dimension twice"),
    (lambda: p.Sum(0, keepdim=1), r"keepdim=1"),
    (lambda: p.ArgMax((0, 1)), r"axis=\(0, 1\)"),
    (lambda: p.Variance(correction=-1), r"correction=-1"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(ml.WiringError, match=message):
        make()


BAD_SHAPES = [
    (lambda: p.Sum(3), {"input": (2, 3)}, r"axis=3 is outside an array of 2 dimensions\n.*input \(2, 3\)"),
    (lambda: p.Sum((0, -2)), {"input": (2, 3)}, r"twice"),
    (lambda: p.Softmax(2), {"input": (2, 3)}, r"axis=2 is outside"),
    (lambda: p.Minimum(), {"left": (2,), "right": (3,)}, r"2 does not broadcast with 3\n.*left \(2,\)"),
    (lambda: p.Where(), {"cond": (2,), "input1": (3,), "input2": ()}, r"2 does not broadcast with 3\n.*cond"),
    (lambda: p.Where(), {"cond": (2,), "input1": (2,), "input2": (3,)}, r"input2 \(3,\)"),
]


@pytest.mark.parametrize(("make", "shapes", "message"), BAD_SHAPES)
def test_bad_shapes(make: Any, shapes: Any, message: str) -> None:
    with pytest.raises(ml.ShapeError, match=message):
        ml.compile(make(), shapes=shapes)


def test_kinds_that_do_not_fit() -> None:
    model = ml.Model()
    model |= p.Less()(left="a", right="b", output="c")
    with pytest.raises(ml.KindError, match="bool"):
        model |= p.Relu()(input="c")
