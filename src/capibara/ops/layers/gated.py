"""``silu(gate) * up`` in one pass over memory, and its gradients in another, of which the two inputs are kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from capibara.ops.layers.wanted import wanted
from capibara.ops.one_device import native_call, on_one_device

__all__ = ["gated", "takes_gated"]


def takes_gated(gate: jax.Array, up: jax.Array) -> bool:
    """Whether :func:`gated` computes ``silu(gate) * up`` here."""
    return gate.shape == up.shape and wanted(gate, up)


@jax.custom_vjp
def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """``gate * sigmoid(gate) * up``, between the products of a gated layer (Shazeer, 2020).

    Args:
      gate, up: float32, of the same shape.

    Returns:
      float32, of this shape.
    """
    return on_one_device(_by_kernel, lambda gate, up: jax.nn.silu(gate) * up, gate, up)


def _by_kernel(gate: jax.Array, up: jax.Array) -> jax.Array:
    return native_call("capibara_gated", [jax.ShapeDtypeStruct(gate.shape, jnp.float32)], gate, up)[0]


def _forward(gate: jax.Array, up: jax.Array) -> tuple[jax.Array, Any]:
    return gated(gate, up), (gate, up)


def _backward(kept: Any, slope: jax.Array) -> tuple[jax.Array, jax.Array]:
    def by_kernel(gate: jax.Array, up: jax.Array, slope: jax.Array) -> Any:
        out = [jax.ShapeDtypeStruct(gate.shape, jnp.float32)] * 2
        return tuple(native_call("capibara_gated_backward", out, gate, up, slope))

    def by_xla(gate: jax.Array, up: jax.Array, slope: jax.Array) -> Any:
        part = jax.nn.sigmoid(gate)
        active = gate * part
        return slope * up * (part + active * (1 - part)), slope * active

    return on_one_device(by_kernel, by_xla, *kept, slope)


gated.defvjp(_forward, _backward)
