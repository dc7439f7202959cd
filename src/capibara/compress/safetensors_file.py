"""Reading and writing safetensors files tensor by tensor, as bits, from a memory map.

The ``safetensors`` package gives arrays of a framework, whole files at a time for some; here tensors of any type pass
through without a framework, one at a time. The format: the header's length (u64), the header as JSON, the bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from capibara.compress.container.index import check_name, check_shape
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat
from capibara.files import replace_file

__all__ = ["SafetensorsFile", "write_safetensors"]

_MOST_HEADER = 100_000_000  # the limit that the format's own readers have


class SafetensorsFile:
    """A safetensors file that is open for reading; use it as a context.

    Args:
      path: the file.

    Attributes:
      tensors: name → (format, shape, where its bytes begin and end in the file), in order of their bytes.
      metadata: the header's ``__metadata__``.

    Raises:
      ArchiveError: not a safetensors file, or a type of numbers that is not known here.
      DamagedError: sizes that do not fit together.
      OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with open(self.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 8:
                raise ArchiveError(f"{self.path}: not a safetensors file (it has {size} bytes)")
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, _MOST_HEADER):
                raise ArchiveError(
                    f"{self.path}: not a safetensors file, or a damaged one (a header of {length} bytes)"
                )
            text = file.read(length)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            self.metadata, self.tensors = self._parse(text, 8 + length, size)
        except BaseException:
            self._map.close()
            raise

    def _parse(
        self, text: bytes, begin: int, size: int
    ) -> tuple[dict[str, str], dict[str, tuple[NumberFormat, tuple[int, ...], int, int]]]:
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__", {}) or {}
            found = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
            raise ArchiveError(f"{self.path}: the header is not a safetensors header ({error!r})") from None
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise DamagedError(f"{self.path}: the header's metadata is not text by text")
        out, at = {}, begin
        for name, one in found:
            kind, shape, offsets = (one.get(k) for k in ("dtype", "shape", "data_offsets"))
            if (wrong := check_name(name) or check_shape(shape)) is not None:
                raise DamagedError(f"{self.path}: {name!a:.200}: {wrong}")
            pair = isinstance(offsets, list) and len(offsets) == 2
            if not pair or any(type(n) is not int or not 0 <= n < 1 << 62 for n in offsets):
                raise DamagedError(f"{self.path}: {name}: its offsets are none")
            if (form := FORMATS.get(kind) if isinstance(kind, str) else None) is None:
                raise ArchiveError(
                    f"{self.path}: {name}: numbers of type {kind!r} are not known here ({', '.join(FORMATS)} are)"
                )
            start, end = begin + offsets[0], begin + offsets[1]
            if start != at or end > size or end - start != math.prod(shape) * form.bits // 8:
                raise DamagedError(
                    f"{self.path}: {name}: {shape} of {kind} does not take bytes {start} to {end}"
                )
            at = end
            out[name] = (form, tuple(shape), start, end)
        if at != size:
            raise DamagedError(f"{self.path}: {size - at} bytes belong to no tensor")
        return metadata, out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file, or leave that to the last tensor of it that is in use."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def __iter__(self) -> Iterator[tuple[str, NumberFormat, tuple[int, ...]]]:
        for name, (form, shape, _, _) in self.tensors.items():
            yield name, form, shape

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor, [count] of ``form.unsigned``; a view of the map, which stays while the view does."""
        form, _, start, end = self.tensors[name]
        return np.frombuffer(self._map, form.unsigned, (end - start) // (form.bits // 8), start)


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file in one step, one tensor in memory at a time.

    Args:
      path: the file; its folder exists.
      tensors: name → (format, shape), in the order of the file.
      read: gives the bits of a tensor by its name.
      metadata: for the header.

    Raises:
      OSError: the folder is missing, the disk is full …; and what ``read`` raises. The old file then stands.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (form, shape) in tensors.items():
        length = math.prod(shape) * form.bits // 8
        header[name] = {"dtype": form.name, "shape": list(shape), "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)

    def content(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, (form, _) in tensors.items():
            file.write(np.ascontiguousarray(read(name)).astype(form.unsigned, copy=False).data)

    replace_file(path, content)
