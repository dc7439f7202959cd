"""Integers in few bits: small headers by a prefix code, and bit planes of fixed-width fields."""

from __future__ import annotations

import numpy as np

from capibara.compress.errors import DamagedError

__all__ = ["BitReader", "BitWriter", "pack_bits", "packed_size", "planes", "unpack_bits"]


class BitWriter:
    """Writes integers one after another, lowest bit first; for headers of a few hundred integers."""

    def __init__(self) -> None:
        self._value, self._length = 0, 0
        self._done = bytearray()

    def write(self, value: int, width: int) -> None:
        """``value`` in exactly ``width`` bits."""
        if value < 0 or value >> width:
            raise ValueError(f"value: got {value}, expected 0 to {(1 << width) - 1} for {width} bits")
        self._value |= value << self._length
        self._length += width
        while self._length >= 8:
            self._done.append(self._value & 255)
            self._value >>= 8
            self._length -= 8

    def write_gamma(self, value: int) -> None:
        """Any ``value`` ≥ 0 in about 2 log₂(value + 1) + 1 bits (Elias's gamma code)."""
        width = (value + 1).bit_length()
        self.write(1 << (width - 1), width)
        self.write((value + 1) & ((1 << (width - 1)) - 1), width - 1)

    def finish(self) -> bytes:
        """The written bits, padded to a whole byte with zeros."""
        rest = bytes([self._value]) if self._length else b""
        return bytes(self._done) + rest


class BitReader:
    """Reads the output of :class:`BitWriter`.

    Raises:
      DamagedError: by its methods, if the data ends too early or is invalid.
    """

    def __init__(self, data: bytes) -> None:
        self._value, self._left = int.from_bytes(data, "little"), len(data) * 8

    def read(self, width: int) -> int:
        if width > self._left:
            raise DamagedError("the header of a tensor ends too early: the file is damaged")
        value = self._value & ((1 << width) - 1)
        self._value >>= width
        self._left -= width
        return value

    def read_gamma(self) -> int:
        zeros = 0
        while self.read(1) == 0:
            zeros += 1
            if zeros > 48:
                raise DamagedError("the header of a tensor holds a number too large: the file is damaged")
        return ((1 << zeros) | self.read(zeros)) - 1

    def finish(self) -> None:
        """Check that only the padding of the last byte is left."""
        if self._left >= 8 or self._value:
            raise DamagedError("the header of a tensor is longer than it states: the file is damaged")


# A field of r bits is cut into planes of these widths, from the top: each packs into bytes without crossing one.
_WIDTHS = (32, 16, 8, 4, 2, 1)


def planes(width: int) -> list[tuple[int, int]]:
    """(width, shift) of each plane of a field of ``width`` bits."""
    found, left = [], width
    for size in _WIDTHS:
        while left >= size:
            left -= size
            found.append((size, left))
    return found


def packed_size(count: int, width: int) -> int:
    """Size in bytes of ``count`` fields packed by :func:`pack_bits`."""
    return sum((count * size + 7) // 8 for size, _ in planes(width))


def pack_bits(values: np.ndarray, width: int) -> bytes:
    """Fields of ``width`` bits, plane by plane.

    Args:
      values: unsigned [count]; bits above ``width`` are 0.
      width: 0 to 64.
    """
    parts = []
    for size, shift in planes(width):
        # Not through a wider type than needed: this is most of the bytes of a file.
        plane = (values >> values.dtype.type(shift)) if shift else values
        if size >= 8:
            parts.append(plane.astype(f"<u{size // 8}").tobytes())
            continue
        plane = plane.astype(np.uint8) & np.uint8((1 << size) - 1)
        each = 8 // size
        if rest := -len(plane) % each:
            plane = np.concatenate([plane, np.zeros(rest, np.uint8)])
        packed = np.zeros(len(plane) // each, np.uint8)
        for i in range(each):
            packed |= plane[i::each] << np.uint8(i * size)
        parts.append(packed.tobytes())
    return b"".join(parts)


def unpack_bits(data: np.ndarray, count: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Unpack fields packed by :func:`pack_bits`.

    Args:
      data: uint8 [packed_size(count, width)].
      dtype: the unsigned type of the result, of at least ``width`` bits.
    """
    if len(data) != packed_size(count, width):
        raise DamagedError(f"packed bits: {len(data)} bytes where {packed_size(count, width)} are expected")
    out, at = np.zeros(count, dtype), 0
    for size, shift in planes(width):
        length = (count * size + 7) // 8
        part = data[at : at + length]
        at += length
        if size >= 8:
            plane = np.frombuffer(part.tobytes(), f"<u{size // 8}").astype(dtype)
        else:
            each = 8 // size
            plane = np.empty(length * each, np.uint8)
            for i in range(each):
                plane[i::each] = (part >> np.uint8(i * size)) & np.uint8((1 << size) - 1)
            plane = plane[:count].astype(dtype)
        out |= plane << dtype.type(shift)
    return out
