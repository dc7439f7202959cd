"""RMS norm of rows in one pass over memory, and its gradients in another."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call_one_by_one, on_one_device

__all__ = ["rms_norm", "takes_rms_norm"]


def takes_rms_norm(x: jax.Array, scale: jax.Array | None, accumulate: str) -> bool:
    """Whether :func:`rms_norm` computes the norm of ``x [..., features]`` here."""
    return accumulate == "float32" and scale is not None and scale.shape == x.shape[-1:] and wanted(x, scale)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float, offset: float) -> jax.Array:
    """``x * rsqrt(mean(x ** 2, -1) + epsilon) * (scale + offset)`` (Zhang & Sennrich, 2019).

    Args:
      x: float32 ``[..., features]``. scale: float32 ``[features]``.

    Returns:
      float32 ``[..., features]``. For the backward pass it keeps ``x`` and a number a row.
    """
    return _forward(x, scale, epsilon, offset)[0]


def _forward(x: jax.Array, scale: jax.Array, epsilon: float, offset: float) -> tuple[jax.Array, Any]:
    def by_kernel(x: jax.Array, scale: jax.Array) -> Any:
        out = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (x.shape, x.shape[:-1])]
        options = {"epsilon": float(epsilon), "offset": float(offset)}
        return tuple(native_call_one_by_one("capibara_rms_norm", out, x, scale, **options))

    def by_xla(x: jax.Array, scale: jax.Array) -> Any:
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1) + epsilon)
        return x * inverse[..., None] * (scale + offset), inverse

    y, inverse = on_one_device(by_kernel, by_xla, x, scale)
    return y, (x, scale, inverse)


def _backward(_epsilon: float, offset: float, kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    def by_kernel(*arrays: jax.Array) -> Any:
        out = [jax.ShapeDtypeStruct(array.shape, jnp.float32) for array in arrays[:2]]
        return tuple(native_call_one_by_one("capibara_rms_norm_backward", out, *arrays, offset=float(offset)))

    def by_xla(x: jax.Array, scale: jax.Array, inverse: jax.Array, slope: jax.Array) -> Any:
        unit, wide = x * inverse[..., None], slope * (scale + offset)
        along = jnp.mean(wide * unit, axis=-1, keepdims=True)
        rows = tuple(range(x.ndim - 1))
        return (wide - unit * along) * inverse[..., None], jnp.sum(slope * unit, axis=rows)

    return on_one_device(by_kernel, by_xla, *kept, slope)


rms_norm.defvjp(_forward, _backward)
