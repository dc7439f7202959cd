"""Entropy coding of symbols of up to eight bits."""

from __future__ import annotations

from capibara.compress.entropy.bits import BitReader, BitWriter, pack_bits, packed_size, planes, unpack_bits
from capibara.compress.entropy.frequencies import SCALE, SCALE_BITS, cost_in_bits, normalise
from capibara.compress.entropy.rans import BLOCK, LANES, Stream, decode, encode

__all__ = [
    "BLOCK",
    "LANES",
    "SCALE",
    "SCALE_BITS",
    "BitReader",
    "BitWriter",
    "Stream",
    "cost_in_bits",
    "decode",
    "encode",
    "normalise",
    "pack_bits",
    "packed_size",
    "planes",
    "unpack_bits",
]
