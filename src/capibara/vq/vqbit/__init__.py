"""The VQbit layer."""

from __future__ import annotations

from capibara.vq.vqbit.vqbit_layer import VQbitLayer

__all__ = ["VQbitLayer"]
