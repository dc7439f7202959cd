"""The index of an archive, and its validation.

The layout of a ``.capi`` file, all values little-endian::

    magic "\\x89CAPI\\r\\n\\x1a" · version u32 · zero u32          16 bytes
    payloads of chunks, one after another
    index: UTF-8 JSON
    index offset u64 · index length u64 · CRC-32 of the index u32 · version u32 · "CAPI-END"     32 bytes

The index is at the end, so that a writer can stream. It is an object with ``metadata`` (strings to strings) and
``tensors``: for each its ``name``, ``dtype`` (as in safetensors), ``shape``, ``codec``, the codec's ``settings``, and
``chunks``. A chunk is a run of rows along the first axis (or a whole scalar), encoded independently: ``[rows, offset,
length, crc32]``. A second name of another tensor (tied weights) has ``same_as`` instead of chunks.

A tensor whose rows exceed the chunk size can have ``coded_as``: chunks are then runs of rows of a tensor of that
shape with the same elements in the same order; each row of the original is an integer number of its rows. A file with
such a tensor has version 2, all others version 1: a reader that only knows version 1 refuses the file by its version.

An index has at most 16 MiB and, after adding 4096 bytes, at least 32 bytes per object in it, 10 per list and 6 per
string: others are refused before parsing, so that the parsed index takes at most about 18 times as much memory.

An index is untrusted: names must be strings of bounded length, sizes must be consistent integers, chunks must be
inside the file in order without overlapping, and their rows must add up.
"""

from __future__ import annotations

import json
import math
import re
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from capibara.compress.errors import ArchiveError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat

__all__ = [
    "CHUNK",
    "MAGIC",
    "SUFFIX",
    "VERSION",
    "VERSION_CUT",
    "Chunk",
    "Entry",
    "check_name",
    "check_shape",
    "dump",
    "is_lean",
    "parse",
    "parse_footer",
    "version_of",
]

MAGIC = b"\x89CAPI\r\n\x1a"
SUFFIX = ".capi"
"""Of the names of archives."""
VERSION = 1
VERSION_CUT = 2  # of files in which rows are cut
HEADER = struct.Struct("<8sII")
FOOTER = struct.Struct("<QQII8s")
END = b"CAPI-END"
CHUNK = 1 << 24  # numbers of a chunk of several rows
_MOST_INDEX = 16 << 20  # bytes
# An index has at least so many bytes for each object, list and text: one that has fewer would become far more memory.
_OBJECT, _LIST, _STRING, _FREE = 32, 10, 6, 4096
_AT_ONCE = 1 << 20  # bytes that are counted
_MOST_NUMBERS = 1 << 48  # of one tensor
_MOST_SIZE = 1 << 62  # of an axis, in bytes, and so on
_NO_SHAPE = "a shape is at most 32 integers, none below 0"
_MOST_NAME = 4096  # characters
# A lone surrogate cannot be written anywhere, a control character acts on the terminal that shows it.
_STRANGE = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class Chunk(NamedTuple):
    """Rows of a tensor that are encoded together.

    Attributes:
      rows: how many, along the first axis; 1 for a scalar.
      offset: of the payload in the file.
      length: of the payload, in bytes.
      crc32: of the payload.
    """

    rows: int
    offset: int
    length: int
    crc32: int


@dataclass(frozen=True)
class Entry:
    """One tensor of an archive.

    Attributes:
      name: its key in the state dictionary.
      format: number format, once decoded.
      shape: once decoded.
      codec: the codec of the payloads.
      settings: what its decoder needs besides the payload.
      chunks: in order of rows.
      same_as: the name of the tensor that this one shares, or ``None``.
      coded_as: the shape along whose first axis it is split into chunks; ``None``: its own.
    """

    name: str
    format: NumberFormat
    shape: tuple[int, ...]
    codec: str
    settings: dict[str, Any] = field(default_factory=dict)
    chunks: tuple[Chunk, ...] = ()
    same_as: str | None = None
    coded_as: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def original_bytes(self) -> int:
        return self.count * self.format.bits // 8

    @property
    def coded_bytes(self) -> int:
        return sum(c.length for c in self.chunks)

    @property
    def coded_shape(self) -> tuple[int, ...]:
        """The shape whose rows the chunks consist of."""
        return self.shape if self.coded_as is None else self.coded_as

    def chunk_shape(self, chunk: Chunk) -> tuple[int, ...]:
        return (chunk.rows, *self.coded_shape[1:]) if self.shape else ()


def check_name(name: object) -> str | None:
    """The problem with the name of a tensor; ``None`` if it is valid."""
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_NAME:
        return f"a name has 1 to {_MOST_NAME} characters"
    if name == "__metadata__":
        return "'__metadata__' is not the name of a tensor"
    if _STRANGE.search(name):
        return "a name has no control characters and no halves of surrogate pairs"
    return None


def check_shape(shape: object) -> str | None:
    """The problem with a shape (a list or tuple); ``None`` if it is valid."""
    if not isinstance(shape, list | tuple) or len(shape) > 32:
        return _NO_SHAPE
    numbers = 1
    for n in shape:
        if type(n) is not int or not 0 <= n < _MOST_SIZE:
            return _NO_SHAPE
        numbers *= n or 1
    return None if numbers <= _MOST_NUMBERS else f"a tensor has at most {_MOST_NUMBERS} numbers"


def version_of(entries: Iterable[Entry]) -> int:
    """The oldest version of the format that supports these tensors."""
    return VERSION if all(e.coded_as is None for e in entries) else VERSION_CUT


def dump(entries: list[Entry], metadata: dict[str, str], offset: int) -> bytes:
    """The index and the footer."""
    tensors = []
    for e in entries:
        one: dict[str, Any] = {
            "name": e.name,
            "dtype": e.format.name,
            "shape": list(e.shape),
            "codec": e.codec,
        }
        if e.settings:
            one["settings"] = e.settings
        if e.coded_as is not None:
            one["coded_as"] = list(e.coded_as)
        if e.same_as is not None:
            one["same_as"] = e.same_as
        else:
            one["chunks"] = [[c.rows, c.offset, c.length, c.crc32] for c in e.chunks]
        tensors.append(one)
    text = json.dumps(
        {"metadata": metadata, "tensors": tensors}, separators=(",", ":"), allow_nan=False
    ).encode()
    if not is_lean(text):
        raise ArchiveError(
            "settings: too many objects and lists for their size. Remedy: settings with plain values."
        )
    if len(text) > _MOST_INDEX:
        raise ArchiveError(
            f"the index takes {len(text)} bytes, at most {_MOST_INDEX} are read back. Remedy: several files."
        )
    return text + FOOTER.pack(offset, len(text), zlib.crc32(text), version_of(entries), END)


def parse_footer(head: bytes, tail: bytes, size: int, path: object) -> tuple[int, int, int]:
    """Offset, length and checksum of the index."""
    if len(head) < HEADER.size or head[:8] != MAGIC:
        raise ArchiveError(f"{path}: not a .capi archive (it begins with {head[:8]!r})")
    version = HEADER.unpack(head)[1]
    if version not in (VERSION, VERSION_CUT):
        raise ArchiveError(
            f"{path}: format version {version}, this Capibara reads {VERSION} and {VERSION_CUT}. "
            "Remedy: a newer Capibara."
        )
    if size < HEADER.size + FOOTER.size or len(tail) != FOOTER.size or tail[-8:] != END:
        raise DamagedError(f"{path}: the file ends too early. Remedy: copy or write it again.")
    offset, length, crc, again, _ = FOOTER.unpack(tail)
    if (
        again != version
        or offset < HEADER.size
        or offset + length + FOOTER.size != size
        or length > _MOST_INDEX
    ):
        raise DamagedError(f"{path}: the footer does not fit the file of {size} bytes: it is damaged")
    return offset, length, crc


def parse(text: bytes, end: int, path: object, version: int = VERSION) -> tuple[dict[str, str], list[Entry]]:
    """Metadata and entries of an index whose payloads are before ``end``, in a file of that version.

    Raises:
      DamagedError: it is not what :func:`dump` writes.
    """
    if not is_lean(text):
        raise _damage(path, "more objects and lists than a writer makes")
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path}: the index is damaged ({error})") from None
    if not isinstance(index, dict) or set(index) != {"metadata", "tensors"}:
        raise _damage(path, "its keys")
    metadata, tensors = index["metadata"], index["tensors"]
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _damage(path, "metadata is not text")
    if not isinstance(tensors, list):
        raise _damage(path, "no list of tensors")
    entries: dict[str, Entry] = {}
    keys = {"name", "dtype", "shape", "codec", "settings", "chunks", "same_as"}
    if version == VERSION_CUT:
        keys.add("coded_as")
    at = HEADER.size
    for tensor in tensors:
        at, wrong = _add(entries, tensor, keys, at, end)
        if wrong is not None:
            name = tensor.get("name") if isinstance(tensor, dict) else None
            raise _damage(path, wrong.replace("…", repr(name)))
    if at != end:
        raise _damage(path, "bytes that belong to no tensor")
    return metadata, list(entries.values())


def _damage(path: object, what: str) -> DamagedError:
    return DamagedError(f"{path}: the index is damaged ({what})")


def _add(entries: dict[str, Entry], t: Any, keys: set[str], at: int, end: int) -> tuple[int, str | None]:
    """Adds a tensor of an index, the payloads of which begin at ``at``: where they end, and what is wrong with it.

    Opening a file is mostly this, so no text is made and no function called for what is as it should be.
    """
    if not isinstance(t, dict):
        return at, "a tensor is not an object"
    if not t.keys() <= keys:
        return at, "a tensor's keys"
    name, dtype, shape, codec = t.get("name"), t.get("dtype"), t.get("shape"), t.get("codec")
    if check_name(name) is not None or name in entries:
        return at, "a tensor's name"
    assert isinstance(name, str)
    form = FORMATS.get(dtype) if isinstance(dtype, str) else None
    if form is None:
        return at, "dtype of …"
    if not isinstance(codec, str) or len(codec) > 64:
        return at, "codec of …"
    settings, chunks = t.get("settings", {}), t.get("chunks")
    if not isinstance(settings, dict):
        return at, "settings of …"
    if not isinstance(shape, list) or check_shape(shape) is not None:
        return at, "shape of …"
    if (same_as := t.get("same_as")) is not None:
        tied = entries.get(same_as) if isinstance(same_as, str) else None
        if tied is None or chunks is not None or "coded_as" in t:
            return at, "what … is the same as"
        if tied.same_as is not None or (tied.format, tied.shape) != (form, tuple(shape)):
            return at, "the tensor tied to …"
        entries[name] = Entry(name, form, tuple(shape), codec, settings, (), same_as)
        return at, None
    if not isinstance(chunks, list):
        return at, "chunks of …"
    cut = shape
    if "coded_as" in t:
        cut = t["coded_as"]
        if not isinstance(cut, list) or check_shape(cut) is not None:
            return at, "what … is coded as"
        count, length = math.prod(shape), math.prod(cut[1:])
        if not (count and cut and math.prod(cut) == count and math.prod(shape[1:]) % length == 0):
            return at, "what … is coded as"
    rows, each, read = 0, math.prod(cut[1:]), []
    for c in chunks:
        if not isinstance(c, list) or len(c) != 4:
            return at, "a chunk of …"
        for n in c:
            if type(n) is not int or not 0 <= n < _MOST_SIZE:
                return at, "a chunk of …"
        chunk = Chunk(*c)
        if chunk.offset != at or at + chunk.length > end:
            return at, "where a chunk of … lies"
        at += chunk.length
        # The writer makes none such; it bounds what a small payload may claim to become.
        if chunk.rows * each > CHUNK and (chunk.rows > 1 or cut is not shape):
            return at, "the size of a chunk of …"
        rows += chunk.rows
        read.append(chunk)
    total = cut[0] if cut else 1
    if rows != total or (total and not all(c.rows for c in read)):
        return at, "rows of …"
    if not read:
        return at, "chunks of …"
    cut_as = None if cut is shape else tuple(cut)
    entries[name] = Entry(name, form, tuple(shape), codec, settings, tuple(read), None, cut_as)
    return at, None


def is_lean(text: bytes | bytearray, *, strings: bool = True) -> bool:
    """Whether so few bytes hold so few things that parsing them takes a bounded multiple of their size."""
    size = len(text) + _FREE

    def few(objects: int, lists: int, texts: int) -> bool:
        return max(objects * _OBJECT, lists * _LIST, texts * _STRING if strings else 0) <= size

    objects, lists = text.count(b"{"), text.count(b"[")
    return few(objects, lists, text.count(b'"') // 2) or few(*_counted(text))


def _counted(text: bytes | bytearray) -> tuple[int, int, int]:
    """Objects, lists and strings of a JSON text; what stands in strings is none of them.

    Of a text that is not JSON this holds up to the place where parsing ends.
    """
    if b"\\" in text:  # escaped quotes do not end a string
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    objects, lists, quotes = 0, 0, 0
    for at in range(0, len(text), _AT_ONCE):
        part = np.frombuffer(text, np.uint8, min(_AT_ONCE, len(text) - at), at)
        quote = part == ord('"')
        outside = np.logical_xor.accumulate(quote) == bool(quotes % 2)
        objects += int(np.count_nonzero(outside & (part == ord("{"))))
        lists += int(np.count_nonzero(outside & (part == ord("["))))
        quotes += int(np.count_nonzero(quote))
    return objects, lists, quotes // 2
