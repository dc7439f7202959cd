"""Distinct labels of a plan's layouts in tables and figures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from capibara.sharding import Layout

__all__ = ["distinct_flags", "mesh_word", "sharding_word"]


def mesh_word(layout: Layout) -> str:
    """``data 4 × model 8``."""
    return " × ".join(f"{axis} {size}" for axis, size in layout.mesh)


def sharding_word(layout: Layout) -> str:
    """What is sharded over ``data``: all parameters (``sharded``), the ``optimizer`` alone, or nothing."""
    word = layout.parameters
    if layout.parameters == "replicated" and layout.optimizer == "sharded":
        word = "optimizer"
    return word if layout.offload == "none" else f"{word} + host"


def distinct_flags(layouts: Sequence[Layout]) -> list[str]:
    """For each layout the compiler flags that not all of them have; ``""`` if the other settings distinguish them.

    A flag is written without its prefix: ``xla_enable_async_all_gather=true`` as ``enable_async_all_gather=true``.
    """
    settings = [(layout.mesh, sharding_word(layout), layout.remat, layout.microbatches) for layout in layouts]
    if len(set(settings)) == len(settings):
        return [""] * len(layouts)
    shared = frozenset.intersection(*(frozenset(layout.flags) for layout in layouts))
    return [
        " ".join(
            f"{name.removeprefix('xla_')}={value}"
            for name, value in layout.flags
            if (name, value) not in shared
        )
        or "no others"
        for layout in layouts
    ]
