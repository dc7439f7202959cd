"""Grouped products as a loop over groups, and over blocks of each group's rows.

How many rows a group has is known only when the program runs, and XLA's products have fixed sizes. So each group is
cut into blocks of a few fixed sizes, the largest first. Only those of the smallest size may reach into rows that are
not the group's, which are masked. Groups without rows are skipped, so their matrices are not read. Under ``jax.vmap``
the problems are computed one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.explicit import automatic, explicit_sharding
from capibara.ops.one_device import alike

if TYPE_CHECKING:
    from capibara.ops.linalg.grouped import GroupedProblem

__all__ = [
    "bounds",
    "forward",
    "in_32_bits",
    "one_by_one",
    "outer",
    "outer_product",
    "product",
    "without_rest",
]

# Rows of a block. Large ones multiply fastest; small ones leave little of the last block unused.
_ROWS = (256, 64, 16)
# A block's product of columns is added to a whole matrix: fewer, larger blocks.
_OUTER_ROWS = (512, 128, 32)


def _dot(problem: GroupedProblem, a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    return lax.dot_general(
        a,
        b,
        (((dims[0],), (dims[1],)), ((), ())),
        precision=problem.precision,
        preferred_element_type=jnp.dtype(problem.accumulate_dtype),
    )


def product(problem: GroupedProblem, rows: jax.Array, matrix: jax.Array) -> jax.Array:
    """Some rows times one matrix."""
    return _dot(problem, rows, matrix, (1, 1 if problem.transpose_rhs else 0)).astype(problem.dtype)


def outer_product(problem: GroupedProblem, left: jax.Array, right: jax.Array) -> jax.Array:
    """``left.T @ right``, in the dtype of sums."""
    return _dot(problem, left, right, (0, 0))


def in_32_bits(problem: GroupedProblem, sizes: jax.Array) -> jax.Array:
    """Sizes as int32; one that does not fit is all rows."""
    if sizes.dtype.itemsize < 4 or sizes.dtype == jnp.int32:
        return sizes.astype(jnp.int32)
    return jnp.clip(sizes, 0, problem.rows).astype(jnp.int32)


def bounds(problem: GroupedProblem, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first row of each group, and the row after its last one."""
    # Each at most all rows: sums of larger ones would not fit into 32 bits.
    counts = jnp.clip(in_32_bits(problem, sizes), 0, problem.rows)
    ends = jnp.minimum(jnp.cumsum(counts), problem.rows)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def without_rest(problem: GroupedProblem, sizes: jax.Array, x: jax.Array) -> jax.Array:
    """0 in rows of no group."""
    _, ends = bounds(problem, sizes)
    return jnp.where((jnp.arange(problem.rows) < ends[-1])[:, None], x, jnp.zeros((), x.dtype))


def _over_groups(
    problem: GroupedProblem,
    blocks: tuple[int, ...],
    sizes: jax.Array,
    carry: Any,
    group: Callable[[Any, Any, Callable[..., Any]], Any],
) -> Any:
    """``group(carry, number, over)`` for each group with rows; ``over(block, carry)`` goes through its blocks.

    ``block(size, carry, start, own)`` has ``size`` rows from ``start`` on; ``own [size, 1]`` says which of them are the
    group's and were in no block before. None: all.
    """
    starts, ends = bounds(problem, sizes)
    filled = ends > starts
    order = jnp.argsort(~filled, stable=True)  # groups with rows first
    count = jnp.sum(filled, dtype=jnp.int32)

    def step(state: Any) -> Any:
        at, carry = state
        number = order[at]
        end = ends[number]

        def over(block: Callable[..., Any], carry: Any) -> Any:
            state = starts[number], carry
            for size in blocks:

                def whole(state: Any, size: int = size) -> Any:
                    return state[0] + size, block(size, state[1], state[0], None)

                state = lax.while_loop(lambda state, size=size: state[0] + size <= end, whole, state)

            def rest(state: Any) -> Any:
                start, size = state[0], blocks[-1]
                first = jnp.minimum(start, problem.rows - size)
                row = first + jnp.arange(size, dtype=jnp.int32)
                own = ((row >= start) & (row < end))[:, None]
                return start + size, block(size, state[1], first, own)

            return lax.while_loop(lambda state: state[0] < end, rest, state)[1]

        return at + 1, group(carry, number, over)

    zero = jnp.zeros((), jnp.int32)
    return lax.while_loop(lambda state: state[0] < count, step, (alike(zero, sizes), carry))[1]


def _fitting(problem: GroupedProblem, blocks: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in blocks if size <= problem.rows) or (problem.rows,)


def one_by_one(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """``function(problem, *arrays)``, which under ``jax.vmap`` computes one problem after another."""

    def run(problem: GroupedProblem, *arrays: jax.Array) -> jax.Array:
        one = jax.custom_batching.custom_vmap(partial(function, problem))

        @one.def_vmap
        def _several(_: int, mapped: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
            places = sorted(range(len(arrays)), key=lambda i: not mapped[i])  # those that are mapped first

            def each(*given: jax.Array) -> jax.Array:
                def now(row: tuple[jax.Array, ...]) -> jax.Array:
                    filled = dict(zip(places, (*row, *given[len(row) :]), strict=True))
                    return run(problem, *(filled[i] for i in range(len(given))))

                return lax.map(now, given[: sum(mapped)])

            given = [arrays[i] for i in places]
            # A loop over what is sharded over explicit axes is an error.
            return (each(*given) if explicit_sharding(*given) is None else automatic(each, given, 1)), True

        return one(*arrays)

    return run


@one_by_one
def forward(problem: GroupedProblem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    out = jnp.zeros((problem.rows, problem.columns), problem.dtype)

    def group(out: jax.Array, number: jax.Array, over: Callable[..., Any]) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(rhs, number, keepdims=False)

        def block(size: int, out: jax.Array, start: jax.Array, own: jax.Array | None) -> jax.Array:
            found = product(problem, lax.dynamic_slice_in_dim(lhs, start, size), matrix)
            if own is not None:
                found = jnp.where(own, found, lax.dynamic_slice_in_dim(out, start, size))
            return lax.dynamic_update_slice_in_dim(out, found, start, 0)

        return over(block, out)

    blocks = _fitting(problem, _ROWS)
    return _over_groups(problem, blocks, sizes, alike(out, lhs, rhs, sizes), group)


@one_by_one
def outer(problem: GroupedProblem, left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    shape = left.shape[1], right.shape[1]
    out = jnp.zeros((problem.groups, *shape), problem.dtype)
    zeros = alike(jnp.zeros(shape, problem.accumulate_dtype), left, right, sizes)

    def group(out: jax.Array, number: jax.Array, over: Callable[..., Any]) -> jax.Array:
        def block(size: int, total: jax.Array, start: jax.Array, own: jax.Array | None) -> jax.Array:
            pair = [lax.dynamic_slice_in_dim(x, start, size) for x in (left, right)]
            if own is not None:
                # Both: 0 times a NaN of another group would be NaN.
                pair = [jnp.where(own, x, 0) for x in pair]
            return total + outer_product(problem, *pair)

        total = over(block, zeros).astype(problem.dtype)
        return lax.dynamic_update_index_in_dim(out, total, number, 0)

    blocks = _fitting(problem, _OUTER_ROWS)
    return _over_groups(problem, blocks, sizes, alike(out, left, right, sizes), group)
