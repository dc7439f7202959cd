"""Grouped products as XLA's own operation, which ``jax.vmap`` cannot map over everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from capibara.ops.linalg import grouped_blocks

if TYPE_CHECKING:
    from capibara.ops.linalg.grouped import GroupedProblem

__all__ = ["forward", "product"]


def product(problem: GroupedProblem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    inner = 2 if problem.transpose_rhs else 1
    starts, ends = grouped_blocks.bounds(problem, sizes)
    # On explicit axes it wants to be told; what is sharded over some has been made automatic before.
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    out = lax.ragged_dot_general(
        lhs,
        rhs,
        ends - starts,
        lax.RaggedDotDimensionNumbers((((1,), (inner,)), ((), ())), [0], [0]),
        precision=problem.precision,
        preferred_element_type=jnp.dtype(problem.accumulate_dtype),
        out_sharding=PartitionSpec() if explicit else None,
    )
    # What it leaves in rows of no group is not specified everywhere.
    return grouped_blocks.without_rest(problem, sizes, out.astype(problem.dtype))


forward = grouped_blocks.one_by_one(product)
