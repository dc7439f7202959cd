"""Codes of few bits in 32-bit words, as ``pack-quantized`` folders have them.

Code ``i`` of a row takes the bits from ``bits · i`` on, counted through the row's words from their lowest bit; it is
stored without a sign, ``2^(bits - 1)`` added.
"""

from __future__ import annotations

import numpy as np

from capibara.compress.codecs.fixed_storage import pack_nibbles

__all__ = ["pack_rows", "packed_width", "unpack_rows"]


def packed_width(length: int, bits: int) -> int:
    """Words of a row."""
    return -(-length * bits // 32)


def pack_rows(codes: np.ndarray, bits: int) -> np.ndarray:
    """int8 [rows, length] of four or eight bits as int32 [rows, words]."""
    shifted = (codes.astype(np.int16) + (1 << (bits - 1))).astype(np.uint8)
    raw = pack_nibbles(shifted) if bits == 4 else shifted
    raw = np.pad(raw, ((0, 0), (0, 4 * packed_width(codes.shape[1], bits) - raw.shape[1])))
    return np.ascontiguousarray(raw).view("<i4")


def unpack_rows(words: np.ndarray, bits: int, length: int) -> np.ndarray:
    """int32 [rows, words] as int8 [rows, length]."""
    raw = np.ascontiguousarray(words, "<i4").view(np.uint8)
    if bits in (4, 8):
        codes = raw if bits == 8 else np.stack([raw & 15, raw >> 4], axis=2).reshape(len(raw), -1)
        codes = codes[:, :length]
    else:
        flat = np.unpackbits(raw, axis=1, count=length * bits, bitorder="little")
        codes = np.packbits(flat.reshape(len(raw), length, bits), axis=2, bitorder="little")[..., 0]
    return (codes.astype(np.int16) - (1 << (bits - 1))).astype(np.int8)
