"""The archive: tensors of a model in one file, each coded on its own, readable one by one or by rows."""

from __future__ import annotations

from capibara.compress.container.index import Chunk, Entry
from capibara.compress.container.reader import Archive
from capibara.compress.container.writer import ArchiveWriter, Tensor

__all__ = ["Archive", "ArchiveWriter", "Chunk", "Entry", "Tensor"]
