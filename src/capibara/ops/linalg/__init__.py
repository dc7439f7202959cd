"""Linear algebra: products, the singular value decomposition, QR, and Cholesky updates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.ops.linalg.cholesky import cholesky_update
    from capibara.ops.linalg.gemm import optimized_gemm
    from capibara.ops.linalg.grouped import grouped_matmul
    from capibara.ops.linalg.qr_factors import qr
    from capibara.ops.linalg.quantised import quantised_matmul
    from capibara.ops.linalg.svd import fast_svd

__all__ = [
    "cholesky_update",
    "fast_svd",
    "grouped_matmul",
    "optimized_gemm",
    "qr",
    "quantised_matmul",
]

_HOMES = {
    "cholesky": ("cholesky_update",),
    "gemm": ("optimized_gemm",),
    "grouped": ("grouped_matmul",),
    "qr_factors": ("qr",),
    "quantised": ("quantised_matmul",),
    "svd": ("fast_svd",),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
