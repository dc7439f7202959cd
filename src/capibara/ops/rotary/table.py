"""Tables of rotary positions: how fast each pair of features turns, and the cosines and sines of its angles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.registry import only_platform

__all__ = ["base_frequencies", "rotary_table"]


def base_frequencies(dim: int, theta: float) -> tuple[float, ...]:
    """Radians a position, one for each of ``dim / 2`` pairs: ``theta ** (-2 i / dim)`` (Su et al. 2021)."""
    return tuple(theta ** (-2 * i / dim) for i in range(dim // 2))


def rotary_table(
    positions: jax.Array,
    dim: int,
    theta: float,
    dtype: Any,
    frequencies: Sequence[float] | None = None,
    factor: float = 1.0,
    *,
    once: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines ``[*positions, dim / 2]`` in ``dtype``.

    Args:
      positions: integers.
      dim: number of features that are turned.
      theta: base of the wavelengths.
      frequencies: radians a position, one for each pair. None: :func:`base_frequencies`.
      factor: on both tables.
      once: on CPUs, compute them once for all that use them.
    """
    if frequencies is None:
        # Powers in ``dtype``, not in Python's float64: what published models were trained with.
        inverse = jnp.asarray(theta, dtype) ** (-jnp.arange(0, dim, 2, dtype=dtype) / dim)
    else:
        inverse = jnp.asarray(tuple(frequencies), dtype)
    angle = positions[..., None].astype(dtype) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if once or only_platform() == "cpu":
        # XLA takes cosines for cheap there: fused into what uses them, they are computed again for each head of each
        # layer. A remainder, which changes nothing below 4, it computes once.
        cos, sin = (lax.rem(table, jnp.asarray(4, table.dtype)) for table in (cos, sin))
    return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)
