"""Rotary positions in one pass over memory; the gradient is the same rotation backwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call_one_by_one, on_one_device

__all__ = ["rotate", "takes_rotate"]


def takes_rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> bool:
    """Whether :func:`rotate` turns ``x [*batch, length, heads, features]`` here."""
    fits = x.ndim >= 3 and cos.shape == sin.shape and 0 < 2 * cos.shape[-1] <= x.shape[-1]
    return fits and cos.shape[:-1] in (x.shape[:-2], x.shape[-3:-2]) and wanted(x, cos, sin)


@jax.custom_vjp
def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """:func:`capibara.ops.rotary` of one array with given tables, in the layout ``"halves"``.

    Args:
      x: float32 ``[*batch, length, heads, features]``.
      cos, sin: float32 ``[*batch, length, pairs]`` or ``[length, pairs]``.

    Returns:
      float32, like ``x``.
    """
    return _turned(x, cos, sin, 1.0)


def _by_xla(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    cos, sin = cos[..., None, :], sin[..., None, :]
    a, b, rest = jnp.split(x, (cos.shape[-1], 2 * cos.shape[-1]), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def _turned(x: jax.Array, cos: jax.Array, sin: jax.Array, sign: float) -> jax.Array:
    def by_kernel(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        return native_call_one_by_one("capibara_turned", [out], x, cos, sin, sign=sign)[0]

    return on_one_device(by_kernel, lambda x, cos, sin: _by_xla(x, cos, sign * sin), x, cos, sin)


def _forward(x: Any, cos: Any, sin: Any) -> tuple[jax.Array, Any]:
    tables = cos.value, sin.value
    # What the gradients of tables are computed from is kept where somebody asks for them.
    return rotate(x.value, *tables), (tables, x.value if cos.perturbed or sin.perturbed else None)


def _backward(kept: Any, slope: Any) -> tuple[Any, Any, Any]:
    tables, x = kept
    if isinstance(slope, SymbolicZero):
        return None, None, None
    cos, sin = tables
    of_x = _turned(slope, cos, sin, -1.0)
    if x is None:
        return of_x, None, None
    of_cos, of_sin = jax.vjp(partial(_by_xla, x), cos, sin)[1](slope)
    return of_x, of_cos, of_sin


rotate.defvjp(_forward, _backward, symbolic_zeros=True)
