"""The ATen operations that work on each element by itself.

For :mod:`.from_torch_operations`, whose functions these are. What compose has no primitive for is put together, so
that it is exact to rounding also where the plain formula is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from capibara.compose import primitives as p
from capibara.compose.interchange.from_torch_sizes import Refused, is_open

__all__ = ["ELEMENTS", "times", "two"]


def one(make: Callable[[], Any]) -> Any:
    def run(step: Any, x: Any, *_: Any, **__: Any) -> Any:
        return step.put(make(), input=step.cast(0, x))

    return run


def two(make: Callable[[], Any], kind: str | None = None) -> Any:
    def run(step: Any, left: Any, right: Any, *, alpha: Any = 1) -> Any:
        want = kind
        if want == "same":  # comparisons: the operands meet in the wider of their kinds
            kinds = {step.kind_at(0), step.kind_at(1)} - {None}
            want = next(k for k in ("float", "int", "bool") if k in kinds)
            want = "int" if want == "bool" else want
        left, right = step.cast(0, left, want), step.cast(1, right, want)
        return step.put(make(), left=left, right=times(step, right, alpha))

    return run


def _subtract_from(step: Any, x: Any, other: Any, alpha: Any = 1) -> Any:
    x = step.cast(0, x)
    return step.put(p.Subtract(), left=step.cast(1, other), right=times(step, x, alpha))


def times(step: Any, x: Any, factor: Any) -> Any:
    if is_open(factor):
        factor = step.turned(factor, step.kind_of(factor), step.kind)
    return (
        x if isinstance(factor, int | float) and factor == 1 else step.put(p.Multiply(), left=x, right=factor)
    )


def _divide(step: Any, left: Any, right: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return two(p.Divide)(step, left, right)
    if rounding_mode == "floor":
        return two(p.FloorDivide)(step, left, right)
    raise Refused(f"rounding_mode={rounding_mode!r}; None and 'floor' are known")


def _power(step: Any, base: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and step.kind == "float":
        known = {2: p.Square, 0.5: p.Sqrt, 1: p.Buffer, -1: p.Reciprocal}.get(exponent)
        if known is not None:
            return step.put(known(), input=step.cast(0, base))
    return two(p.Power)(step, base, exponent)


def _rsqrt(step: Any, x: Any) -> Any:
    return step.put(p.Reciprocal(), input=step.put(p.Sqrt(), input=step.cast(0, x)))


def _clamp(step: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    if not all(bound is None or isinstance(bound, int | float) for bound in (low, high)):
        return _clamp_by_arrays(step, x, low, high)
    return step.put(p.Clip(low, high), input=step.cast(0, x))


def _elu(step: Any, x: Any, alpha: Any = 1.0, scale: Any = 1.0, input_scale: Any = 1.0) -> Any:
    inner = times(step, x, input_scale)
    return times(step, step.put(p.Elu(float(alpha)), input=inner), scale)


def _softplus(step: Any, x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    # Beyond the threshold torch gives x itself, which differs by less than exp(-threshold) / beta.
    if threshold < 20:
        raise Refused(f"threshold={threshold}; 20 and more are known")
    made = step.put(p.Softplus(), input=times(step, x, beta))
    return times(step, made, 1 / beta)


def _log_softmax(step: Any, x: Any, axis: int, *_: Any) -> Any:
    top = step.put(p.Max(axis, True), input=x)
    low = step.put(p.Subtract(), left=x, right=step.put(p.StopGradient(), input=top))
    total = step.put(p.Sum(axis, True), input=step.put(p.Exp(), input=low))
    return step.put(p.Subtract(), left=low, right=step.put(p.Log(), input=total))


def _log1p(step: Any, x: Any) -> Any:
    # Near 0: 2 artanh(z) with z = x / (2 + x), whose series is exact to rounding after z⁹ for |x| < 0.02.
    x = step.cast(0, x)
    near = step.put(p.Less(), left=step.put(p.Absolute(), input=x), right=0.02)
    small = step.put(p.Where(), cond=near, input1=x, input2=0.0)
    z = step.put(p.Divide(), left=small, right=step.put(p.Add(), left=small, right=2.0))
    square = step.put(p.Square(), input=z)
    total: Any = 1 / 9
    for n in (7, 5, 3, 1):
        total = step.put(p.Add(), left=step.put(p.Multiply(), left=square, right=total), right=1 / n)
    series = step.put(p.Multiply(), left=step.put(p.Multiply(), left=z, right=2.0), right=total)
    rest = step.put(p.Where(), cond=near, input1=1.0, input2=x)
    log = step.put(p.Log(), input=step.put(p.Add(), left=rest, right=1.0))
    return step.put(p.Where(), cond=near, input1=series, input2=log)


def _gelu(step: Any, x: Any, *, approximate: str = "none") -> Any:
    return step.put(p.Gelu(approximate == "tanh"), input=x)


def _or_bools(run: Any, make: Any) -> Any:
    """``a + b`` and ``a * b`` of booleans are "or" and "and"."""

    def choose(step: Any, left: Any, right: Any, **options: Any) -> Any:
        if step.kind != "bool":
            return run(step, left, right, **options)
        return step.put(make(), left=step.cast(0, left), right=step.cast(1, right))

    return choose


def _safe_softmax(step: Any, x: Any, axis: int, *_: Any) -> Any:
    # A row that is all -inf gives zeros. No -inf meets another on the way, also not in a gradient.
    x = step.cast(0, x)
    hidden = step.put(p.Equal(), left=step.put(p.Max(axis, True), input=x), right=-math.inf)
    out = step.put(p.Softmax(axis), input=step.put(p.Clip(-3e38, None), input=x))
    return step.put(p.Where(), cond=hidden, input1=0.0, input2=out)


def _clamp_by_arrays(step: Any, x: Any, low: Any = None, high: Any = None) -> Any:
    x = step.cast(0, x)
    if low is not None:
        x = step.put(p.Maximum(), left=x, right=step.cast(1, low))
    return x if high is None else step.put(p.Minimum(), left=x, right=step.cast(2, high))


def _erf(step: Any, x: Any) -> Any:
    # gelu(x √2) = x (1 + erf x) / √2. Near 0 that loses digits: there the series, exact to rounding for |x| < 0.1.
    x = step.cast(0, x)
    near = step.put(p.Less(), left=step.put(p.Absolute(), input=x), right=0.1)
    small = step.put(p.Where(), cond=near, input1=x, input2=0.0)
    square = step.put(p.Square(), input=small)
    total: Any = 1 / (11 * 120) * -1.0
    for n, factorial in ((4, 24), (3, -6), (2, 2), (1, -1), (0, 1)):
        total = step.put(p.Multiply(), left=square, right=total)
        total = step.put(p.Add(), left=total, right=1 / ((2 * n + 1) * factorial))
    series = step.put(p.Multiply(), left=times(step, small, 2 / math.sqrt(math.pi)), right=total)
    rest = step.put(p.Clip(-10.0, 10.0), input=step.put(p.Where(), cond=near, input1=1.0, input2=x))
    far = step.put(p.Gelu(False), input=times(step, rest, math.sqrt(2)))
    far = step.put(p.Divide(), left=times(step, far, math.sqrt(2)), right=rest)
    return step.put(p.Where(), cond=near, input1=series, input2=step.put(p.Subtract(), left=far, right=1.0))


def _expm1(step: Any, x: Any) -> Any:
    # Near 0: 2 t / (1 - t) with t = tanh(x / 2).
    x = step.cast(0, x)
    near = step.put(p.Less(), left=step.put(p.Absolute(), input=x), right=1.0)
    small = step.put(p.Where(), cond=near, input1=x, input2=0.0)
    t = step.put(p.Tanh(), input=times(step, small, 0.5))
    exact = step.put(p.Divide(), left=times(step, t, 2.0), right=step.put(p.Subtract(), left=1.0, right=t))
    rest = step.put(p.Subtract(), left=step.put(p.Exp(), input=x), right=1.0)
    return step.put(p.Where(), cond=near, input1=exact, input2=rest)


def _sinh(step: Any, x: Any) -> Any:
    e = _expm1(step, x)
    other = step.put(p.Divide(), left=e, right=step.put(p.Add(), left=e, right=1.0))
    return times(step, step.put(p.Add(), left=e, right=other), 0.5)


def _cosh(step: Any, x: Any) -> Any:
    x = step.cast(0, x)
    both = [step.put(p.Exp(), input=v) for v in (x, step.put(p.Negate(), input=x))]
    return times(step, step.put(p.Add(), left=both[0], right=both[1]), 0.5)


def _tan(step: Any, x: Any) -> Any:
    x = step.cast(0, x)
    return step.put(p.Divide(), left=step.put(p.Sine(), input=x), right=step.put(p.Cosine(), input=x))


def _trunc(step: Any, x: Any) -> Any:
    if step.kind != "float":
        return x
    whole = step.put(p.Floor(), input=step.put(p.Absolute(), input=x))
    return step.put(p.Multiply(), left=step.put(p.Sign(), input=x), right=whole)


def _round(step: Any, x: Any, *, decimals: int = 0) -> Any:
    """To the nearest integer, halves to the even one."""
    if decimals:
        raise Refused(f"decimals={decimals}; 0 is known")
    if step.kind != "float":
        return x
    low = step.put(p.Floor(), input=x)
    rest = step.put(p.Subtract(), left=x, right=low)
    odd = step.put(p.Equal(), left=step.put(p.Modulo(), left=low, right=2.0), right=1.0)
    half = step.put(p.LogicalAnd(), left=step.put(p.Equal(), left=rest, right=0.5), right=odd)
    up = step.put(p.LogicalOr(), left=step.put(p.Greater(), left=rest, right=0.5), right=half)
    return step.put(p.Where(), cond=up, input1=step.put(p.Add(), left=low, right=1.0), input2=low)


def _fmod(step: Any, x: Any, y: Any) -> Any:
    """The rest of a division towards 0: it has the sign of ``x``."""
    x, y = step.cast(0, x), step.cast(1, y)
    size = abs(y) if isinstance(y, int | float | np.ndarray) else step.put(p.Absolute(), input=y)
    rest = step.put(p.Modulo(), left=step.put(p.Absolute(), input=x), right=size)
    return step.put(p.Multiply(), left=step.put(p.Sign(), input=x), right=rest)


def _hypot(step: Any, x: Any, y: Any) -> Any:
    squares = [step.put(p.Square(), input=step.cast(i, v)) for i, v in enumerate((x, y))]
    return step.put(p.Sqrt(), input=step.put(p.Add(), left=squares[0], right=squares[1]))


def _infinite(step: Any, x: Any) -> Any:
    if step.kind_at(0) != "float":
        raise Refused("of integers")
    return step.put(p.Equal(), left=step.put(p.Absolute(), input=x), right=math.inf)


ELEMENTS: dict[str, Any] = {
    **{
        name: one(make)
        for name, make in {
            "relu": p.Relu,
            "silu": p.Silu,
            "sigmoid": p.Sigmoid,
            "tanh": p.Tanh,
            "exp": p.Exp,
            "log": p.Log,
            "sqrt": p.Sqrt,
            "sin": p.Sine,
            "cos": p.Cosine,
            "neg": p.Negate,
            "abs": p.Absolute,
            "sign": p.Sign,
            "floor": p.Floor,
            "ceil": p.Ceil,
            "reciprocal": p.Reciprocal,
        }.items()
    },
    "leaky_relu": lambda step, x, slope=0.01: step.put(p.LeakyRelu(float(slope)), input=x),
    "gelu": _gelu,
    "log1p": _log1p,
    "elu": _elu,
    "softplus": _softplus,
    "hardtanh": lambda s, x, a=-1.0, b=1.0: _clamp(s, x, a, b),
    "clamp": _clamp,
    "rsqrt": _rsqrt,
    "pow": _power,
    "isnan": lambda s, x: s.put(p.IsNan(), input=x),
    "add": _or_bools(two(p.Add), p.LogicalOr),
    "sub": two(p.Subtract),
    "mul": _or_bools(two(p.Multiply), p.LogicalAnd),
    "div": _divide,
    "rsub": _subtract_from,
    "minimum": two(p.Minimum),
    "maximum": two(p.Maximum),
    "remainder": two(p.Modulo),
    "_softmax": lambda step, x, axis, *_: step.put(p.Softmax(axis), input=x),
    "_safe_softmax": _safe_softmax,
    "_log_softmax": _log_softmax,
    "erf": _erf,
    "expm1": _expm1,
    "exp2": lambda s, x: s.put(p.Exp(), input=times(s, s.cast(0, x), math.log(2))),
    "log2": lambda s, x: times(s, s.put(p.Log(), input=s.cast(0, x)), 1 / math.log(2)),
    "log10": lambda s, x: times(s, s.put(p.Log(), input=s.cast(0, x)), 1 / math.log(10)),
    "sinh": _sinh,
    "cosh": _cosh,
    "tan": _tan,
    "trunc": _trunc,
    "round": _round,
    "fmod": _fmod,
    "hypot": _hypot,
    "isinf": _infinite,
}
"""By the operation's name without its overload."""
