"""How a step is sharded over devices: what a plan chooses and a run executes.

:class:`Layout` is one way of running a step on a mesh: the sizes of its axes, what is sharded over them, what the
backward pass recomputes. :class:`Links` and :class:`Group` tell how long collectives take on it.
"""

from __future__ import annotations

from capibara.sharding.communication import ASYNCHRONOUS, WHOLE_PRODUCTS
from capibara.sharding.layout import Layout
from capibara.sharding.links import HOP_SECONDS, Group, Links, links_of
from capibara.sharding.resizing import mesh_sizes, resized
from capibara.sharding.slices import across_slices

__all__ = [
    "ASYNCHRONOUS",
    "HOP_SECONDS",
    "WHOLE_PRODUCTS",
    "Group",
    "Layout",
    "Links",
    "across_slices",
    "links_of",
    "mesh_sizes",
    "resized",
]
