"""Read an archive: the index immediately, tensors on request."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from capibara.compress.codecs.executors import best_executor
from capibara.compress.codecs.in_place import DecodesInPlace
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.checksum import crc32
from capibara.compress.container.exact import TOGETHER, decode_exact
from capibara.compress.container.file_bytes import FileBytes
from capibara.compress.container.index import FOOTER, HEADER, Chunk, Entry, parse, parse_footer
from capibara.compress.container.pool import ahead, run_all
from capibara.compress.container.room import LARGE, Room
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.errors import did_you_mean

__all__ = ["Archive"]

_MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # bytes


class Archive:
    """A ``.capi`` file open for reading; use it as a context manager, or close it.

    Args:
      path: the file.

    Attributes:
      entries: name → :class:`~capibara.compress.container.index.Entry`, in the order of the file.
      metadata: text stored with the tensors.

    Raises:
      ArchiveError: the file is not an archive, or has a newer version.
      DamagedError: the file was truncated or modified.
      OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = FileBytes(self.path)
        try:
            self.size = self._file.size
            if self.size < HEADER.size:
                raise ArchiveError(f"{self.path}: not a .capi archive (it has {self.size} bytes)")
            head = bytes(self._file.read(0, HEADER.size))
            tail = bytes(self._file.read(max(self.size - FOOTER.size, 0), min(FOOTER.size, self.size)))
            offset, length, crc = parse_footer(head, tail, self.size, self.path)
            text = bytes(self._file.read(offset, length))
            if zlib.crc32(text) != crc:
                raise DamagedError(
                    f"{self.path}: the index does not have its checksum. Remedy: copy the file again."
                )
            self.metadata, entries = parse(text, offset, self.path, HEADER.unpack(head)[1])
        except BaseException:
            self._file.close()
            raise
        self.entries = {e.name: e for e in entries}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __getitem__(self, name: str) -> Entry:
        if (entry := self.entries.get(name)) is None:
            raise KeyError(f"{self.path}: no tensor {name!r}.{did_you_mean(str(name), self.entries)}")
        return entry

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """The values of a tensor as unsigned integers of its width, in its shape.

        Args:
          name: which tensor.
          rows: only these rows along its first axis (step 1); other chunks are not read.

        Raises:
          KeyError: there is no tensor of that name.
          ArchiveError: ``rows`` is not such a slice, or the tensor is a scalar.
          DamagedError: a payload has the wrong checksum, or is not what its codec writes.
        """
        return self._read(name, rows, None)

    def _read(self, name: str, rows: slice | None, room: Room | None) -> np.ndarray:
        """As :meth:`read`; the numbers lie in ``room``, where there is one."""
        entry = self[name]
        source = entry if entry.same_as is None else self[entry.same_as]
        total = source.shape[0] if source.shape else 1
        first, last = _range(rows, source.shape, total)
        last = max(first, last)
        shape = (last - first, *source.shape[1:]) if source.shape else ()
        # From here on rows are those that chunks are runs of: as many for each of the tensor's own.
        length = math.prod(source.coded_shape[1:])
        if source.coded_as is not None:
            each = math.prod(source.shape[1:]) // length
            first, last = first * each, last * each
        wanted, at = [], 0
        for chunk in source.chunks:
            if at < last and at + chunk.rows > first:
                wanted.append(_Place(chunk, at - first, self.path, source))
            at += chunk.rows
        for place in wanted:
            place.check()
        count = (last - first) * length
        self._check_memory(source, count * source.format.bits // 8)
        if len(wanted) == 1:
            out = None if room is None else room.take(count, source.format.unsigned)
            return self._decode(wanted[0], out, last - first).reshape(shape)
        out = np.empty(count, source.format.unsigned)
        run_all(lambda place: self._decode(place, out, last - first), wanted)
        return out.reshape(shape)

    def read_many(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, np.ndarray]]:
        """Yield tensors as :meth:`read` returns them, decoding a few ahead: faster for many small ones.

        Tensors below 4 MiB may share a block of memory of up to 32 MiB, which is freed when none of them is in use.

        Args:
          names: which tensors, in which order; by default all, in the order of the file.

        Raises:
          KeyError: there is no tensor of that name.
          DamagedError: as :meth:`read`, when that tensor is reached.
        """
        wanted = [self[name] for name in (self.entries if names is None else names)]
        for exact, some in itertools.groupby(wanted, lambda e: e.codec == "lossless" and e.count > 0):
            yield from (self._read_exact if exact else self._read_ahead)(list(some))

    def _read_exact(self, wanted: list[Entry]) -> Iterator[tuple[str, np.ndarray]]:
        """As :meth:`read_many`, of the codec ``lossless``: many payloads in one call of compiled code where it is."""
        many = getattr(best_executor(), "decode_many", None)
        room, at = Room.of(wanted), 0
        while many is not None and at < len(wanted):
            if (
                wanted[at].original_bytes > TOGETHER
            ):  # chunk by chunk: its payload need not be in memory as a whole
                yield wanted[at].name, self.read(wanted[at].name)
                at += 1
                continue
            first, held = at, 0
            while at < len(wanted) and (at == first or held + wanted[at].original_bytes <= TOGETHER):
                held += wanted[at].original_bytes
                at += 1
            found = decode_exact(
                self._file, [self[e.same_as or e.name] for e in wanted[first:at]], room, many
            )
            if found is None:
                at = first
                break
            found.reverse()
            for entry in wanted[first:at]:
                # What was not decoded has something that this way does not know, or that is wrong: the other one tells.
                yield entry.name, self.read(entry.name) if (bits := found.pop()) is None else bits
        yield from self._read_ahead(wanted[at:])

    def _read_ahead(self, wanted: list[Entry]) -> Iterator[tuple[str, np.ndarray]]:
        room = Room.of(wanted)

        def read(entry: Entry) -> tuple[str, np.ndarray]:
            return entry.name, self._read(entry.name, None, room if entry.original_bytes < LARGE else None)

        def size(entry: Entry) -> int:
            # One of several chunks is read when it is its turn, with all threads at work on it.
            return entry.original_bytes if len(self[entry.same_as or entry.name].chunks) == 1 else 0

        yield from ahead(read, wanted, size)

    def _check_memory(self, entry: Entry, size: int) -> None:
        """Refuse what no memory of this machine holds: a few bytes may claim to be any number of values."""
        if size > _MEMORY:
            raise ArchiveError(
                f"{self.path}: {entry.name}: {entry.shape} of {entry.format.name} takes {size / 1e9:,.1f} GB, this "
                f"machine has {_MEMORY / 1e9:,.1f} GB of memory. Remedy: read it in parts (rows=…), or on a larger "
                "machine; if the file is not your own, do not trust it."
            )

    def payloads(self, name: str) -> Iterator[tuple[tuple[int, ...], memoryview]]:
        """The encoded chunks of a tensor, each with its shape, for decoding elsewhere.

        If the tensor has ``coded_as``, the shapes are those of runs of rows of that shape.

        Raises:
          KeyError: there is no tensor of that name.
          DamagedError: a chunk has the wrong checksum.
        """
        entry = self[name]
        source = entry if entry.same_as is None else self[entry.same_as]
        for chunk in source.chunks:
            yield source.chunk_shape(chunk), self._payload(chunk, source)

    def beginnings(self, name: str, size: int) -> Iterator[tuple[tuple[int, ...], bytearray]]:
        """As :meth:`payloads`, at most the first ``size`` bytes of each: too few to verify a checksum.

        Raises:
          KeyError: there is no tensor of that name.
          DamagedError: the file has become shorter.
        """
        source = self[self[name].same_as or name]
        for chunk in source.chunks:
            yield source.chunk_shape(chunk), self._file.read(chunk.offset, min(size, chunk.length))

    def _payload(self, chunk: Chunk, entry: Entry) -> memoryview:
        payload = np.empty(chunk.length, np.uint8).data
        self._file.read_into(payload, chunk.offset)
        if crc32(payload) != chunk.crc32:
            raise DamagedError(
                f"{self.path}: {entry.name} does not have its checksum. Remedy: copy or write the file again."
            )
        return payload

    def _decode(self, place: _Place, out: np.ndarray | None, rows: int) -> np.ndarray:
        """The chunk's part of the wanted rows: of ``out`` (then that is filled), or new."""
        chunk, entry = place.chunk, place.entry
        codec = get_codec(entry.codec)
        shape = entry.chunk_shape(chunk)
        length = math.prod(entry.coded_shape[1:])
        # All of it is wanted, or some rows in the middle.
        whole = place.begin >= 0 and place.begin + chunk.rows <= rows
        fills = codec if whole and isinstance(codec, DecodesInPlace) else None
        payload = self._payload(chunk, entry)
        try:
            if fills is not None:
                part = (
                    np.empty(chunk.rows * length, entry.format.unsigned)
                    if out is None
                    else out[place.begin * length : (place.begin + chunk.rows) * length]
                )
                fills.decode_into(part, payload, entry.format, shape, entry.settings)
                return part
            bits = codec.decode(payload, entry.format, shape, entry.settings)
        except DamagedError as error:
            raise DamagedError(f"{self.path}: {entry.name}: {error}") from None
        except MemoryError as error:
            raise ArchiveError(
                f"{self.path}: {entry.name}: not enough memory to decode {shape} of {entry.format.name} ({error}). "
                "Remedy: read it in parts (rows=…), or on a larger machine."
            ) from None
        first, last = max(-place.begin, 0), min(rows - place.begin, chunk.rows)
        bits = bits.reshape(-1)[first * length : last * length]
        if out is None:
            return bits
        part = out[(place.begin + first) * length : (place.begin + last) * length]
        part[:] = bits
        return part

    def verify(self) -> Iterator[tuple[Entry, str | None]]:
        """Decode every tensor, one after another; yields each entry with ``None`` or a description of the problem."""
        for entry in self:
            try:
                if entry.same_as is None:
                    for chunk in entry.chunks:
                        place = _Place(chunk, 0, self.path, entry)
                        place.check()
                        self._decode(place, None, chunk.rows)
                yield entry, None
            except ArchiveError as error:
                yield entry, str(error)


def _range(rows: slice | None, shape: tuple[int, ...], total: int) -> tuple[int, int]:
    """The first row that is wanted, and the one after the last.

    Raises:
      ArchiveError: ``rows`` is not a slice with step 1, or there are none.
    """
    if rows is None:
        return 0, total
    try:
        # What is not a slice has no ``indices``; its bounds may be no integers, its step 0.
        first, last, step = rows.indices(total)
    except (AttributeError, TypeError, ValueError):
        first = last = step = 0
    if step != 1 or not shape:
        some = f"slice({rows:d}, {rows + 1 or None})" if isinstance(rows, int) else "slice(0, 10)"
        how = f"Remedy: {some}." if shape else "Remedy: leave it out."
        raise ArchiveError(
            f"rows: got {rows!r} for the shape {shape}, expected a slice of integers with step 1. {how}"
        )
    return first, last


@dataclass(frozen=True)
class _Place:
    """A chunk, and where its rows begin among those that are wanted."""

    chunk: Chunk
    begin: int
    path: Path
    entry: Entry

    def check(self) -> None:
        """Before anything is allocated: may so few bytes be so many numbers?"""
        codec, count = get_codec(self.entry.codec), math.prod(self.entry.chunk_shape(self.chunk))
        if isinstance(codec, DecodesInPlace):
            try:
                codec.check_count(self.chunk.length, self.entry.format, count)
            except DamagedError as error:
                raise DamagedError(f"{self.path}: {self.entry.name}: {error}") from None
