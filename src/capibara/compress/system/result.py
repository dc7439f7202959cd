"""A compressed tensor: the content of an archive with one tensor, and how it was created."""

from __future__ import annotations

import dataclasses
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.index import (
    CHUNK,
    FOOTER,
    HEADER,
    MAGIC,
    Chunk,
    Entry,
    dump,
    parse,
    parse_footer,
    version_of,
)
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.files import replace_file

__all__ = ["CompressedTensor", "pack", "row_pieces"]


def row_pieces(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Runs of rows, (first, count), that are encoded independently; a single run for small and empty tensors."""
    rows = shape[0] if shape else 1
    length = int(np.prod(shape[1:], dtype=np.int64))
    if rows * length == 0:
        return [(0, rows)]
    step = max(CHUNK // length, 1)
    return [(i, min(step, rows - i)) for i in range(0, rows, step)]


@dataclass(frozen=True)
class CompressedTensor:
    """The result of :meth:`SystemIntegrationCoordinator.compress`.

    Attributes:
      entry: the tensor's name, format, shape, codec, settings and chunks.
      payloads: of each chunk.
      kind: the framework of the original tensor: ``"numpy"``, ``"torch"`` or ``"jax"``.
      device: its device, as named by that framework.
      engine: that ran the codec: ``"jax"``, ``"native"`` or ``"numpy"``.
      reason: why this codec and this engine.
      relative_error: of the whole tensor, in the Euclidean norm: ‖decoded - original‖ / ‖original‖; 0 if exact,
        ``None`` if it was read from a file.
      seconds: time of compression; ``None`` if it was read from a file.
    """

    entry: Entry
    payloads: tuple[bytes, ...] = field(repr=False)
    kind: str = "numpy"
    device: str = "cpu"
    engine: str = ""
    reason: str = ""
    relative_error: float | None = None
    seconds: float | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def codec(self) -> str:
        return self.entry.codec

    @property
    def original_bytes(self) -> int:
        return self.entry.original_bytes

    @property
    def compressed_bytes(self) -> int:
        """Size as a file, including the index."""
        return len(self.to_bytes())

    @property
    def compression_ratio(self) -> float:
        """Original bytes over the size as a file."""
        return self.original_bytes / self.compressed_bytes

    def to_bytes(self) -> bytes:
        """The content of a ``.capi`` file, which :class:`~capibara.compress.container.reader.Archive` reads."""
        body = HEADER.pack(MAGIC, version_of([self.entry]), 0) + b"".join(self.payloads)
        return body + dump([self.entry], {"kind": self.kind, "device": self.device}, len(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The tensor of an archive with exactly one tensor.

        Raises:
          ArchiveError: it is not an archive, or does not have exactly one tensor.
          DamagedError: it was truncated or modified.
        """
        offset, length, crc = parse_footer(
            data[: HEADER.size], data[-FOOTER.size :], len(data), "the compressed tensor"
        )
        text = data[offset : offset + length]
        if zlib.crc32(text) != crc:
            raise DamagedError("the compressed tensor's index does not have its checksum")
        metadata, entries = parse(
            text, offset, "the compressed tensor", HEADER.unpack(data[: HEADER.size])[1]
        )
        if len(entries) != 1:
            raise ArchiveError(
                f"the archive holds {len(entries)} tensors, expected one. Remedy: capibara.compress.container.Archive."
            )
        payloads = tuple(data[c.offset : c.offset + c.length] for c in entries[0].chunks)
        kind = metadata.get("kind", "numpy")
        return cls(entries[0], payloads, kind if kind in ("numpy", "torch", "jax") else "numpy",
                   metadata.get("device", "cpu"))  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a ``.capi`` file, in one step.

        Raises:
          OSError: the folder is missing, the disk is full …; an existing file is then unchanged.
        """
        replace_file(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file written by :meth:`save`, or another archive with one tensor.

        Raises:
          ArchiveError: it is not such a file.
          OSError: it cannot be read.
        """
        return cls.from_bytes(Path(path).read_bytes())

    def decode(self) -> np.ndarray:
        """The values as unsigned integers [count], with the codec's default engine.

        Raises:
          DamagedError: a payload has the wrong checksum, or is not what its codec writes.
        """
        codec, parts = get_codec(self.entry.codec), []
        for chunk, payload in zip(self.entry.chunks, self.payloads, strict=True):
            if zlib.crc32(payload) != chunk.crc32:
                raise DamagedError(
                    f"{self.entry.name} does not have its checksum. Remedy: compress it again."
                )
            parts.append(
                codec.decode(
                    memoryview(payload), self.entry.format, self.entry.chunk_shape(chunk), self.entry.settings
                )
            )
        return parts[0].reshape(-1) if len(parts) == 1 else np.concatenate([p.reshape(-1) for p in parts])


def pack(entry: Entry, parts: list[tuple[int, bytes]]) -> tuple[Entry, tuple[bytes, ...]]:
    """The entry with chunks of (rows, payload) as in a file, and the payloads."""
    at, chunks = HEADER.size, []
    for rows, payload in parts:
        chunks.append(Chunk(rows, at, len(payload), zlib.crc32(payload)))
        at += len(payload)
    return dataclasses.replace(entry, chunks=tuple(chunks)), tuple(payload for _, payload in parts)
