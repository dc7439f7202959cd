"""Products with a quantized matrix on TPUs: problems that ``quantised_tpu_kernel`` supports, and its operands.

XLA writes the decoded values of a slab to the device's memory and reads them again: by the compiler's own count of
cycles, eight vectors times 4096² int8 codes take 0.26 million on v5e, and 0.04 in the kernel, which reads the codes
once (reading alone would take 0.03). It was not measured on a TPU.

A group's scale is a factor of its whole part of a sum. So codes are multiplied directly, exactly, and the products of
each group are scaled. If several groups are within the 128 columns that are multiplied at a time, ``x`` is repeated
for each of them, with zeros for the others.

For many vectors, as in a prompt, the products dominate: a tile of the matrix is decoded once, scaled and rounded to
the vectors' dtype, and multiplied by up to 512 vectors.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from capibara.ops.one_device import on_platform

if TYPE_CHECKING:
    from capibara.ops.linalg.quantised import QuantisedProblem

__all__ = ["check", "forward"]

LANES, SUBLANES = 128, 8
_BLOCKS = (512, 256, 128)  # rows of the matrix at a time
_FEW_VECTORS = 128  # with their copies; more are worth a tile's numbers
_TILE_VECTORS = 512
_VMEM_BYTES, _TILE_BYTES = 10 << 20, 31 << 19  # of 16 MiB on the smallest chip
_MADE_BYTES = {
    2: 5 << 18,
    4: 9 << 19,
}  # for what a tile becomes: the most that the compiler took, and some more


def _pack(problem: QuantisedProblem) -> int:
    """Codes in a byte."""
    return 8 // problem.bits


def _groups(problem: QuantisedProblem) -> int:
    """Groups in the columns that are multiplied at a time: so often is ``x`` there."""
    return max(1, LANES * _pack(problem) // problem.group)


def _padded(problem: QuantisedProblem) -> int:
    return _round_up(int(np.prod(problem.batch, dtype=np.int64)), SUBLANES)


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def _block(problem: QuantisedProblem) -> int:
    """Rows of the matrix at a time; 0 if no number of them fits."""
    width, groups = problem.inner // _pack(problem), problem.inner // problem.group
    size = 2 if problem.dtype == "bfloat16" else 4
    vectors = _padded(problem)
    x = 2 * size * _pack(problem) * _groups(problem) * vectors * width
    for block in _BLOCKS:
        # Two copies of each operand and of the result; the numbers of some columns as they are made and multiplied.
        held = 2 * block * (width + 4 * groups + 4 * vectors) + 16 * 4 * block * LANES
        if problem.rows % block == 0 and x + held <= _VMEM_BYTES:
            return block
    return 0


def _few(problem: QuantisedProblem) -> bool:
    """Whether codes are multiplied as they are, and products scaled."""
    return _padded(problem) * _groups(problem) <= _FEW_VECTORS and _block(problem) > 0


def _tile(problem: QuantisedProblem) -> tuple[int, int, int]:
    """Vectors, rows of the matrix and bytes of a row that are multiplied at a time; 0 rows if none fit."""
    count = _padded(problem)
    # Of bfloat16 sixteen rows are a tile of the memory.
    vectors = _round_up(-(-count // -(-count // _TILE_VECTORS)), 2 * SUBLANES)
    columns, scales = _columns(problem), _round_up(problem.inner // problem.group, SUBLANES)
    size = 2 if problem.dtype == "bfloat16" else 4
    for rows in _BLOCKS:
        # Two copies of each operand and of the result, and the sums.
        operands = size * _pack(problem) * vectors * columns + rows * columns + 4 * scales * rows
        held = 2 * (operands + size * vectors * rows) + 4 * vectors * rows
        if problem.rows % rows == 0 and held + _MADE_BYTES[size] <= _TILE_BYTES:
            return vectors, rows, columns
    return vectors, 0, columns


def _columns(problem: QuantisedProblem) -> int:
    """Bytes of a row at a time: 512 numbers, or those of 128 bytes."""
    pack = _pack(problem)
    return next(n for n in (512 // pack, 256, 128) if n * pack <= 512 and problem.inner // pack % n == 0)


def check(problem: QuantisedProblem) -> None:
    if problem.dtype not in ("float32", "bfloat16"):
        raise NotImplementedError(f"takes vectors in float32 or bfloat16, not {problem.dtype}")
    columns = LANES * _pack(problem)
    if problem.inner % columns or problem.rows % LANES:
        raise NotImplementedError(
            f"takes rows of a multiple of {columns} numbers, and a multiple of {LANES} of them, not {problem.rows} of "
            f"{problem.inner}"
        )
    if (problem.group % columns and columns % problem.group) or problem.group % _pack(problem):
        raise NotImplementedError(
            f"takes groups that divide {columns} numbers or are divided by it, not of {problem.group}"
        )
    if problem.inner % problem.group:
        raise NotImplementedError(f"takes whole groups, and {problem.group} does not divide {problem.inner}")
    if not _few(problem) and _tile(problem)[1] == 0:
        raise NotImplementedError(
            f"holds the scales of {LANES} rows, and {problem.inner // problem.group} for each do not fit into "
            f"{_TILE_BYTES / (1 << 20):g} MiB"
        )


def _product(
    problem: QuantisedProblem, interpret: bool, x: Any, codes: Any, scales: Any, *levels: Any
) -> jax.Array:
    from capibara.ops.linalg import quantised_tpu_kernel

    pack, groups, vectors = _pack(problem), _groups(problem), _padded(problem)
    flat = x.reshape(-1, problem.inner)
    count = flat.shape[0]
    few, tile = _few(problem), _tile(problem)
    vectors = vectors if few else _round_up(count, tile[0])
    flat = jnp.pad(flat, ((0, vectors - count), (0, 0)))
    # Of codes in halves of bytes even columns are multiplied on their own, and so are odd ones.
    parts = jnp.moveaxis(flat.reshape(vectors, -1, pack), 2, 0)
    # How many blocks of columns share a scale, where it is more than one.
    span = max(1, problem.group // (LANES * pack))
    tables = tuple(table.astype(jnp.float32) for table in levels)
    scales = scales.astype(jnp.float32).T
    if not few:
        out = quantised_tpu_kernel.product_of_tiles(
            parts, codes, scales, *tables, groups=groups, span=span, tile=tile, interpret=interpret
        )
        return out[:count].reshape(*problem.batch, problem.rows)
    if groups > 1:
        column = jnp.arange(parts.shape[2]) % LANES
        mine = column // (LANES // groups) == jnp.arange(groups)[:, None, None]
        parts = jnp.where(mine, parts[:, None], 0).reshape(pack, groups * vectors, -1)
    out = quantised_tpu_kernel.product(
        parts.astype(problem.dtype),
        codes,
        scales,
        *tables,
        vectors=vectors,
        span=span,
        block=_block(problem),
        interpret=interpret,
    )
    return out[:count].reshape(*problem.batch, problem.rows).astype(problem.dtype)


def _by_slabs(problem: QuantisedProblem, x: Any, codes: Any, scales: Any, *levels: Any) -> jax.Array:
    from capibara.ops.linalg import quantised

    return quantised.by_slabs(problem, x, codes, scales, *(levels or (None,)))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(problem: QuantisedProblem, *arrays: Any) -> jax.Array:
    kernel, otherwise = partial(_product, problem), partial(_by_slabs, problem)
    return on_platform("tpu", problem.implementation, kernel, otherwise, *arrays)


@_run.defjvp
def _run_jvp(problem: QuantisedProblem, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    x, codes, *others = primals

    def of_numbers(x: Any, *others: Any) -> jax.Array:
        return _by_slabs(problem, x, codes, *others)

    moved = tangents[0], *tangents[2:]
    return _run(problem, *primals), jax.jvp(of_numbers, (x, *others), moved)[1]


def forward(problem: QuantisedProblem, x: Any, codes: Any, scales: Any, levels: Any) -> jax.Array:
    return _run(problem, x, codes, scales, *(() if levels is None else (levels,)))
