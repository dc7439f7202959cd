"""Block-wise int8 for communication: each block of consecutive elements shares one float32 scale.

A message is one flat int8 array: the quantised elements, then the bytes of the scales. So each exchange is one int8
collective: ``1 + 4 / block_size`` bytes per element.

A block that contains NaN or infinity becomes NaN, so that overflow stays detectable.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["decode", "encode", "message_size"]


def message_size(numbers: int, block_size: int) -> int:
    """Bytes of the message for that many elements (a multiple of ``block_size``)."""
    return numbers + 4 * (numbers // block_size)


def encode(x: jax.Array, block_size: int) -> jax.Array:
    """``x [..., numbers]`` as messages ``[..., message_size]`` in int8."""
    x = x.astype(
        jnp.promote_types(x.dtype, jnp.float32)
    )  # half-precision scales would lose digits, or vanish
    blocks = x.reshape(*x.shape[:-1], -1, block_size)
    scale = (jnp.max(jnp.abs(blocks), axis=-1, keepdims=True) / 127).astype(jnp.float32)
    finite = jnp.isfinite(scale)
    divisor = jnp.where(finite & (scale > 0), scale, 1).astype(x.dtype)
    # A scale that is rounded down to float32 could give 127.00001; clipping loses nothing that matters.
    whole = jnp.clip(jnp.round(jnp.where(finite, blocks, 0) / divisor), -127, 127).astype(jnp.int8)
    # 0 times an infinite or NaN scale is NaN on the other side.
    bits = lax.bitcast_convert_type(scale[..., 0], jnp.int8)
    shape = x.shape[:-1]
    return jnp.concatenate([whole.reshape(*shape, -1), bits.reshape(*shape, -1)], axis=-1)


def decode(message: jax.Array, block_size: int, dtype: jnp.dtype) -> jax.Array:
    """Decode messages of :func:`encode` to ``[..., numbers]`` in ``dtype``."""
    count = message.shape[-1] // (block_size + 4)
    shape = message.shape[:-1]
    whole = message[..., : count * block_size].reshape(*shape, count, block_size)
    bits = message[..., count * block_size :].reshape(*shape, count, 4)
    scale = lax.bitcast_convert_type(bits, jnp.float32)
    return (whole.astype(dtype) * scale[..., None].astype(dtype)).reshape(*shape, -1)
