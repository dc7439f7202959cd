"""Which products kernels for a few rows are for (:mod:`capibara.ops.linalg.few_rows`)."""

from __future__ import annotations

__all__ = ["LEAST_MATRIX", "MOST_ROWS"]

MOST_ROWS = 16
"""Rows of decoding, of which a matrix is read once."""
LEAST_MATRIX = 1 << 16
"""Numbers of a matrix; what the caches hold XLA multiplies as fast."""
