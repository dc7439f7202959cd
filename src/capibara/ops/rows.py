"""Rows written into a large array where it stands."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

__all__ = ["write_rows"]


def write_rows(array: jax.Array, where: Sequence[jax.Array], new: jax.Array) -> jax.Array:
    """``array.at[where].set(new)``; rows whose indices are below 0 or past the end are not written.

    Under ``jit`` with a donated array this is in place, also where there is only one row.

    Args:
      array: ``[d0, d1, …]``.
      where: integer arrays of one shape ``s`` (or scalars), for the first dimensions of ``array``.
      new: ``[*s, …]``, converted to the dtype of ``array``.
    """
    where = jnp.broadcast_arrays(*(jnp.asarray(index, jnp.int32) for index in where))
    lead = where[0].shape
    if math.prod(lead) == 1:
        # XLA makes a scatter of one row, which may lie outside, a choice between the whole array before and after,
        # and copies it twice. One of the same row twice it leaves alone.
        where = [jnp.tile(index.reshape(1), 2) for index in where]
        new = jnp.broadcast_to(new.reshape(1, *new.shape[len(lead) :]), (2, *new.shape[len(lead) :]))
    # Negative indices would count from the end.
    sizes = array.shape[: len(where)]
    outside = [jnp.where(index < 0, size, index) for index, size in zip(where, sizes, strict=True)]
    return array.at[tuple(outside)].set(new.astype(array.dtype), mode="drop")
