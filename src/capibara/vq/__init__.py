"""Vector quantisation layers.

:class:`VQbitLayer` stores its codebook; :func:`vq_apply` is the underlying pure function, which takes and returns the
codebook's state.
"""

from __future__ import annotations

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.vq.functional import vq_apply, vq_init_state
from capibara.vq.vqbit.vqbit_layer import VQbitLayer

__all__ = ["VQbitLayer", "vq_apply", "vq_init_state"]
