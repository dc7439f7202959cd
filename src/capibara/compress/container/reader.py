"""Reading an archive: the index at once, tensors when they are asked for, from a memory map."""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.index import FOOTER, HEADER, Chunk, Entry, parse, parse_footer
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.errors import did_you_mean

__all__ = ["Archive"]


class Archive:
    """A ``.capi`` file that is open for reading; use it as a context, or close it.

    Args:
      path: the file.

    Attributes:
      entries: name → :class:`~capibara.compress.container.index.Entry`, in the order of the file.
      metadata: text that was kept with the tensors.

    Raises:
      ArchiveError: not such a file, or of a newer version.
      DamagedError: it was cut or changed.
      OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            head = file.read(HEADER.size)
            if len(head) < HEADER.size:
                raise ArchiveError(f"{self.path}: not a .capi archive (it has {len(head)} bytes)")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            offset, length, crc = parse_footer(head, self._map[-FOOTER.size :], self.size, self.path)
            text = self._map[offset : offset + length]
            if zlib.crc32(text) != crc:
                raise DamagedError(
                    f"{self.path}: the index does not have its checksum. Remedy: copy the file again."
                )
            self.metadata, entries = parse(text, offset, self.path)
        except BaseException:
            self._map.close()
            raise
        self.entries = {e.name: e for e in entries}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __getitem__(self, name: str) -> Entry:
        if (entry := self.entries.get(name)) is None:
            raise KeyError(f"{self.path}: no tensor {name!r}.{did_you_mean(str(name), self.entries)}")
        return entry

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The numbers of a tensor as unsigned integers of its width, in its shape.

        Args:
          name: which tensor.
          rows: only these along its first axis (step 1): chunks without any of them are not touched.

        Raises:
          KeyError: no tensor of that name.
          DamagedError: a payload does not have its checksum, or is not what its codec writes.
        """
        entry = self[name]
        source = entry if entry.same_as is None else self[entry.same_as]
        total = source.shape[0] if source.shape else 1
        first, last, step = (slice(None) if rows is None else rows).indices(total)
        if step != 1 or (rows is not None and not source.shape):
            raise ArchiveError(
                f"rows: got {rows!r} for the shape {source.shape}, expected a slice with step 1"
            )
        last = max(first, last)
        wanted, at = [], 0
        for chunk in source.chunks:
            if at < last and at + chunk.rows > first:
                wanted.append((at, chunk))
            at += chunk.rows
        shape = (last - first, *source.shape[1:]) if source.shape else ()
        if len(wanted) == 1 and wanted[0][1].rows == last - first:
            return self._decode(source, wanted[0][1]).reshape(shape)
        parts = []
        with ThreadPoolExecutor(min(os.cpu_count() or 1, max(len(wanted), 1))) as pool:
            decoded = pool.map(lambda c: self._decode(source, c[1]), wanted)
            for (start, chunk), bits in zip(wanted, decoded, strict=True):
                grid = bits.reshape(source.chunk_shape(chunk))
                parts.append(grid[max(first - start, 0) : last - start] if source.shape else grid)
        return np.concatenate(parts) if parts else np.empty(shape, source.format.unsigned)

    def _decode(self, entry: Entry, chunk: Chunk) -> np.ndarray:
        codec = get_codec(entry.codec)
        # A copy: the traceback of an error would hold on to a view of the map, which then could not be closed.
        payload = memoryview(self._map[chunk.offset : chunk.offset + chunk.length])
        if zlib.crc32(payload) != chunk.crc32:
            raise DamagedError(
                f"{self.path}: {entry.name} does not have its checksum. Remedy: copy or write the file again."
            )
        try:
            return codec.decode(payload, entry.format, entry.chunk_shape(chunk), entry.settings)
        except DamagedError as error:
            raise DamagedError(f"{self.path}: {entry.name}: {error}") from None

    def verify(self) -> Iterator[tuple[Entry, str | None]]:
        """Decode every tensor, one after another: each entry with ``None``, or with what is wrong."""
        for entry in self:
            try:
                if entry.same_as is None:
                    for chunk in entry.chunks:
                        self._decode(entry, chunk)
                yield entry, None
            except ArchiveError as error:
                yield entry, str(error)
