"""Operations on each element: see :mod:`capibara.compose.backends.jax_ops.elementwise`, which means the same."""

from __future__ import annotations

import math
from typing import Any

from capibara.compose.backends.portable.space import as_arrays, space

Array = Any


def _unary(name: str) -> Any:
    def run(x: Array) -> Array:
        xp, x = as_arrays(x)
        return getattr(xp, name)(x)

    run.__name__ = name
    return run


def _binary(name: str) -> Any:
    def run(left: Array, right: Array) -> Array:
        xp, left, right = as_arrays(left, right)
        return getattr(xp, name)(left, right)

    run.__name__ = name
    return run


relu, sigmoid, softplus = _unary("relu"), _unary("sigmoid"), _unary("softplus")
tanh, exp, log, sine, cosine, sqrt = (_unary(n) for n in ("tanh", "exp", "log", "sin", "cos", "sqrt"))
negate, sign, floor, ceil = (_unary(n) for n in ("negative", "sign", "floor", "ceil"))
is_nan, logical_not = _unary("isnan"), _unary("logical_not")
add, subtract, multiply, power = (_binary(n) for n in ("add", "subtract", "multiply", "power"))
floor_divide, modulo = _binary("floor_divide"), _binary("remainder")
minimum, maximum = _binary("minimum"), _binary("maximum")
logical_and, logical_or = _binary("logical_and"), _binary("logical_or")
logical_xor = _binary("logical_xor")
shift_left, shift_right = _binary("left_shift"), _binary("right_shift")


def equal(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left == right


def not_equal(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left != right


def less(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left < right


def less_equal(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left <= right


def greater(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left > right


def greater_equal(left: Array, right: Array) -> Array:
    _, left, right = as_arrays(left, right)
    return left >= right


def where(condition: Array, first: Array, second: Array) -> Array:
    xp, first, second = as_arrays(first, second)
    if not hasattr(condition, "shape"):
        condition = xp.asarray(condition)
    return space(condition, first).where(condition, first, second)


def stop_gradient(x: Array) -> Array:
    return space(x).stop(x)


def square(x: Array) -> Array:
    return x * x


def reciprocal(x: Array) -> Array:
    xp, x = as_arrays(x)
    return xp.divide(xp.constant(1, x), x)


def divide(left: Array, right: Array, dtype: str | None = None) -> Array:
    xp, left, right = as_arrays(left, right)
    if dtype is not None:
        left, right = xp.astype(left, dtype), xp.astype(right, dtype)
    return xp.divide(left, right)


def buffer(x: Array) -> Array:
    return x


def absolute(x: Array) -> Array:
    return x * space(x).sign(x)


def cast(x: Array, dtype: str) -> Array:
    xp, x = as_arrays(x)
    return xp.astype(x, dtype)


def cast_up(x: Array, accumulate: str) -> Array:
    return space(x).astype(x, accumulate)


def decay(x: Array) -> Array:
    return -space(x).exp(x)


def silu(x: Array) -> Array:
    xp, x = as_arrays(x)
    return x * xp.sigmoid(x)


def gelu(x: Array, approximate: bool = True) -> Array:
    xp, x = as_arrays(x)
    if approximate:
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1 + xp.tanh(inner))
    return 0.5 * x * (1 + xp.erf(x * math.sqrt(0.5)))


def leaky_relu(x: Array, slope: Any) -> Array:
    return space(x).where(x > 0, x, slope * x)


def elu(x: Array, alpha: float) -> Array:
    xp, x = as_arrays(x)
    return xp.where(x > 0, x, alpha * xp.expm1(xp.where(x > 0, xp.constant(0, x), x)))


def softmax(x: Array, axis: int = -1) -> Array:
    if 0 in x.shape:
        return x  # without elements, which have no maximum
    xp, x = as_arrays(x)
    weight = xp.exp(x - xp.stop(xp.amax(x, axis, True)))
    return weight / xp.sum(weight, axis, True)


def log_softmax(x: Array, axis: int = -1) -> Array:
    if 0 in x.shape:
        return x
    xp, x = as_arrays(x)
    shifted = x - xp.stop(xp.amax(x, axis, True))
    return shifted - xp.log(xp.sum(xp.exp(shifted), axis, True))


def clip(x: Array, low: float | None, high: float | None) -> Array:
    xp, x = as_arrays(x)
    if low is not None:
        x = xp.maximum(x, xp.constant(low, x))
    return x if high is None else xp.minimum(x, xp.constant(high, x))


def nan_to_num(x: Array, nan: float, posinf: float | None, neginf: float | None) -> Array:
    xp, x = as_arrays(x)
    large = _largest(x)
    x = xp.where(xp.isnan(x), xp.constant(nan, x), x)
    x = xp.where(x == math.inf, xp.constant(large if posinf is None else posinf, x), x)
    return xp.where(x == -math.inf, xp.constant(-large if neginf is None else neginf, x), x)


def _largest(x: Array) -> float:
    return {"float64": 1.7976931348623157e308, "float32": 3.4028234663852886e38, "float16": 65504.0}.get(
        space(x).dtype_of(x), 3.3895313892515355e38
    )


def norm_modifier(x: Array) -> Array:
    """A triangle wave between 1 and 5 with period 8, equal to x on [1, 5]."""
    xp, x = as_arrays(x)
    return 1 + 4 * (1 - absolute(xp.remainder(x - 1, xp.constant(8, x)) / 4 - 1))


def _tiny(x: Array, threshold: float | None, root: bool) -> float:
    if threshold is not None:
        return threshold
    tiny = space(x).tiny(x)
    return tiny**0.5 if root else tiny


def robust_log(x: Array, threshold: float | None) -> Array:
    xp, x = as_arrays(x)
    t = _tiny(x, threshold, False)
    below = x < t
    limit = xp.constant(t, x)
    # (Where the tangent is not taken it could overflow.)
    return xp.where(
        below, xp.log(limit) + (xp.where(below, x, limit) - limit) / limit, xp.log(xp.where(below, limit, x))
    )


def robust_sqrt(x: Array, threshold: float | None) -> Array:
    xp, x = as_arrays(x)
    t = _tiny(x, threshold, False)
    size = absolute(x)
    below = size < t
    return xp.where(below, size / t**0.5, xp.sqrt(xp.where(below, xp.constant(t, x), size)))


def robust_power(base: Array, exponent: Array, threshold: float | None) -> Array:
    xp, base, exponent = as_arrays(base, exponent)
    exponent = xp.astype(exponent, xp.dtype_of(base))
    t = _tiny(base, threshold, True)
    size = absolute(base)
    below = xp.logical_and(size < t, exponent < 1)
    one = xp.constant(1, base)
    low = xp.where(exponent < 1, exponent, one)
    tangent = xp.power(xp.constant(t, base), low) * (1 + low * (xp.where(below, size, one) / t - 1))
    return xp.where(below, tangent, xp.power(xp.where(below, one, size), exponent))


def stable_reciprocal(x: Array, threshold: float | None) -> Array:
    xp, x = as_arrays(x)
    t = _tiny(x, threshold, True)
    below = xp.logical_and(x < t, x > -t)
    near = xp.where(below, x, xp.constant(t, x))  # elsewhere the tangent could overflow
    tangent = xp.where(x < 0, xp.constant(-2.0, x), xp.constant(2.0, x)) / t - near / t / t
    return xp.where(below, tangent, 1 / xp.where(below, xp.constant(t, x), x))
