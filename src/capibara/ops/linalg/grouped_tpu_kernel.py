"""The TPU kernels of grouped products: one multiplies rows, one multiplies columns.

Each step of a grid is a *visit*: a tile of rows, and the part of it that belongs to one group. A tile whose rows all
belong to the group is one product. Of any other tile only the group's rows are multiplied, in parts of two sizes that
begin at the group's first row: what is multiplied in vain is less than the smaller part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.linalg.grouped_tpu import Plan, Visits
from capibara.ops.one_device import kernel_results

__all__ = ["outer", "product"]


def _dot(plan: Plan, a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=plan.precision,
        preferred_element_type=jnp.float32,
    )


def _own(low: Any, high: Any, start: Any, shape: tuple[int, ...]) -> jax.Array:
    row = start + lax.broadcasted_iota(jnp.int32, shape, 0)
    return (row >= low) & (row < high)


def _over_parts(plan: Plan, low: Any, high: Any, part: Callable[[Any, Any, int], None]) -> None:
    """``part(start, low, size)`` for parts of a tile, which together have the rows from ``low`` to ``high`` once.

    A part has ``size`` rows from ``start``; those from ``low`` on were in none before.
    """
    unit, (large, small) = plan.unit, plan.parts
    begin = lax.div(low, unit) * unit
    several = lax.div(high - begin + (large - small - 1), large)  # what they leave fits into a small one

    def at(place: Any, size: int) -> None:
        start = pl.multiple_of(jnp.minimum(place, plan.rows - size), unit)
        part(start, jnp.maximum(low, place), size)

    lax.fori_loop(0, several, lambda i, _: at(begin + i * large, large), None)
    rest = begin + several * large

    @pl.when(rest < high)
    def _rest() -> None:
        at(rest, small)


def _product_kernel(plan: Plan, *refs: Any) -> None:
    _, _, _, lows, highs, fresh, lhs, rhs, out, *scratch = refs
    visit, slab, last = pl.program_id(1), pl.program_id(2), plan.slabs - 1
    low, high = lows[visit], highs[visit]
    dims = (1, 1 if plan.transposed else 0)
    whole = (low == 0) & (high == plan.rows)

    @pl.when((fresh[visit] != 0) & jnp.logical_not(whole) & (slab == 0))
    def _clear() -> None:
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(whole)
    def _all() -> None:
        found = _dot(plan, lhs[...], rhs[...], dims)
        if not scratch:
            out[...] = found.astype(out.dtype)
            return
        (total,) = scratch
        found = found + jnp.where(slab == 0, 0.0, total[...])
        total[...] = found

        @pl.when(slab == last)
        def _finish() -> None:
            out[...] = total[...].astype(out.dtype)

    def part(start: Any, first: Any, size: int) -> None:
        at = pl.ds(start, size)
        found = _dot(plan, lhs[at, :], rhs[...], dims)
        own = _own(first, high, start, found.shape)
        if not scratch:
            out[at, :] = jnp.where(own, found, out[at, :].astype(jnp.float32)).astype(out.dtype)
            return
        (total,) = scratch
        before = total[at, :]
        total[at, :] = jnp.where(own, found + jnp.where(slab == 0, 0.0, before), before)

        @pl.when(slab == last)
        def _finish() -> None:
            out[at, :] = jnp.where(own, total[at, :], out[at, :].astype(jnp.float32)).astype(out.dtype)

    @pl.when(jnp.logical_not(whole) & (low < high))
    def _parts() -> None:
        _over_parts(plan, low, high, part)


def product(
    plan: Plan, visits: Visits, lhs: jax.Array, rhs: jax.Array, dtype: Any, interpret: bool
) -> jax.Array:
    """``[rows, columns]``: each row times the matrix of its group; 0 in rows of no group."""
    (rows, inner), columns = lhs.shape, rhs.shape[1 if plan.transposed else 2]
    tall, deep, wide = plan.rows, plan.inner, plan.columns
    across = pl.cdiv(columns, wide)

    def of_matrix(c: Any, v: Any, k: Any, group: Any, *_: Any) -> Any:
        return (group[v], c, k) if plan.transposed else (group[v], k, c)

    kept = [pltpu.VMEM((tall, wide), jnp.float32)] if plan.slabs > 1 else []
    return pl.pallas_call(
        functools.partial(_product_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits.scalars),
            grid=(across, visits.count, plan.slabs),
            in_specs=[
                pl.BlockSpec((tall, deep), lambda c, v, k, group, read, *_: (read[v], k)),
                pl.BlockSpec((None, wide, deep) if plan.transposed else (None, deep, wide), of_matrix),
            ],
            out_specs=pl.BlockSpec((tall, wide), lambda c, v, k, group, read, written, *_: (written[v], c)),
            scratch_shapes=kept,
        ),
        out_shape=kernel_results((lhs, rhs, *visits.scalars), ((rows, columns), dtype))[0],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * columns,
            transcendentals=0,
            bytes_accessed=lhs.dtype.itemsize * (across * lhs.size + rhs.size)
            + jnp.dtype(dtype).itemsize * rows * columns,
        ),
        interpret=interpret,
        name="capibara_grouped_matmul",
    )(*visits.scalars, lhs, rhs)


def _outer_kernel(plan: Plan, *refs: Any) -> None:
    _, _, lows, highs, first, last, left, right, out, total = refs
    visit = pl.program_id(2)
    low, high = lows[visit], highs[visit]
    whole = (low == 0) & (high == plan.rows)

    def add(found: jax.Array, fresh: Any) -> None:
        # A group's first product is stored as it is: clearing the sum before would be a store more.
        total[...] = found + jnp.where(fresh, 0.0, total[...])

    @pl.when(whole)
    def _all() -> None:
        add(_dot(plan, left[...], right[...], (0, 0)), first[visit] != 0)

    def part(start: Any, begin: Any, size: int) -> None:
        def rows(x: Any) -> jax.Array:
            # Of both: 0 times a NaN of another group would be NaN. In float32: not every TPU selects in bfloat16.
            own = _own(begin, high, start, (size, x.shape[1]))
            return jnp.where(own, x[pl.ds(start, size), :].astype(jnp.float32), 0.0).astype(x.dtype)

        add(_dot(plan, rows(left), rows(right), (0, 0)), (first[visit] != 0) & (begin == low))

    @pl.when(jnp.logical_not(whole) & (low < high))
    def _parts() -> None:
        _over_parts(plan, low, high, part)

    @pl.when(last[visit] != 0)
    def _finish() -> None:
        # Of a group without rows nothing was stored.
        out[...] = jnp.where(low < high, total[...], 0.0).astype(out.dtype)


def outer(
    plan: Plan, visits: Visits, left: jax.Array, right: jax.Array, groups: int, dtype: Any, interpret: bool
) -> jax.Array:
    """``[groups, columns of left, columns of right]``: for each group the product of its rows' columns."""
    (rows, inner), columns = left.shape, right.shape[1]
    tall, deep, wide = plan.rows, plan.inner, plan.columns
    down, across = pl.cdiv(inner, deep), pl.cdiv(columns, wide)
    return pl.pallas_call(
        functools.partial(_outer_kernel, plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(visits.scalars),
            grid=(down, across, visits.count),
            in_specs=[
                pl.BlockSpec((tall, deep), lambda k, c, v, group, read, *_: (read[v], k)),
                pl.BlockSpec((tall, wide), lambda k, c, v, group, read, *_: (read[v], c)),
            ],
            out_specs=pl.BlockSpec((None, deep, wide), lambda k, c, v, group, *_: (group[v], k, c)),
            scratch_shapes=[pltpu.VMEM((deep, wide), jnp.float32)],
        ),
        out_shape=kernel_results((left, right, *visits.scalars), ((groups, inner, columns), dtype))[0],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * inner * columns,
            transcendentals=0,
            bytes_accessed=left.dtype.itemsize * (across * left.size + down * right.size)
            + jnp.dtype(dtype).itemsize * groups * inner * columns,
        ),
        interpret=interpret,
        name="capibara_grouped_outer",
    )(*visits.scalars, left, right)
