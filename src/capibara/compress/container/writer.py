"""Writing an archive: tensor after tensor, in bounded memory; the file appears when all of it is there."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
import secrets
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container.index import (
    CHUNK,
    HEADER,
    MAGIC,
    VERSION,
    Chunk,
    Entry,
    check_name,
    check_shape,
    dump,
)
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat

__all__ = ["ArchiveWriter"]


class ArchiveWriter:
    """Writes a ``.capi`` file; use it as a context.

    The file is written beside its place and moved there when the context ends without an exception: a reader sees
    the old file or the whole new one.

    Args:
      path: the file; its folder exists.
      metadata: text to keep with the tensors.

    Raises:
      OSError: the folder is missing, the disk is full …; the old file then stands as it was.
    """

    def __init__(self, path: str | os.PathLike[str], metadata: Mapping[str, str] | None = None) -> None:
        self.path = Path(path)
        self.metadata = dict(metadata or {})
        for key, value in self.metadata.items():
            if not isinstance(key, str) or not isinstance(value, str):
                raise CompressError(f"metadata[{key!r}]: got {value!r}, expected text under a name")
        self.entries: list[Entry] = []
        self._by_name: dict[str, Entry] = {}
        self._temporary = self.path.with_name(f".{self.path.name[:40]}.{secrets.token_hex(6)}.tmp")
        self._file: BinaryIO | None = None
        self._at = 0

    def __enter__(self) -> Self:
        self._file = open(self._temporary, "xb")
        self._write(HEADER.pack(MAGIC, VERSION, 0))
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        assert self._file is not None
        try:
            with self._file:
                if kind is None:
                    self._write(dump(self.entries, self.metadata, self._at))
                    self._file.flush()
                    os.fsync(self._file.fileno())
            if kind is None:
                os.replace(self._temporary, self.path)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def _write(self, data: bytes) -> None:
        if self._file is None or self._file.closed:
            raise CompressError("the archive is not open. Remedy: with ArchiveWriter(path) as archive: …")
        self._file.write(data)
        self._at += len(data)

    def add(
        self,
        name: str,
        bits: np.ndarray,
        form: NumberFormat,
        shape: Iterable[int],
        *,
        codec: str = "lossless",
        settings: Mapping[str, Any] | None = None,
    ) -> Entry:
        """Code one tensor and append it.

        Args:
          name: another one than all before.
          bits: the numbers in C order as ``form.unsigned`` [count]; of a memory map only what is being coded is read.
          form: of the numbers.
          shape: of the tensor.
          codec: one of :data:`capibara.compress.codecs.protocol.CODECS`.
          settings: of the codec.

        Raises:
          CompressError: a name that was there, or sizes that do not fit.
        """
        shape, settings = tuple(operator.index(n) for n in shape), dict(settings or {})
        self._check_name(name)
        if (wrong := check_shape(shape)) is not None:
            raise CompressError(f"{name}: shape: got {shape}: {wrong}")
        try:
            json.dumps(settings, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CompressError(
                f"{name}: settings: got {settings!r}, expected plain values ({error})"
            ) from None
        if math.prod(shape) != bits.size or bits.dtype != form.unsigned:
            raise CompressError(
                f"{name}: got {bits.size} numbers of {bits.dtype} for the shape {shape} of {form.name}, "
                f"expected {math.prod(shape)} of {form.unsigned}"
            )
        how = get_codec(codec)
        bits = bits.reshape(-1)
        rows = shape[0] if shape else 1
        length = max(math.prod(shape[1:]), 1)
        step = max(CHUNK // length, 1)
        starts = range(0, rows, step) if bits.size else [0]

        def encode(start: int) -> tuple[int, bytes]:
            some = min(step, rows - start) if bits.size else rows
            part = np.ascontiguousarray(bits[start * length : (start + some) * length])
            return some, how.encode(part, form, (some, *shape[1:]) if shape else (), settings)

        chunks, begin = [], self._at
        try:
            for some, payload in _in_order(encode, starts):
                chunks.append(Chunk(some, self._at, len(payload), zlib.crc32(payload)))
                self._write(payload)
        except BaseException:
            # What was written of this tensor belongs to none: the caller may go on with another codec.
            if self._file is not None and not self._file.closed:
                self._file.seek(begin)
                self._file.truncate()
                self._at = begin
            raise
        return self._keep(Entry(name, form, shape, codec, settings, tuple(chunks)))

    def _keep(self, entry: Entry) -> Entry:
        self.entries.append(entry)
        self._by_name[entry.name] = entry
        return entry

    def _check_name(self, name: str) -> None:
        if (wrong := check_name(name)) is not None:
            raise CompressError(f"name: got {name!a}: {wrong}")
        if name in self._by_name:
            raise CompressError(f"name: got {name!r}, expected text that no earlier tensor has")

    def add_twin(self, name: str, same_as: str) -> Entry:
        """A second name of a tensor that was added: tied weights are stored once."""
        self._check_name(name)
        if (twin := self._by_name.get(same_as)) is None or twin.same_as is not None:
            raise CompressError(
                f"same_as: got {same_as!r}, expected a tensor that was added before under this name"
            )
        return self._keep(Entry(name, twin.format, twin.shape, twin.codec, twin.settings, (), same_as))


def _in_order(work: Any, items: Iterable[Any]) -> Iterable[Any]:
    """Results in order, two at work at a time, so that at most two chunks are in memory."""
    items = list(items)
    if len(items) < 2:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(work, item) for item in items[:2]]
        for following in [*items[2:], None, None]:
            yield waiting.pop(0).result()
            if following is not None:
                waiting.append(pool.submit(work, following))
