"""The kernel of max-plus products for TPUs.

A matrix product runs on the matrix unit; a maximum of sums does not, and the vector units are limited by broadcasting
one operand's column to all lanes. So a column of a strip of rows is broadcast over the lanes once and added to whole
rows of the other operand, while the maxima of the strip stay in registers for the whole depth of a block.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from capibara.ops.one_device import kernel_results
from capibara.ops.tropical.pallas_tpu import LANES, Blocks

__all__ = ["product"]


def _kernel(size: Blocks, left: Any, right: Any, best: Any, *index: Any) -> None:
    block = pl.program_id(3)

    @pl.when(block == 0)
    def _start() -> None:
        best[...] = jnp.full(best.shape, -jnp.inf, best.dtype)
        for at in index:
            at[...] = jnp.full(at.shape, -1, at.dtype)

    def strip(number: Any, _: Any) -> Any:
        rows = pl.ds(pl.multiple_of(number * size.strip, size.strip), size.strip)

        def deeper(chunk: Any, carry: Any) -> Any:
            depth = pl.ds(pl.multiple_of(chunk * LANES, LANES), LANES)
            columns, lines = left[rows, depth], right[depth, :]
            first = block * size.inner + chunk * LANES
            for k in range(LANES):
                term = columns[:, k : k + 1] + lines[k : k + 1, :]
                if not index:
                    carry = (jnp.maximum(carry[0], term),)
                    continue
                better = term > carry[0]
                carry = (jnp.where(better, term, carry[0]), jnp.where(better, first + k, carry[1]))
            return carry

        refs = (best, *index)
        for ref, x in zip(
            refs,
            lax.fori_loop(0, size.inner // LANES, deeper, tuple(ref[rows, :] for ref in refs)),
            strict=True,
        ):
            ref[rows, :] = x
        return _

    lax.fori_loop(0, size.rows // size.strip, strip, 0)


def product(size: Blocks, indices: bool, interpret: bool, a: jax.Array, b: jax.Array) -> Any:
    """``max over k of a[n, i, k] + b[n, k, j]``, and the lowest such ``k`` (-1 where all terms are -inf), int32.

    Args:
      size: of blocks; ``a`` [batch, rows, inner] and ``b`` [batch, inner, columns] are multiples of them.
      indices: whether to return them.
    """
    batch, rows, inner = a.shape
    columns = b.shape[2]
    grid = (batch, rows // size.rows, columns // size.columns, inner // size.inner)
    place = pl.BlockSpec((None, size.rows, size.columns), lambda n, i, j, k: (n, i, j))
    kinds = (a.dtype, jnp.int32) if indices else (a.dtype,)
    return pl.pallas_call(
        functools.partial(_kernel, size),
        grid=grid,
        in_specs=[
            pl.BlockSpec((None, size.rows, size.inner), lambda n, i, j, k: (n, i, k)),
            pl.BlockSpec((None, size.inner, size.columns), lambda n, i, j, k: (n, k, j)),
        ],
        out_specs=[place] * len(kinds),
        out_shape=kernel_results((a, b), *(((batch, rows, columns), kind) for kind in kinds)),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * rows * inner * columns,
            transcendentals=0,
            bytes_accessed=4
            * batch
            * (grid[2] * rows * inner + grid[1] * inner * columns + len(kinds) * rows * columns),
        ),
        interpret=interpret,
        name="capibara_max_plus",
    )(a, b)
