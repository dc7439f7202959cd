"""The TPU kernels for products with a quantized matrix: one for few vectors, one for many."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.linalg.quantised_tpu import LANES, SUBLANES
from capibara.ops.one_device import kernel_results

__all__ = ["product", "product_of_tiles"]

_ROWS = 256  # of a tile that are made into numbers at a time
_TOGETHER = 4  # blocks of columns in a step of the loop, so that one is unpacked while another is multiplied


def _numbers(codes: jax.Array, pack: int, levels: Any) -> list[jax.Array]:
    """What codes stand for, float32 like them; of codes in halves of bytes the lower ones, and the upper ones."""
    wide = codes.astype(jnp.int32)
    if pack == 1:
        return [wide.astype(jnp.float32)]
    halves = [wide & 15, (wide >> 4) & 15]
    if levels is None:
        return [half.astype(jnp.float32) - 8.0 for half in halves]
    # A table in the lanes of a register, from which each lane takes the level that its code names.
    lane = lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    table = jnp.zeros((SUBLANES, LANES), jnp.float32)
    for i in range(16):
        table = jnp.where(lane == i, levels[0, i], table)
    table = jnp.concatenate([table] * (codes.shape[0] // SUBLANES), axis=0)
    return [jnp.take_along_axis(table, half, axis=1, mode="promise_in_bounds") for half in halves]


def _kernel(vectors: int, span: int, x: Any, codes: Any, scales: Any, *rest: Any) -> None:
    *tables, out = rest
    pack, rows, width = x.shape
    exact = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None

    def columns(number: Any, total: jax.Array) -> jax.Array:
        at = pl.ds(pl.multiple_of(number * LANES, LANES), LANES)
        product = None
        for part, weight in enumerate(_numbers(codes[:, at], pack, tables[0] if tables else None)):
            more = lax.dot_general(
                x[part, :, at],
                weight.astype(x.dtype),
                (((1,), (1,)), ((), ())),
                precision=exact,
                preferred_element_type=jnp.float32,
            )
            product = more if product is None else product + more
        assert product is not None
        if rows == vectors:
            return total + product * scales[pl.ds(lax.div(number, span), 1), :]
        for group in range(rows // vectors):
            scale = scales[pl.ds(number * (rows // vectors) + group, 1), :]
            total = total + product[group * vectors : (group + 1) * vectors] * scale
        return total

    count = width // LANES
    together = next(n for n in range(min(_TOGETHER, count), 0, -1) if count % n == 0)

    def step(number: Any, total: jax.Array) -> jax.Array:
        for i in range(together):
            total = columns(number * together + i, total)
        return total

    out[...] = lax.fori_loop(0, count // together, step, jnp.zeros(out.shape, jnp.float32))


def product(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *levels: jax.Array,
    vectors: int,
    span: int,
    block: int,
    interpret: bool,
) -> jax.Array:
    """``[vectors, rows]``, float32.

    Args:
      x: ``[codes in a byte, groups * vectors, width]``: vectors by the part of a byte that they are multiplied with,
        repeated for each group within 128 columns, with zeros for the others.
      codes: ``[rows, width]``.
      scales: float32 ``[groups of a row, rows]``.
      levels: ``[16]``, or none.
      span: number of runs of 128 columns that share a scale.
      block: rows of the matrix at a time.
    """
    rows, width = codes.shape
    whole = pl.BlockSpec(x.shape, lambda i: (0, 0, 0))
    tables = [table.reshape(1, 16) for table in levels]
    return pl.pallas_call(
        functools.partial(_kernel, vectors, span),
        grid=(rows // block,),
        in_specs=[
            whole,
            pl.BlockSpec((block, width), lambda i: (i, 0)),
            pl.BlockSpec((scales.shape[0], block), lambda i: (0, i)),
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(tables),
        ],
        out_specs=pl.BlockSpec((vectors, block), lambda i: (0, i)),
        out_shape=kernel_results((x, codes, scales, *levels), ((vectors, rows), jnp.float32))[0],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        cost_estimate=pl.CostEstimate(
            flops=2 * x.shape[0] * x.shape[1] * width * rows,
            transcendentals=0,
            bytes_accessed=rows * width + 4 * scales.size + x.dtype.itemsize * x.size + 4 * vectors * rows,
        ),
        interpret=interpret,
        name="capibara_quantised_matmul",
    )(x, codes, scales, *tables)


def _tiles_kernel(groups: int, span: int, x: Any, codes: Any, scales: Any, *rest: Any) -> None:
    *tables, out, acc = rest
    pack, exact = x.shape[0], lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    number, last = pl.program_id(2), pl.num_programs(2) - 1
    width = codes.shape[1]

    @pl.when(number == 0)
    def _start() -> None:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)

    # Some rows of the matrix are made into numbers while those before are multiplied.
    some = min(codes.shape[0], _ROWS)
    for begin in range(0, codes.shape[0], some):
        at = slice(begin, begin + some)
        parts: list[list[jax.Array]] = [[] for _ in range(pack)]
        for i in range(width // LANES):
            place = number * (width // LANES) + i
            first = lax.div(place, span) if span > 1 else place * groups
            rows = [scales[pl.ds(first + group, 1), at] for group in range(groups)]
            spread = [jnp.broadcast_to(row, (LANES // groups, some)) for row in rows]
            scale = jnp.transpose(jnp.concatenate(spread, axis=0))
            values = _numbers(codes[at, i * LANES : (i + 1) * LANES], pack, tables[0] if tables else None)
            for part, value in zip(parts, values, strict=True):
                part.append((value * scale).astype(x.dtype))
        total = acc[:, at]
        for part, pieces in enumerate(parts):
            total += lax.dot_general(
                x[part],
                jnp.concatenate(pieces, axis=1),
                (((1,), (1,)), ((), ())),
                precision=exact,
                preferred_element_type=jnp.float32,
            )
        acc[:, at] = total

    @pl.when(number == last)
    def _finish() -> None:
        out[...] = acc[...].astype(out.dtype)


def product_of_tiles(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *levels: jax.Array,
    groups: int,
    span: int,
    tile: tuple[int, int, int],
    interpret: bool,
) -> jax.Array:
    """``[vectors, rows]`` in ``x``'s dtype: each tile of the matrix is decoded once and multiplied by many vectors.

    Args:
      x: ``[codes in a byte, vectors, width]``.
      codes, scales, levels, span: as for :func:`product`.
      groups: number of groups within 128 columns, each with its own scale.
      tile: vectors, rows and columns (bytes of codes) that are multiplied at a time.
    """
    (pack, vectors, width), rows = x.shape, codes.shape[0]
    some, block, columns = tile
    tables = [table.reshape(1, 16) for table in levels]
    return pl.pallas_call(
        functools.partial(_tiles_kernel, groups, span),
        grid=(vectors // some, rows // block, width // columns),
        in_specs=[
            pl.BlockSpec((pack, some, columns), lambda v, r, c: (0, v, c)),
            pl.BlockSpec((block, columns), lambda v, r, c: (r, c)),
            pl.BlockSpec((scales.shape[0], block), lambda v, r, c: (0, r)),
            *[pl.BlockSpec(memory_space=pltpu.SMEM)] * len(tables),
        ],
        out_specs=pl.BlockSpec((some, block), lambda v, r, c: (v, r)),
        out_shape=kernel_results((x, codes, scales, *levels), ((vectors, rows), x.dtype))[0],
        scratch_shapes=[pltpu.VMEM((some, block), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * pack * vectors * width * rows,
            transcendentals=0,
            bytes_accessed=vectors // some * (rows * width + 4 * scales.size)
            + x.dtype.itemsize * (rows // block * x.size + vectors * rows),
        ),
        interpret=interpret,
        name="capibara_quantised_matmul_tiles",
    )(x, codes, scales, *tables)
