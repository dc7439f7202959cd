"""Grouped products on TPUs: problems that ``grouped_tpu_kernel`` supports, tile sizes, and the visits of its grids.

Rows are cut into tiles. A tile that holds rows of several groups is visited once for each, one visit after the other,
so that its result stays on the chip until it is whole. How many visits there are is known only when the program runs:
it is the size of the grid.

JAX's ``megablox.gmm`` and XLA's own kernel for ``jax.lax.ragged_dot`` multiply all rows of a tile at each visit, so
they need small tiles where groups are small. Here a visit multiplies little more than the group's own rows, tiles are
large, and rows of no group are set to 0 on the way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from capibara.ops.linalg import grouped_blocks, grouped_xla
from capibara.ops.one_device import on_platform
from capibara.ops.registry import tpu_kind

if TYPE_CHECKING:
    from capibara.ops.linalg.grouped import GroupedProblem

__all__ = [
    "ANY_CORE",
    "V6E_CORE",
    "Core",
    "Plan",
    "Visits",
    "check",
    "device_core",
    "forward",
    "outer",
    "outer_plan",
    "product_plan",
]

LANES = 128
_TALL = (512, 256, 128)  # rows of a tile
_VISIT = 150  # cycles of a visit, beside its products


@dataclass(frozen=True)
class Core:
    """What the choice of tiles depends on.

    Attributes:
      held: bytes of on-chip memory for blocks, beside registers that are stored for lack of them.
      copied: bytes from the chip's memory in a cycle.
      multiplied: multiplications in a cycle.
    """

    held: int
    copied: int
    multiplied: int


# A kernel may take 16 MiB, on v6e 32. Figures of other chips are those of v5e.
ANY_CORE, V6E_CORE = Core(13 << 20, 546, 1 << 16), Core(24 << 20, 937, 1 << 18)


def device_core() -> Core:
    """Of the chip that programs are traced for (:func:`capibara.ops.registry.tpu_kind`)."""
    return V6E_CORE if tpu_kind() in ("TPU v6 lite", "TPU v6e") else ANY_CORE


@dataclass(frozen=True)
class Plan:
    """Static parameters of a kernel.

    Attributes:
      rows, inner, columns: of a tile.
      slabs: tiles of the inner dimension.
      parts: rows that are multiplied at a time where a tile has rows of several groups: many, and few.
      unit: parts begin at a multiple of it.
      transposed: of the matrices.
      precision: of float32 products.
    """

    rows: int
    inner: int
    columns: int
    slabs: int
    parts: tuple[int, int]
    unit: int
    transposed: bool
    precision: lax.Precision


@dataclass(frozen=True)
class Visits:
    """What each visit does: arrays that a kernel reads in scalar memory, and how many visits there are."""

    count: jax.Array
    scalars: tuple[jax.Array, ...]


def check(problem: GroupedProblem) -> None:
    if problem.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"takes float32 or bfloat16, not {problem.dtype}")
    if problem.accumulate_dtype != "float32":
        raise NotImplementedError(f"sums in float32, not {problem.accumulate_dtype}")
    if problem.rows < _TALL[-1]:
        raise NotImplementedError(f"takes {_TALL[-1]} rows or more, not {problem.rows}")
    for name in ("inner", "columns"):
        if (size := getattr(problem, name)) < LANES or size % 64:
            raise NotImplementedError(f"takes {LANES} {name} or more, a multiple of 64, not {size}")
    if _precision(problem) is None:
        raise NotImplementedError(
            f"takes a precision of 'default', 'high' or 'highest', not {problem.precision}"
        )
    core, exact = device_core(), _precision(problem) == lax.Precision.HIGHEST
    for inner, columns in ((problem.inner, problem.columns), (problem.columns, problem.inner)):
        if _product_tile(core, problem.rows, inner, columns, problem.groups, _size(problem), exact) is None:
            raise NotImplementedError(
                f"no tile of matrices of {problem.inner} × {problem.columns} fits into {core.held >> 20} MiB"
            )


def _size(problem: GroupedProblem) -> int:
    return jnp.dtype(problem.dtype).itemsize


def _precision(problem: GroupedProblem) -> lax.Precision | None:
    """As the kernels' products take it: one pass, or float32 in full, which is what "high" becomes."""
    if problem.dtype == "bfloat16":
        return lax.Precision.DEFAULT
    settings: Any = jax.config
    asked = settings.jax_default_matmul_precision if problem.precision is None else problem.precision
    if asked in (None, "default", "fastest", "bfloat16", lax.Precision.DEFAULT):
        return lax.Precision.DEFAULT
    exact = ("high", "highest", "float32", "tensorfloat32", "bfloat16_3x", lax.Precision.HIGH)
    return lax.Precision.HIGHEST if asked in (*exact, lax.Precision.HIGHEST) else None


def _sizes(whole: int, ragged: bool) -> list[int]:
    """Sizes of tiles of a dimension: multiples of 128 that divide it (or, if ``ragged``, need not), or all of it."""
    found = [n for n in range(LANES, min(whole, 4096), LANES) if ragged or whole % n == 0]
    return [*found, whole]


def _tall(rows: int) -> list[int]:
    return [tall for tall in _TALL if tall <= rows]


@cache
def _product_tile(
    core: Core, rows: int, inner: int, columns: int, groups: int, size: int, exact: bool
) -> tuple[int, int, int] | None:
    """Rows, inner and columns of a tile: those that the estimate likes best.

    Args:
      exact: float32 products in full, which are several products of bfloat16.
    """

    def cost(tile: tuple[int, int, int]) -> float:
        tall, deep, wide = tile
        across, slabs = -(-columns // wide), -(-inner // deep)
        visits = -(-rows // tall) + groups - 1
        # With one slab a group's matrix stays while its tiles are visited, and so does a tile for its groups.
        matrices = min(groups, visits) * inner * wide if slabs == 1 else visits * inner * wide
        tiles = (-(-rows // tall) if slabs == 1 else visits) * tall * inner
        copied = size * across * (matrices + tiles)
        products = (rows + groups * 32) * inner * across * wide
        totals = 0 if slabs == 1 else across * visits * slabs * tall * wide / LANES / 16
        return (
            max(copied / core.copied, products / core.multiplied) + totals + across * visits * slabs * _VISIT
        )

    def fits(tile: tuple[int, int, int]) -> bool:
        tall, deep, wide = tile
        held = 2 * size * (tall * deep + deep * wide + tall * wide) + 4 * tall * wide
        held += 4 * tall * wide if deep < inner else 0
        if (
            exact
        ):  # the compiler stores parts of both operands: at most 4.8 bytes of each element on v4, v5e and v6e
            return held + 5 * (tall * deep + deep * wide) <= core.held + (2 << 20)
        return held <= core.held

    tiles = [
        (tall, deep, wide)
        for tall in _tall(rows)
        for deep in _sizes(inner, False)
        for wide in _sizes(columns, True)
        if deep >= min(inner, 512) and wide <= 2048
    ]
    return min(filter(fits, tiles), key=cost, default=None)


@cache
def _outer_tile(
    core: Core, rows: int, inner: int, columns: int, groups: int, size: int
) -> tuple[int, int, int]:
    """Rows, and columns of either side, of a tile."""

    def cost(tile: tuple[int, int, int]) -> float:
        tall, deep, wide = tile
        down, across = -(-inner // deep), -(-columns // wide)
        visits = -(-rows // tall) + groups - 1
        copied = size * down * across * -(-rows // tall) * tall * (deep + wide)
        products = (rows + groups * 64) * down * deep * across * wide
        return max(copied / core.copied, products / core.multiplied) + down * across * visits * _VISIT

    def fits(tile: tuple[int, int, int]) -> bool:
        tall, deep, wide = tile
        # The result, its sum, and the product that is added to it; tiles, and the transposed one.
        return (2 * size + 8) * deep * wide + size * tall * (3 * deep + 2 * wide) <= core.held

    tiles = [
        (tall, deep, wide)
        for tall in _tall(rows)
        for deep in _sizes(inner, True)
        for wide in _sizes(columns, True)
        if deep <= 2048 and wide <= 2048
    ]
    return min(filter(fits, tiles), key=cost)


def product_plan(problem: GroupedProblem) -> Plan:
    """Of the kernel that multiplies rows."""
    size, precision = _size(problem), _precision(problem)
    assert precision is not None
    sizes = problem.rows, problem.inner, problem.columns, problem.groups
    tile = _product_tile(device_core(), *sizes, size, precision == lax.Precision.HIGHEST)
    assert tile is not None
    slabs = problem.inner // tile[1]
    return Plan(*tile, slabs, (LANES, 64), 32 // size, problem.transpose_rhs, precision)


def outer_plan(problem: GroupedProblem, inner: int, columns: int) -> Plan:
    """Of the kernel that multiplies columns."""
    size = _size(problem)
    tile = _outer_tile(device_core(), problem.rows, inner, columns, problem.groups, size)
    precision = _precision(problem)
    assert precision is not None
    return Plan(*tile, 1, (min(256, tile[0]), LANES), 32 // size, False, precision)


def _listed(rows: int, tall: int, first: jax.Array, count: jax.Array, *columns: jax.Array) -> Any:
    """For each visit its group, its tile, and its entry of ``columns``; and how many visits there are.

    Args:
      first, count: for each group its first tile, and its number of visits.
    """
    after = jnp.cumsum(count)
    groups = first.shape[0]
    visit = jnp.arange(-(-rows // tall) + groups, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(after <= visit[:, None], axis=1, dtype=jnp.int32), groups - 1)
    chosen = group[:, None] == jnp.arange(groups, dtype=jnp.int32)

    def of_visit(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(chosen, x, 0), axis=1, dtype=jnp.int32)

    tile = visit + of_visit(first - (after - count))
    return after[-1], group, tile, visit, [of_visit(x) for x in columns]


def product_visits(problem: GroupedProblem, tall: int, sizes: jax.Array) -> Visits:
    """Tiles in order, each for the groups that have rows of it; those of no group last, without rows."""
    starts, ends = grouped_blocks.bounds(problem, sizes)
    filled = ends > starts
    tiles, used = -(-problem.rows // tall), lax.div(ends[-1:] + (tall - 1), tall)
    first = lax.div(starts, tall)
    count = jnp.where(filled, lax.div(ends - 1, tall) - first + 1, 0)
    first, count = jnp.append(first, used), jnp.append(count, tiles - used)
    # A tile of no group needs no matrix and no rows: those of the visit before it stay.
    last = jnp.max(jnp.where(filled, jnp.arange(problem.groups, dtype=jnp.int32), 0), keepdims=True)
    matrix = jnp.append(jnp.arange(problem.groups, dtype=jnp.int32), last)
    zero = jnp.zeros((1,), jnp.int32)
    given = matrix, jnp.append(starts, zero), jnp.append(ends, zero)
    total, _, tile, _, (matrix, start, end) = _listed(problem.rows, tall, first, count, *given)
    low, high = (jnp.clip(x - tile * tall, 0, tall) for x in (start, end))
    fresh = jnp.append(jnp.ones((1,), bool), tile[1:] != tile[:-1])
    read = jnp.minimum(tile, jnp.maximum(used - 1, 0))
    written = jnp.minimum(tile, tiles - 1)
    return Visits(total, (matrix, read, written, low, high, fresh.astype(jnp.int32)))


def outer_visits(problem: GroupedProblem, tall: int, sizes: jax.Array) -> Visits:
    """Groups in order, each with the tiles that have rows of it; one without rows is visited once."""
    starts, ends = grouped_blocks.bounds(problem, sizes)
    tiles, filled = -(-problem.rows // tall), ends > starts
    first = lax.div(starts, tall)
    count = jnp.where(filled, lax.div(ends - 1, tall) - first + 1, 1)
    after = jnp.cumsum(count)
    given = starts, jnp.where(filled, ends, starts), after - count, after - 1
    total, group, tile, visit, (start, end, begins, stops) = _listed(problem.rows, tall, first, count, *given)
    tile = jnp.minimum(tile, tiles - 1)
    low, high = (jnp.clip(x - tile * tall, 0, tall) for x in (start, end))
    flags = ((visit == place).astype(jnp.int32) for place in (begins, stops))
    return Visits(total, (group, tile, low, high, *flags))


def _forward(problem: GroupedProblem, interpret: bool, lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    from capibara.ops.linalg import grouped_tpu_kernel

    plan = product_plan(problem)
    visits = product_visits(problem, plan.rows, sizes)
    return grouped_tpu_kernel.product(plan, visits, lhs, rhs, problem.dtype, interpret)


def _outer(problem: GroupedProblem, interpret: bool, left: Any, right: Any, sizes: Any) -> jax.Array:
    from capibara.ops.linalg import grouped_tpu_kernel

    plan = outer_plan(problem, left.shape[1], right.shape[1])
    visits = outer_visits(problem, plan.rows, sizes)
    return grouped_tpu_kernel.outer(plan, visits, left, right, problem.groups, problem.dtype, interpret)


@grouped_blocks.one_by_one
def forward(problem: GroupedProblem, lhs: Any, rhs: Any, sizes: Any) -> jax.Array:
    def kernel(interpret: bool, *arrays: Any) -> jax.Array:
        return _forward(problem, interpret, *arrays)

    def otherwise(*arrays: Any) -> jax.Array:
        return grouped_xla.product(problem, *arrays)

    return on_platform("tpu", problem.implementation, kernel, otherwise, lhs, rhs, sizes)


@grouped_blocks.one_by_one
def outer(problem: GroupedProblem, left: Any, right: Any, sizes: Any) -> jax.Array:
    def kernel(interpret: bool, *arrays: Any) -> jax.Array:
        return _outer(problem, interpret, *arrays)

    def otherwise(*arrays: Any) -> jax.Array:
        return grouped_blocks.outer(problem, *arrays)

    return on_platform("tpu", problem.implementation, kernel, otherwise, left, right, sizes)
