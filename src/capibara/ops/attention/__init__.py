"""Attention: over whole sequences, as a whole layer, and for decoding against a cache, in one piece or in pages."""

from __future__ import annotations

from capibara.ops.attention.api import flash_attention
from capibara.ops.attention.cached import cached_attention
from capibara.ops.attention.multihead import fused_multihead_attention, multihead_attention_params
from capibara.ops.attention.paged import paged_attention, write_pages

__all__ = [
    "cached_attention",
    "flash_attention",
    "fused_multihead_attention",
    "multihead_attention_params",
    "paged_attention",
    "write_pages",
]
