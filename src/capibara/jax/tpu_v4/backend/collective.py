"""``TpuV4CollectiveOps``: :mod:`capibara.ops.collective` under its documented name."""

from __future__ import annotations

from capibara.ops import collective

__all__ = ["TpuV4CollectiveOps"]


class TpuV4CollectiveOps:
    """Communication between devices, each method a function of :mod:`capibara.ops.collective` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    async_all_reduce = staticmethod(collective.async_all_reduce)
    zero_residual = staticmethod(collective.zero_residual)
    optimized_all_gather = staticmethod(collective.optimized_all_gather)
    reduce_scatter = staticmethod(collective.reduce_scatter)
    all_to_all = staticmethod(collective.all_to_all)
    all_gather_matmul = staticmethod(collective.all_gather_matmul)
    matmul_reduce_scatter = staticmethod(collective.matmul_reduce_scatter)
