"""Eight-bit and four-bit codes as bytes."""

from __future__ import annotations

import numpy as np

from capibara.compress.codecs import lossless
from capibara.compress.codecs.fixed_search import Kind
from capibara.compress.errors import DamagedError
from capibara.compress.formats import get_format

__all__ = ["Cursor", "load_codes", "pack_nibbles", "store_codes"]

_BLOCK = 1 << 18  # codes that are packed at a time


class Cursor:
    """Reads bytes from the front; reading past the end is a DamagedError."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self._at:
            raise DamagedError("a tensor's payload ends too early: the file is damaged")
        self._at += size
        return self._data[self._at - size : self._at]

    def rest(self) -> memoryview:
        return self._data[self._at :]


def store_codes(out: np.ndarray, at: int, codes: np.ndarray, kind: Kind, coded: bool) -> int:
    """Store codes int8 [rows, length] as bytes of ``out`` from ``at`` on; returns the end.

    The codes may themselves be in ``out``, not before ``at``.
    """
    if coded:
        shift = np.int8(8 if kind.name == "int4" else 0)
        form = get_format("I8" if kind.bits == 8 else "U8")
        flat = np.ascontiguousarray(codes + shift if shift else codes).view(np.uint8).reshape(-1)
        payload = lossless.encode(flat, form, codes.shape)
        out.data[at : at + len(payload)] = payload
        return at + len(payload)
    width = codes.shape[1] if kind.bits == 8 else -(-codes.shape[1] // 2)
    step = max(_BLOCK // max(codes.shape[1], 1), 1)
    for first in range(0, len(codes), step):
        # A block is read before bytes are written, which end before the next one begins.
        block = codes[first : first + step].copy()
        if kind.bits == 8:
            packed = block.view(np.uint8)
        else:
            packed = pack_nibbles((block + np.int8(8 if kind.name == "int4" else 0)).view(np.uint8))
        out[at : at + packed.size] = packed.reshape(-1)
        at += len(block) * width
    return at


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """uint8 [rows, length] below 16 as uint8 [rows, ceil(length / 2)], the first of two in the lower half."""
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))


def load_codes(data: memoryview, kind: Kind, coded: bool, rows: int, length: int) -> np.ndarray:
    shape = (rows, length)
    if coded:
        form = get_format("I8" if kind.bits == 8 else "U8")
        found = lossless.decode(data, form, shape).reshape(shape)
        if kind.bits == 8:
            return found.view(np.int8)
        if found.size and int(found.max()) > 15:
            raise DamagedError("a code is out of range: the file is damaged")
        return pack_nibbles(found)
    width = length if kind.bits == 8 else -(-length // 2)
    if len(data) != rows * width:
        raise DamagedError(f"{rows} rows of {length} codes have {len(data)} bytes: the file is damaged")
    found = np.frombuffer(data, np.int8 if kind.bits == 8 else np.uint8)
    return found.reshape(rows, width)
