"""Vector quantisation: nearest codes, and one or several learned codebooks."""

from __future__ import annotations

from capibara.ops.vq.api import nearest_code
from capibara.ops.vq.quantise import initial_codebook_state, update_codebook, vector_quantise
from capibara.ops.vq.several import dequantise, product_quantise, residual_quantise

__all__ = [
    "dequantise",
    "initial_codebook_state",
    "nearest_code",
    "product_quantise",
    "residual_quantise",
    "update_codebook",
    "vector_quantise",
]
