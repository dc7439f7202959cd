"""The header of a GGUF file: metadata, and where its tensors are.

A file from outside is untrusted: every count, length and offset is compared with the size of the file before it is
used, so that damage costs an error and never memory. The format: the magic, the version, the numbers of tensors and of
keys; each key with its type and value; each tensor's name, shape, format and offset; the bytes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from capibara.compress.container.file_bytes import FileBytes
from capibara.compress.errors import ArchiveError
from capibara.families.errors import FamilyError
from capibara.families.gguf.blocks import KINDS, Kind
from capibara.families.gguf.metadata import value_of

__all__ = ["GgufFile", "GgufTensor", "is_gguf"]

_MAGIC = b"GGUF"
_MOST_HEADER = 512 << 20  # bytes
_MOST_TENSORS, _MOST_KEYS, _MOST_TEXTS = 1 << 20, 1 << 16, 1 << 22
_MOST_NAME, _MOST_KEY = 256, 65_535  # bytes
_MOST_DIMENSIONS = 4
_CHUNK = 1 << 20

_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_BOOL, _STRING, _ARRAY = 7, 8, 9
# Formats of ggml that are not decoded here, for messages.
_OTHERS = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
}
_OTHERS |= {20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64"}
_OTHERS |= {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}


def is_gguf(path: str | os.PathLike[str]) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return Path(path).suffix.lower() == ".gguf"


@dataclass(frozen=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
      kind: its format. shape: rows first, as NumPy has it.
      start, end: its bytes in the file.
    """

    kind: Kind
    shape: tuple[int, ...]
    start: int
    end: int


class GgufFile:
    """A GGUF file open for reading; use it as a context manager.

    Args:
      path: the file.

    Attributes:
      version: of the format, 2 or 3.
      metadata: key → an integer, float, boolean, string, NumPy array, or list of strings. A float32 is the shortest
        decimal number that rounds to it.
      tensors: name → :class:`GgufTensor`, in order of their bytes.

    Raises:
      FamilyError: not such a file, a damaged one, or one part of several.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = FileBytes(self.path)
        except OSError as error:
            raise FamilyError(f"{self.path}: {error.strerror or error}. Expected a GGUF file") from None
        try:
            self._read()
        except ArchiveError as error:
            self.close()
            raise FamilyError(str(error)) from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self) -> None:
        cursor = _Cursor(self._file)
        if cursor.take(4) != _MAGIC:
            raise FamilyError(
                f"{self.path}: is not a GGUF file: it does not begin with the letters GGUF. Remedy: get the file again"
            )
        self.version = cursor.number("<u4")
        if self.version not in (2, 3):
            old = "a file of 2023" if self.version == 1 else "perhaps of a big-endian machine"
            raise FamilyError(
                f"{self.path}: has version {self.version} of GGUF ({old}), expected 2 or 3. Remedy: convert it with "
                "llama.cpp"
            )
        tensors = cursor.count(_MOST_TENSORS, 24, "tensors")
        keys = cursor.count(_MOST_KEYS, 13, "keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = cursor.text(_MOST_KEY)
            if key in self.metadata:
                raise cursor.damage(f"has the key {key!a:.80} twice")
            self.metadata[key] = cursor.value(key)
        found = [_tensor_info(cursor) for _ in range(tensors)]
        alignment = value_of(self.metadata, "general.alignment", int, self.path)
        alignment = 32 if alignment is None else alignment
        if not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise cursor.damage(f"has general.alignment {alignment}, expected a power of 2 from 8 to 1048576")
        begin = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, GgufTensor] = {}
        last = begin
        for name, shape, kind, offset in sorted(found, key=lambda one: one[3]):
            start = begin + offset
            end = start + math.prod(shape) // kind.block * kind.size
            if offset % alignment or start < last or end > self._file.size:
                raise cursor.damage(
                    f"does not hold {name!a:.80} where its header says: bytes {start} to {end}"
                )
            if name in self.tensors:
                raise cursor.damage(f"has the tensor {name!a:.80} twice")
            self.tensors[name] = GgufTensor(kind, shape, start, end)
            last = end
        parts = value_of(self.metadata, "split.count", int, self.path)
        if parts not in (None, 0, 1):
            raise FamilyError(
                f"{self.path}: is one of {parts} files. Remedy: join them with llama-gguf-split --merge"
            )

    def read(self, name: str, first: int, last: int) -> np.ndarray:
        """Elements ``first … last - 1`` of a tensor as it is stored; of whole blocks.

        Returns:
          The bits [last - first] of a plain format; uint8 [blocks, size] of one with blocks.
        """
        tensor = self.tensors[name]
        kind = tensor.kind
        start, end = (tensor.start + one // kind.block * kind.size for one in (first, last))
        room = np.empty(end - start, np.uint8)
        self._file.read_into(room, start)
        return room.view(kind.plain.unsigned) if kind.plain else room.reshape(-1, kind.size)

    def values(self, name: str, first: int, last: int) -> np.ndarray:
        """As :meth:`read`, decoded: float32 [last - first] of a format with blocks, otherwise the bits.

        Blocks may be cut: those that hold the elements are decoded.
        """
        kind = self.tensors[name].kind
        if kind.decode is None:
            return self.read(name, first, last)
        out = np.empty(last - first, np.float32)
        step = max((1 << 18) // kind.block, 1) * kind.block  # what is computed on the way stays small
        begin = first // kind.block * kind.block
        for at in range(begin, last, step):
            end = min(at + step, -(-last // kind.block) * kind.block)
            with np.errstate(over="ignore", invalid="ignore"):
                block = kind.decode(self.read(name, at, end)).reshape(-1)
            low, high = max(at, first), min(end, last)
            out[low - first : high - first] = block[low - at : high - at]
        return out


def _tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], Kind, int]:
    name = cursor.text(_MOST_NAME)
    rank = cursor.number("<u4")
    if not 1 <= rank <= _MOST_DIMENSIONS:
        raise cursor.damage(f"has {name!a:.80} with {rank} dimensions, expected 1 to {_MOST_DIMENSIONS}")
    sizes = [cursor.number("<u8") for _ in range(rank)]
    number, offset = cursor.number("<u4"), cursor.number("<u8")
    if (kind := KINDS.get(number)) is None:
        raise FamilyError(
            f"{cursor.path}: {name!a:.80} is stored as {_OTHERS.get(number, f'format {number}')}, expected one of "
            f"{', '.join(one.name for one in KINDS.values())}. Remedy: a file of another quantization"
        )
    if not all(0 < size < 1 << 40 for size in sizes) or sizes[0] % kind.block:
        raise cursor.damage(f"has {name!a:.80} with the shape {sizes[::-1]} in {kind.name}")
    if math.prod(sizes) // kind.block * kind.size > cursor.size or offset > cursor.size:
        raise cursor.damage(f"is smaller than its tensor {name!a:.80}")
    return name, tuple(sizes[::-1]), kind, offset


class _Cursor:
    """Reads a header from the front."""

    def __init__(self, file: FileBytes) -> None:
        self._file, self.path = file, file.path
        self.size = file.size
        self.at = 0
        self._buffer, self._begin = b"", 0
        self._texts = 0  # in all arrays: as Python's strings short ones take many times their bytes

    def damage(self, what: str) -> FamilyError:
        return FamilyError(f"{self.path}: {what}. Remedy: get the file again")

    def take(self, size: int) -> bytes:
        if size > min(self.size, _MOST_HEADER) - self.at:
            raise self.damage("ends before its header does, or is damaged")
        start = self.at - self._begin
        if start + size > len(self._buffer):
            self._buffer = bytes(self._file.read(self.at, min(max(size, _CHUNK), self.size - self.at)))
            self._begin, start = self.at, 0
        self.at += size
        return self._buffer[start : start + size]

    def number(self, kind: str) -> int:
        return int.from_bytes(self.take(int(kind[2])), "little")

    def count(self, most: int, least_bytes: int, what: str) -> int:
        """A number of things, each of which takes at least so many bytes of the file."""
        found = self.number("<u8")
        if found > min(most, self.size // least_bytes):
            raise self.damage(f"declares {found} {what}, more than fit in the file")
        return found

    def text(self, most: int) -> str:
        size = self.number("<u8")
        if size > most:
            raise self.damage(f"has a name of {size} bytes, expected at most {most}")
        return self._decoded(self.take(size))

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise self.damage(f"has a text that is not UTF-8 ({error.reason})") from None

    def _string(self) -> str:
        return self._decoded(self.take(self.number("<u8")))

    def value(self, key: str) -> Any:
        kind = self.number("<u4")
        if kind == _STRING:
            return self._string()
        if kind == _BOOL:
            return bool(self.number("<u1"))
        if kind in _NUMBERS:
            (found,) = self._numbers(kind, 1)
            return float(str(found)) if kind == 6 else found.item()
        if kind != _ARRAY:
            raise self.damage(f"has {key!a:.80} of the unknown type {kind}")
        inner = self.number("<u4")
        if inner == _STRING:
            texts = self.count(_MOST_TEXTS - self._texts, 8, f"texts in {key!a:.80}")
            self._texts += texts
            return [self._string() for _ in range(texts)]
        if inner == _BOOL:
            return self._numbers(0, self.count(_MOST_HEADER, 1, f"elements in {key!a:.80}")).astype(bool)
        if inner not in _NUMBERS:
            raise self.damage(f"has {key!a:.80} with elements of the unknown type {inner}")
        size = int(_NUMBERS[inner][2])
        return self._numbers(inner, self.count(_MOST_HEADER, size, f"elements in {key!a:.80}"))

    def _numbers(self, kind: int, count: int) -> np.ndarray:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)
