"""Shared by attention's Pallas kernels: visibility of blocks, and soft-capping of scores.

A kernel processes blocks of queries (``rows``) and of keys. A causal mask or a window hides some pairs of blocks
completely, which are then neither fetched nor computed, and some partially, which are masked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

__all__ = ["Plan", "Range", "bend"]


@dataclass(frozen=True)
class Plan:
    """Static parameters of the kernels. ``rows``/``keys``: the block sizes; ``kv_len``: keys before padding."""

    rows: int
    keys: int
    kv_len: int
    left: int | None
    right: int | None
    scale: float
    softcap: float | None
    precision: Any
    dtype: str
    """Of the results; the operands may be narrower."""
    interpret: bool
    heads: tuple[int, int] | None = None
    """Key heads and query heads of each, where the heads of a position stand side by side: ``[batch, rows, heads *
    dim]`` (TPU only). None: arrays are ``[batch, kv_heads, group, rows, dim]``."""

    def key_blocks(self, total: int) -> Range:
        """Key blocks that a block of queries sees."""
        return Range(self.rows, self.keys, total, self.left, self.right)

    def row_blocks(self, total: int) -> Range:
        """Blocks of queries that see a block of keys."""
        return Range(self.keys, self.rows, total, self.right, self.left)

    def hides(self, i: Any, j: Any) -> Any:
        """Whether some pair of row block ``i`` and key block ``j`` is hidden."""
        hidden = (j + 1) * self.keys > self.kv_len
        if self.left is not None:
            hidden |= j * self.keys < (i + 1) * self.rows - 1 - self.left
        if self.right is not None:
            hidden |= (j + 1) * self.keys - 1 > i * self.rows + self.right
        return hidden

    def visible(self, i: Any, j: Any, transposed: bool) -> jax.Array:
        """Which pairs of row block ``i`` and key block ``j`` see each other."""
        shape = (self.keys, self.rows) if transposed else (self.rows, self.keys)
        rows = i * self.rows + lax.broadcasted_iota(jnp.int32, shape, int(transposed))
        columns = j * self.keys + lax.broadcasted_iota(jnp.int32, shape, 1 - int(transposed))
        seen = columns < self.kv_len
        if self.left is not None:
            seen &= columns >= rows - self.left
        if self.right is not None:
            seen &= columns <= rows + self.right
        return seen


@dataclass(frozen=True)
class Range:
    """The blocks of size ``inner`` (``total`` of them) that block ``i`` of size ``outer`` reaches."""

    outer: int
    inner: int
    total: int
    back: int | None
    ahead: int | None

    @property
    def steps(self) -> int:
        """The maximum number of blocks that any block reaches."""
        if self.back is None or self.ahead is None:
            return self.total
        span = self.outer + self.back + self.ahead
        return min(self.total, (span - 1) // self.inner + 2)

    def first(self, i: Any) -> Any:
        return (
            0
            if self.back is None
            else lax.div(jnp.maximum(i * self.outer - self.back, 0), jnp.int32(self.inner))
        )

    def last(self, i: Any) -> Any:
        if self.ahead is None:
            return self.total - 1
        return jnp.minimum(
            lax.div((i + 1) * self.outer - 1 + self.ahead, jnp.int32(self.inner)), self.total - 1
        )

    def at(self, i: Any, step: Any) -> Any:
        """The block of this step; after the last one it is repeated, so that nothing more is fetched."""
        return jnp.clip(jnp.minimum(self.first(i) + step, self.last(i)), 0, self.total - 1)

    def live(self, i: Any, step: Any) -> Any:
        return self.first(i) + step <= self.last(i)

    def pairs(self, blocks: int) -> int:
        """The number of visible pairs of blocks, for ``blocks`` of size ``outer``."""
        count = 0
        for i in range(blocks):
            first = 0 if self.back is None else max(i * self.outer - self.back, 0) // self.inner
            last = self.total - 1
            if self.ahead is not None:
                last = min(((i + 1) * self.outer - 1 + self.ahead) // self.inner, last)
            count += max(0, last - first + 1)
        return count


def bend(plan: Plan, scores: jax.Array, unit: float = 1.0) -> tuple[jax.Array, jax.Array | None]:
    """The scores scaled and soft-capped, times ``unit``, and the cap's slope."""
    if plan.softcap is None:
        return scores * (plan.scale * unit), None
    bent = jnp.tanh(scores * (plan.scale / plan.softcap))
    return (plan.softcap * unit) * bent, 1.0 - bent * bent
