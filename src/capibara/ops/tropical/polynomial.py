"""Tropical polynomials: piecewise linear functions, the maximum of lines with integer slopes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.errors import OpShapeError
from capibara.ops.explicit import over_explicit_axes
from capibara.ops.one_device import alike
from capibara.ops.tropical.matmul import matmul
from capibara.ops.tropical.problem import check_array, check_semiring, times

__all__ = ["polyval"]

_UNROLLED = 64  # so many lines are compared one after another in one loop over the points


def _line(coefficients: jax.Array, x: jax.Array, exponent: int) -> jax.Array:
    power = exponent * x if exponent else jnp.where(jnp.isnan(x), x, 0)
    return times(coefficients[exponent], power, "max_plus")


@jax.custom_jvp
def _highest(coefficients: jax.Array, x: jax.Array) -> jax.Array:
    """The highest line at each x [q], where no power is ever in memory."""
    best = _line(coefficients, x, 0)
    for exponent in range(1, coefficients.shape[0]):
        best = jnp.maximum(best, _line(coefficients, x, exponent))
    return best


@_highest.defjvp
def _highest_jvp(primals: Any, tangents: Any) -> Any:
    coefficients, x = (lax.stop_gradient(primal) for primal in primals)
    best = _line(coefficients, x, 0)
    index = jnp.zeros(x.shape, jnp.int32)
    for exponent in range(1, coefficients.shape[0]):
        line = _line(coefficients, x, exponent)
        index = jnp.where(line > best, exponent, index)  # the lowest of equal ones stays
        best = jnp.maximum(best, line)
    somewhere = ~jnp.isnan(best) & (best > -jnp.inf)
    slope = tangents[0][index] + index.astype(x.dtype) * tangents[1]
    return _highest(*primals), jnp.where(somewhere, slope, 0)


@over_explicit_axes("coefficients", "x", out=lambda coefficients, x: x)
def polyval(
    coefficients: jax.Array, x: jax.Array, *, semiring: str = "max_plus", implementation: str = "auto"
) -> jax.Array:
    """``max over i of coefficients[i] + i * x``: the constant term comes first (unlike ``jnp.polyval``).

    Equivalent JAX: ``jnp.max(coefficients + jnp.arange(n) * x[..., None], axis=-1)``. With more than 64 coefficients,
    or with an explicit implementation, the powers of ``x`` are an array ``[x.size, n]``. The power 0 is 0 for every
    ``x``; infinities and gradients are as in :func:`matmul`: the slope is the lowest exponent that attains the value.

    Args:
      coefficients: ``[n]``, floating point, ``n`` at least 1.
      x: any shape, floating point.

    Returns:
      The shape of ``x``, in the common dtype (powers are taken in float32 at least).

    Raises:
      OpShapeError, OpTypeError, OpValueError: an argument is invalid; the message names it.
    """
    op = "tropical.polyval"
    check_array(op, "coefficients", coefficients, 1)
    check_array(op, "x", x, 0)
    check_semiring(op, semiring)
    if len(coefficients.shape) != 1 or coefficients.shape[0] == 0:
        raise OpShapeError(
            f"{op}: coefficients must be [n] with n at least 1, got shape {tuple(coefficients.shape)}"
        )
    given: Any = jnp.asarray(x)
    dtype = jnp.promote_types(given.dtype, jnp.asarray(coefficients).dtype)
    wide = jnp.promote_types(dtype, jnp.float32)
    if given.size == 0:
        return alike(jnp.zeros(given.shape, dtype), coefficients, given)
    if implementation == "auto" and coefficients.shape[0] <= _UNROLLED:
        sign = 1 if semiring == "max_plus" else -1
        best = _highest(sign * jnp.asarray(coefficients).astype(wide), sign * given.reshape(-1).astype(wide))
        return (sign * best).reshape(given.shape).astype(dtype)
    exponents = jnp.arange(coefficients.shape[0], dtype=wide)
    base = given.reshape(-1, 1).astype(wide)
    # 0 * inf would be NaN, in the value and in the gradient: so infinities never meet an exponent.
    grown = jnp.where(jnp.isinf(base), base, exponents * jnp.where(jnp.isinf(base), 1, base))
    powers = jnp.where((exponents == 0) & ~jnp.isnan(base), 0, grown)
    column = jnp.asarray(coefficients).astype(wide)[:, None]
    out = matmul(powers, column, semiring=semiring, implementation=implementation)
    return out[:, 0].reshape(given.shape).astype(dtype)
