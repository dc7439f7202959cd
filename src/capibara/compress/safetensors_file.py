"""Read and write safetensors files tensor by tensor, as bits.

The ``safetensors`` package returns arrays of a framework, for some only whole files at a time; here tensors of any
dtype are processed without a framework, one at a time. The format: the header's length (u64), the header as JSON, the
bytes.

Writers differ in how they print the same header: order, spaces, escapes. :attr:`SafetensorsFile.header` keeps the
text if :func:`write_safetensors` would write it differently, so that a file can be restored byte by byte.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

import numpy as np

from capibara.compress.container.file_bytes import FileBytes, FileNumbers
from capibara.compress.container.index import check_name, check_shape, is_lean
from capibara.compress.errors import ArchiveError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat
from capibara.files import replace_file

__all__ = [
    "HEADER_KEY",
    "MOST_HEADER",
    "SafetensorsFile",
    "Stored",
    "parse_header",
    "write_safetensors",
    "write_with_header",
]

MOST_HEADER = 100_000_000  # the limit that the format's own readers have
HEADER_KEY = "capibara.safetensors_header"  # of an archive's metadata: the header of the file it was made of
_KIND = re.compile(r"[A-Za-z0-9_]{1,32}")
_BYTES = FORMATS["U8"]


class Stored(NamedTuple):
    """A tensor of a header: its format and shape, and the range of its bytes after the header.

    Tensors of unknown dtypes are bytes: ``U8`` in one dimension.
    """

    form: NumberFormat
    shape: tuple[int, ...]
    start: int
    end: int


def parse_header(
    text: bytes | bytearray, size: int, path: object
) -> tuple[dict[str, str], dict[str, Stored], bool]:
    """The metadata, the tensors in order of their bytes, and whether all their dtypes are known.

    Args:
      text: the header's JSON.
      size: number of bytes after it.
      path: of the file, for errors.

    Raises:
      ArchiveError: it is not such a header.
      DamagedError: inconsistent sizes.
    """
    # A few kilobytes of an archive may become a long header, and that many times as much memory. Strings take little.
    if not is_lean(text, strings=False):
        raise DamagedError(f"{path}: the header has more objects and lists than a writer makes")
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {}) or {}
        found = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError) as error:
        raise ArchiveError(f"{path}: the header is not a safetensors header ({error!r:.200})") from None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise DamagedError(f"{path}: the header's metadata is not text by text")
    out: dict[str, Stored] = {}
    at, known = 0, True
    for name, one in found:
        kind, shape, offsets = (one.get(k) for k in ("dtype", "shape", "data_offsets"))
        if (wrong := check_name(name) or check_shape(shape)) is not None:
            raise DamagedError(f"{path}: {name!a:.200}: {wrong}")
        pair = isinstance(offsets, list) and len(offsets) == 2
        if not pair or any(type(n) is not int or not 0 <= n < 1 << 62 for n in offsets):
            raise DamagedError(f"{path}: {name}: data_offsets: got {offsets!r:.80}, expected two integers")
        start, end = offsets
        form = FORMATS.get(kind) if isinstance(kind, str) else None
        if form is None:
            if not isinstance(kind, str) or not _KIND.fullmatch(kind):
                raise DamagedError(f"{path}: {name}: dtype: got {kind!r:.80}, expected a name such as F32")
            known, form, shape = False, _BYTES, [max(end - start, 0)]
        if start != at or end > size or end - start != math.prod(shape) * form.bits // 8:
            raise DamagedError(f"{path}: {name}: {shape} of {kind} does not take bytes {start} to {end}")
        at = end
        out[name] = Stored(form, tuple(shape), start, end)
    if at != size:
        raise DamagedError(f"{path}: {size - at} bytes belong to no tensor")
    return metadata, out, known


class SafetensorsFile:
    """A safetensors file open for reading; use it as a context manager.

    Args:
      path: the file.

    Attributes:
      tensors: name → :class:`Stored`, in order of their bytes.
      metadata: the header's ``__metadata__``.
      header: the header's text, if :func:`write_safetensors` would not write the same one for these tensors.

    Raises:
      ArchiveError: not a safetensors file.
      DamagedError: inconsistent sizes.
      OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = FileBytes(self.path)
        try:
            size = self._file.size
            if size < 8:
                raise ArchiveError(f"{self.path}: not a safetensors file (it has {size} bytes)")
            length = int.from_bytes(self._file.read(0, 8), "little")
            if length > min(size - 8, MOST_HEADER):
                raise ArchiveError(
                    f"{self.path}: not a safetensors file, or a damaged one (a header of {length} bytes)"
                )
            text = bytes(self._file.read(8, length))
            self._begin = 8 + length
            self.metadata, self.tensors, known = parse_header(text, size - self._begin, self.path)
        except BaseException:
            self._file.close()
            raise
        usual = {name: (one.form, one.shape) for name, one in self.tensors.items()}
        again = known and HEADER_KEY not in self.metadata and text == _header(usual, self.metadata)
        self.header = None if again else text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[tuple[str, NumberFormat, tuple[int, ...]]]:
        for name, one in self.tensors.items():
            yield name, one.form, one.shape

    def read(self, name: str) -> np.ndarray:
        """The bits of a tensor, [count] of ``form.unsigned``."""
        return np.asarray(self.numbers(name))

    def numbers(self, name: str) -> FileNumbers:
        """As :meth:`read`, in parts: a slice is read when it is converted to an array."""
        form, _, start, end = self.tensors[name]
        return FileNumbers(self._file, form.unsigned, self._begin + start, (end - start) // (form.bits // 8))


def _header(
    tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]], metadata: Mapping[str, str] | None
) -> bytes:
    """The text that is written for these tensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, (form, shape) in tensors.items():
        length = math.prod(shape) * form.bits // 8
        header[name] = {"dtype": form.name, "shape": list(shape), "data_offsets": [at, at + length]}
        at += length
    try:
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which UTF-8 has no bytes for
        text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def write_safetensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[NumberFormat, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a safetensors file atomically, with one tensor in memory at a time.

    Args:
      path: the file; its folder must exist.
      tensors: name → (format, shape), in the order of the file.
      read: returns the bits of a tensor by name.
      metadata: for the header.

    Raises:
      OSError: the folder is missing, the disk is full …; and the errors of ``read``. An existing file is then
        unchanged.
    """
    write_with_header(path, _header(tensors, metadata), {n: form for n, (form, _) in tensors.items()}, read)


def write_with_header(
    path: str | os.PathLike[str],
    text: bytes,
    forms: Mapping[str, NumberFormat],
    read: Callable[[str], np.ndarray],
) -> None:
    """As :func:`write_safetensors`, with the text of a header that describes these tensors, in their order."""

    def content(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, form in forms.items():
            file.write(np.ascontiguousarray(read(name)).astype(form.unsigned, copy=False).data)

    replace_file(path, content, clean=True)
