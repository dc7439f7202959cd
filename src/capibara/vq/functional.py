"""The pure core of a vector-quantisation layer, under the names that layers use.

Both are the operations of :mod:`capibara.ops.vq`: ``vq_init_state(key, codebook_size, dim) -> state`` and
``vq_apply(state, x, *, train, decay, …, key) -> (quantized, indices, metrics, new_state)``.
"""

from __future__ import annotations

from capibara.ops.vq import initial_codebook_state as vq_init_state
from capibara.ops.vq import vector_quantise as vq_apply

__all__ = ["vq_apply", "vq_init_state"]
