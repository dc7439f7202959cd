"""Operations on each element: arithmetic, activations, comparisons, logic.

Two arguments broadcast as in NumPy. At a kink the gradient is the one from the left (``relu``, ``leaky_relu``) or
zero (``absolute``, ``sign``); where two values tie in ``minimum`` and ``maximum`` each gets half.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = [
    "absolute",
    "add",
    "buffer",
    "cast",
    "cast_up",
    "ceil",
    "clip",
    "cosine",
    "decay",
    "divide",
    "elu",
    "equal",
    "exp",
    "floor",
    "floor_divide",
    "gelu",
    "greater",
    "greater_equal",
    "is_nan",
    "leaky_relu",
    "less",
    "less_equal",
    "log",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "modulo",
    "multiply",
    "nan_to_num",
    "negate",
    "norm_modifier",
    "not_equal",
    "power",
    "reciprocal",
    "relu",
    "robust_log",
    "robust_power",
    "robust_sqrt",
    "shift_left",
    "shift_right",
    "sigmoid",
    "sign",
    "silu",
    "sine",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "stable_reciprocal",
    "stop_gradient",
    "subtract",
    "tanh",
    "where",
]

Array = jax.Array

relu = jax.nn.relu
silu = jax.nn.silu
sigmoid = jax.nn.sigmoid
softplus = jax.nn.softplus
tanh, exp, log, square = jnp.tanh, jnp.exp, jnp.log, jnp.square
sine, cosine, sqrt, negate, sign = jnp.sin, jnp.cos, jnp.sqrt, jnp.negative, jnp.sign
floor, ceil, is_nan, reciprocal = jnp.floor, jnp.ceil, jnp.isnan, jnp.reciprocal
add, subtract, multiply = jnp.add, jnp.subtract, jnp.multiply
floor_divide, modulo = jnp.floor_divide, jnp.mod
minimum, maximum = jnp.minimum, jnp.maximum
equal, not_equal = jnp.equal, jnp.not_equal
less, less_equal, greater, greater_equal = jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal
logical_and, logical_or = jnp.logical_and, jnp.logical_or
logical_xor, logical_not = jnp.logical_xor, jnp.logical_not
shift_left, shift_right = jnp.left_shift, jnp.right_shift
where = jnp.where
stop_gradient = lax.stop_gradient


def power(left: Array, right: Array) -> Array:
    """``left ** right``; at 0⁰, which is 1, both gradients are 0, where JAX's own are ``0 · ∞``."""
    if jnp.issubdtype(jnp.result_type(left, right), jnp.floating) and not (
        (isinstance(right, int | float) and right != 0) or (isinstance(left, int | float) and left != 0)
    ):
        left = jnp.where((left == 0) & (right == 0), 1, left)
    return jnp.power(left, right)


def divide(left: Array, right: Array, dtype: str | None = None) -> Array:
    """``dtype``: what integers become."""
    if dtype is not None:
        left, right = jnp.asarray(left, dtype), jnp.asarray(right, dtype)
    return jnp.divide(left, right)


def buffer(x: Array) -> Array:
    return x


absolute = jnp.abs


def _magnitude(x: Array) -> Array:
    """``|x|`` with gradient 0 at 0, for what is to be smooth there."""
    return x * jnp.sign(x)


def cast(x: Array, dtype: str) -> Array:
    return x.astype(dtype)


def cast_up(x: Array, accumulate: str) -> Array:
    return x.astype(accumulate)


def decay(x: Array) -> Array:
    return -jnp.exp(x)


def gelu(x: Array, approximate: bool = True) -> Array:
    return jax.nn.gelu(x, approximate=approximate)


def leaky_relu(x: Array, slope: float) -> Array:
    return jnp.where(x >= 0, x, slope * x)  # as jax.nn.leaky_relu, with a slope of x's dtype


def elu(x: Array, alpha: float) -> Array:
    # expm1 of the negative part only: a large positive x would overflow in the branch that is not taken.
    return jnp.where(x > 0, x, alpha * jnp.expm1(jnp.where(x > 0, 0, x)))


def softmax(x: Array, axis: int = -1) -> Array:
    return jax.nn.softmax(x, axis=axis)


def clip(x: Array, low: float | None, high: float | None) -> Array:
    return jnp.clip(x, low, high).astype(x.dtype)


def nan_to_num(x: Array, nan: float, posinf: float | None, neginf: float | None) -> Array:
    return jnp.nan_to_num(x, nan=nan, posinf=posinf, neginf=neginf)


def norm_modifier(x: Array) -> Array:
    """A triangle wave between 1 and 5 with period 8, equal to x on [1, 5]."""
    return 1 + 4 * (1 - jnp.abs(jnp.mod(x - 1, 8) / 4 - 1))


def _tiny(x: Array, threshold: float | None, root: bool) -> float:
    """The threshold, or the smallest one with whose reciprocal (root: squared) the dtype can still compute."""
    if threshold is not None:
        return threshold
    tiny = float(jnp.finfo(x.dtype).tiny)
    return tiny**0.5 if root else tiny


def robust_log(x: Array, threshold: float | None) -> Array:
    x = jnp.asarray(x)
    t = _tiny(x, threshold, False)
    below = x < t
    return jnp.where(below, jnp.log(jnp.asarray(t, x.dtype)) + (x - t) / t, jnp.log(jnp.where(below, t, x)))


def robust_sqrt(x: Array, threshold: float | None) -> Array:
    x = jnp.asarray(x)
    t = _tiny(x, threshold, False)
    size = _magnitude(x)
    below = size < t
    return jnp.where(below, size / t**0.5, jnp.sqrt(jnp.where(below, t, size)))


def robust_power(base: Array, exponent: Array, threshold: float | None) -> Array:
    base = jnp.asarray(base)
    exponent = jnp.asarray(exponent, base.dtype)
    t = _tiny(base, threshold, True)
    size = _magnitude(base)
    below = (size < t) & (exponent < 1)
    # The tangent at the threshold, in terms of t only, so that neither branch's gradient is infinite.
    low = jnp.where(exponent < 1, exponent, 1)
    tangent = jnp.power(jnp.asarray(t, base.dtype), low) * (1 + low * (size / t - 1))
    return jnp.where(below, tangent, jnp.power(jnp.where(below, 1, size), exponent))


def stable_reciprocal(x: Array, threshold: float | None) -> Array:
    x = jnp.asarray(x)
    t = _tiny(x, threshold, True)
    below = jnp.abs(x) < t
    tangent = jnp.where(x < 0, -2.0, 2.0).astype(x.dtype) / t - x / t / t
    return jnp.where(below, tangent, 1 / jnp.where(below, t, x))
