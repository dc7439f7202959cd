"""Operations: one public function each, several implementations, one plain oracle.

Its submodules are the categories and hold the functions; :func:`explain` says which implementation of one runs
for given arguments, and why the others do not.
"""

from __future__ import annotations

from capibara.jax_versions import require_supported_jax

require_supported_jax()  # first: an old JAX would fail below, less clearly

from capibara.ops import attention, collective, conv, fft, linalg, loss, rotary, scan, tropical, vq
from capibara.ops.errors import NoImplementationError, OpShapeError, OpTypeError, OpValueError, OpWarning
from capibara.ops.explaining import Explanation, explain
from capibara.ops.registry import list_ops
from capibara.ops.tuning import use_tuning

__all__ = [
    "Explanation",
    "NoImplementationError",
    "OpShapeError",
    "OpTypeError",
    "OpValueError",
    "OpWarning",
    "attention",
    "collective",
    "conv",
    "explain",
    "fft",
    "linalg",
    "list_ops",
    "loss",
    "rotary",
    "scan",
    "tropical",
    "use_tuning",
    "vq",
]
