"""Grouped products on CPUs, by the compiled kernels of :mod:`capibara.native`.

XLA's products have fixed sizes and write to memory of their own, so groups of any size need blocks, masks and copies.
A compiled kernel multiplies exactly the rows of a group, and writes each entry of the result once. It finds the rows of
each group itself: for many small groups XLA's sums of the sizes took as long as a fifth of the product.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from capibara import native
from capibara.measure.flops import register_foreign_call
from capibara.ops.linalg import grouped_blocks
from capibara.ops.one_device import native_call

if TYPE_CHECKING:
    from capibara.ops.linalg.grouped import GroupedProblem

__all__ = ["check", "forward", "outer"]


register_foreign_call("capibara_grouped_product", lambda ins, outs, _: 2 * math.prod(ins[0]) * outs[0][1])
register_foreign_call("capibara_grouped_outer", lambda ins, outs, _: 2 * math.prod(ins[0]) * outs[0][2])


def check(problem: GroupedProblem) -> None:
    reason = native.problem()
    if reason is not None:
        raise NotImplementedError(reason)
    if problem.dtype != "float32":
        raise NotImplementedError(f"takes float32, not {problem.dtype}")
    if problem.accumulate_dtype != "float32":
        raise NotImplementedError(f"sums in float32, not {problem.accumulate_dtype}")


@grouped_blocks.one_by_one
def forward(problem: GroupedProblem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((problem.rows, problem.columns), jnp.float32)
    transposed = int(problem.transpose_rhs)
    arrays = lhs, rhs, grouped_blocks.in_32_bits(problem, sizes)
    return native_call("capibara_grouped_product", [out], *arrays, transposed=transposed)[0]


@grouped_blocks.one_by_one
def outer(problem: GroupedProblem, left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jax.ShapeDtypeStruct((problem.groups, left.shape[1], right.shape[1]), jnp.float32)
    return native_call(
        "capibara_grouped_outer", [out], left, right, grouped_blocks.in_32_bits(problem, sizes)
    )[0]
