"""``TpuV4LinalgOps``: :mod:`capibara.ops.linalg` under its documented name."""

from __future__ import annotations

from capibara.ops import linalg

__all__ = ["TpuV4LinalgOps"]


class TpuV4LinalgOps:
    """Linear algebra, each method a function of :mod:`capibara.ops.linalg` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    optimized_gemm = staticmethod(linalg.optimized_gemm)
    grouped_matmul = staticmethod(linalg.grouped_matmul)
    quantised_matmul = staticmethod(linalg.quantised_matmul)
    fast_svd = staticmethod(linalg.fast_svd)
    cholesky_update = staticmethod(linalg.cholesky_update)
    qr = staticmethod(linalg.qr)
