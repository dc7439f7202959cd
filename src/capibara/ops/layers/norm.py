"""RMS norm of rows in one pass over memory, and its gradients in another."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call_one_by_one, on_one_device

__all__ = ["norm_beside", "rms_norm", "takes_rms_norm"]


def takes_rms_norm(x: jax.Array, scale: jax.Array | None, accumulate: str) -> bool:
    """Whether :func:`rms_norm` computes the norm of ``x [..., features]`` here."""
    return (
        accumulate == "float32" and scale is not None and scale.shape == x.shape[-1:] and wanted(x, scale)
    )


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, offset: float) -> jax.Array:
    """``x * rsqrt(mean(x ** 2, -1) + epsilon) * (scale + offset)`` (Zhang & Sennrich, 2019).

    Args:
      x: float32 ``[..., features]``. scale: float32 ``[features]``.

    Returns:
      float32 ``[..., features]``. For the backward pass it keeps ``x`` and a number a row.
    """
    return _norm(x, scale, epsilon, offset, False)[1]


def norm_beside(x: jax.Array, scale: jax.Array, epsilon: float, offset: float) -> tuple[jax.Array, jax.Array]:
    """``x``, and :func:`rms_norm` of it: the gradients of both are added where that of the norm is computed."""
    out, normed = _norm(x, scale, epsilon, offset, True)
    return out, normed


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _norm(x: jax.Array, scale: jax.Array, epsilon: float, offset: float, beside: bool) -> Any:
    """``x`` if that is wanted, else None; and its norm."""
    return _forward(x, scale, epsilon, offset, beside)[0]


def _forward(x: jax.Array, scale: jax.Array, epsilon: float, offset: float, beside: bool) -> Any:
    def by_kernel(x: jax.Array, scale: jax.Array) -> Any:
        out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, x.shape[:-1])]
        options = {"epsilon": float(epsilon), "offset": float(offset)}
        return tuple(native_call_one_by_one("capibara_rms_norm", out, x, scale, **options))

    def by_xla(x: jax.Array, scale: jax.Array) -> Any:
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + epsilon)
        return x * inverse[..., None] * (scale + offset), inverse

    normed, inverse = on_one_device(by_kernel, by_xla, x, scale)
    return (x if beside else None, normed), (x, scale, inverse)


def _backward(_epsilon: float, offset: float, beside: bool, kept: Any, slopes: Any) -> tuple[jax.Array, ...]:
    def by_kernel(x: jax.Array, scale: jax.Array, inverse: jax.Array, *slopes: jax.Array) -> Any:
        out = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in (x, scale)]
        arrays = x, scale, inverse, *slopes
        return tuple(native_call_one_by_one("capibara_rms_norm_backward", out, *arrays, offset=float(offset)))

    def by_xla(x: jax.Array, scale: jax.Array, inverse: jax.Array, *slopes: jax.Array) -> Any:
        unit, wide = x * inverse[..., None], slopes[0] * (scale + offset)
        along = jnp.mean(wide * unit, axis=-1, keepdims=True)
        rows = tuple(range(x.ndim - 1))
        of_x = (wide - unit * along) * inverse[..., None]
        return sum(slopes[1:], start=of_x), jnp.sum(slopes[0] * unit, axis=rows)

    past, slope = slopes
    return on_one_device(by_kernel, by_xla, *kept, slope, *([past] if beside else []))


_norm.defvjp(_forward, _backward)
