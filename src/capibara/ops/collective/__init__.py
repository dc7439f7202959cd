"""Communication between devices: all-reduce (plain or in int8), gather, scatter, exchange, and overlapped products."""

from __future__ import annotations

from capibara.ops.collective.all_reduce import async_all_reduce, zero_residual
from capibara.ops.collective.gather import all_to_all, optimized_all_gather, reduce_scatter
from capibara.ops.collective.matmul import all_gather_matmul, matmul_reduce_scatter

__all__ = [
    "all_gather_matmul",
    "all_to_all",
    "async_all_reduce",
    "matmul_reduce_scatter",
    "optimized_all_gather",
    "reduce_scatter",
    "zero_residual",
]
