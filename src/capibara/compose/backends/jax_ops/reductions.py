"""Reductions over one dimension, several, or all (``axis=None``).

Sums and products of integers stay int32 (they wrap around), counts and positions are int32. A maximum that several
elements share gives each of them an equal part of its gradient. NaN anywhere makes the result NaN, and NaN's
position is that of the maximum.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from capibara.compose.errors import InputError

__all__ = ["all", "any", "argmax", "argmin", "max", "mean", "min", "prod", "sum", "variance"]

Array = jax.Array
Axis = int | tuple[int, ...] | None


def _same(x: Array, what: str) -> Array:
    x = jnp.asarray(x)
    if x.dtype == bool:
        raise InputError(f"the {what} of an array of bools is not defined: use Cast('int32') before it")
    return x


def sum(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    x = _same(x, "sum")
    return jnp.sum(x, axis=axis, keepdims=keepdims, dtype=x.dtype)


def mean(x: Array, axis: Axis, keepdims: bool = False, dtype: str | None = None) -> Array:
    """``dtype``: what integers become."""
    return jnp.mean(x if dtype is None else x.astype(dtype), axis=axis, keepdims=keepdims)


def prod(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    x = _same(x, "product")
    return jnp.prod(x, axis=axis, keepdims=keepdims, dtype=x.dtype)


def max(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return jnp.max(x, axis=axis, keepdims=keepdims)


def min(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return jnp.min(x, axis=axis, keepdims=keepdims)


def any(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return jnp.any(x, axis=axis, keepdims=keepdims)


def all(x: Array, axis: Axis, keepdims: bool = False) -> Array:
    return jnp.all(x, axis=axis, keepdims=keepdims)


def variance(x: Array, axis: Axis, correction: int, keepdims: bool = False) -> Array:
    return jnp.var(x, axis=axis, ddof=correction, keepdims=keepdims)


def argmax(x: Array, axis: int | None, keepdims: bool = False) -> Array:
    return jnp.argmax(x, axis=axis, keepdims=keepdims).astype(jnp.int32)


def argmin(x: Array, axis: int | None, keepdims: bool = False) -> Array:
    return jnp.argmin(x, axis=axis, keepdims=keepdims).astype(jnp.int32)
