"""ReLU networks with fewer neurons: zonotopes reduced by merging their edges."""

from __future__ import annotations

from capibara.compress.tropical.merging import merge_neurons
from capibara.compress.tropical.network import Apply, Convolution, Dense, Flatten, Pool, Relu
from capibara.compress.tropical.report import LayerReport, Merged
from capibara.compress.tropical.zonotopes import RationalMap, Zonotope

__all__ = [
    "Apply",
    "Convolution",
    "Dense",
    "Flatten",
    "LayerReport",
    "Merged",
    "Pool",
    "RationalMap",
    "Relu",
    "Zonotope",
    "merge_neurons",
]
