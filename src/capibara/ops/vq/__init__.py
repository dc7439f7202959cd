"""Vector quantisation: :func:`nearest_code`, and :func:`vector_quantise` with a codebook that learns."""

from __future__ import annotations

from capibara.ops.vq.api import nearest_code
from capibara.ops.vq.quantise import initial_codebook_state, vector_quantise

__all__ = ["initial_codebook_state", "nearest_code", "vector_quantise"]
