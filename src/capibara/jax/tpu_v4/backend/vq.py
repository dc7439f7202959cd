"""``TpuV4VQOps``: :mod:`capibara.ops.vq` under its documented name."""

from __future__ import annotations

from capibara.ops import vq

__all__ = ["TpuV4VQOps"]


class TpuV4VQOps:
    """Vector quantisation, each method a function of :mod:`capibara.ops.vq` with its arguments.

    They run on every platform; the name says which one they were written for.
    """

    nearest_code = staticmethod(vq.nearest_code)
    initial_codebook_state = staticmethod(vq.initial_codebook_state)
    vector_quantise = staticmethod(vq.vector_quantise)
    update_codebook = staticmethod(vq.update_codebook)
    product_quantise = staticmethod(vq.product_quantise)
    residual_quantise = staticmethod(vq.residual_quantise)
    dequantise = staticmethod(vq.dequantise)
