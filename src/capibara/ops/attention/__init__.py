"""Attention: :func:`flash_attention` over whole sequences, :func:`cached_attention` for decoding."""

from __future__ import annotations

from capibara.ops.attention.api import flash_attention
from capibara.ops.attention.cached import cached_attention

__all__ = ["cached_attention", "flash_attention"]
