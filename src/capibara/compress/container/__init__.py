"""The archive: tensors of a model in one file, each coded on its own, readable one by one or by rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from capibara.lazy import on_demand

if TYPE_CHECKING:
    from capibara.compress.container.index import Chunk, Entry
    from capibara.compress.container.reader import Archive
    from capibara.compress.container.writer import ArchiveWriter, Tensor

__all__ = ["Archive", "ArchiveWriter", "Chunk", "Entry", "Tensor"]

_HOMES = {
    "index": (
        "Chunk",
        "Entry",
    ),
    "reader": ("Archive",),
    "writer": (
        "ArchiveWriter",
        "Tensor",
    ),
}

__getattr__, __dir__ = on_demand(__name__, _HOMES)
