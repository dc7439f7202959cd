"""``TpuV4AttentionOps``: :mod:`capibara.ops.attention` under its documented name."""

from __future__ import annotations

from capibara.ops import attention

__all__ = ["TpuV4AttentionOps"]


class TpuV4AttentionOps:
    """Attention, each method a function of :mod:`capibara.ops.attention` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    flash_attention = staticmethod(attention.flash_attention)
    fused_multihead_attention = staticmethod(attention.fused_multihead_attention)
    multihead_attention_params = staticmethod(attention.multihead_attention_params)
    cached_attention = staticmethod(attention.cached_attention)
    paged_attention = staticmethod(attention.paged_attention)
    write_pages = staticmethod(attention.write_pages)
