"""Convert models of every kind to named tensors and back."""

from __future__ import annotations

from capibara.compress.models.adapters import Adapter, adapt
from capibara.compress.models.source import Tensors, TensorSource, find_tied

__all__ = ["Adapter", "TensorSource", "Tensors", "adapt", "find_tied"]
