"""The number formats of GGUF: blocks of integers with scales, decoded with NumPy.

The layouts are those of ggml (``ggml-common.h``). ``_0`` formats have a scale per block, ``_1`` formats a scale and a
minimum; ``_K`` formats have blocks of 256 with scales of their own for runs of 16 or 32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from capibara.compress.formats import FORMATS, NumberFormat

__all__ = ["KINDS", "Kind"]


@dataclass(frozen=True)
class Kind:
    """A format of tensors.

    Attributes:
      name: as ggml has it. block: elements of a block. size: bytes of a block.
      plain: the number format, for those without blocks.
      decode: from uint8 [blocks, size] to float32 [blocks, block], for those with.
    """

    name: str
    block: int
    size: int
    plain: NumberFormat | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None


def _half(raw: np.ndarray, at: int) -> np.ndarray:
    """The float16 at a byte of each block, float32 [blocks, 1]."""
    return np.ascontiguousarray(raw[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(raw: np.ndarray) -> np.ndarray:
    """The lower halves of bytes [blocks, n], then the upper ones: [blocks, 2 n]."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: np.ndarray, at: int) -> np.ndarray:
    """16 or 0 for each of 32 elements, from four bytes with a bit for each."""
    return np.unpackbits(raw[:, at : at + 4], axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: np.ndarray) -> np.ndarray:
    return (_nibbles(raw[:, 2:]).astype(np.float32) - 8) * _half(raw, 0)


def _q4_1(raw: np.ndarray) -> np.ndarray:
    return _nibbles(raw[:, 4:]).astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def _q5_0(raw: np.ndarray) -> np.ndarray:
    codes = _nibbles(raw[:, 6:]) | _fifth_bits(raw, 2)
    return (codes.astype(np.float32) - 16) * _half(raw, 0)


def _q5_1(raw: np.ndarray) -> np.ndarray:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw, 4)
    return codes.astype(np.float32) * _half(raw, 0) + _half(raw, 2)


def _q8_0(raw: np.ndarray) -> np.ndarray:
    return raw[:, 2:].view(np.int8).astype(np.float32) * _half(raw, 0)


def _scales_of_k(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of eight runs, float32 [blocks, 8, 1], from twelve bytes of six bits each."""
    first, second, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = np.concatenate([first & 63, (high & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (high >> 4) | ((second >> 6) << 4)], axis=1)
    return (_half(raw, 0) * scales)[:, :, None], (_half(raw, 2) * minima)[:, :, None]


def _runs(raw: np.ndarray) -> np.ndarray:
    """Four-bit codes [blocks, 8, 32] of 128 bytes: each 32 bytes hold two runs, in lower and in upper halves."""
    groups = raw.reshape(len(raw), 4, 1, 32)
    return np.concatenate([groups & 15, groups >> 4], axis=2).reshape(len(raw), 8, 32)


def _q4_k(raw: np.ndarray) -> np.ndarray:
    scales, minima = _scales_of_k(raw)
    return (_runs(raw[:, 16:]) * scales - minima).reshape(len(raw), 256)


def _q5_k(raw: np.ndarray) -> np.ndarray:
    scales, minima = _scales_of_k(raw)
    # Bit j of a byte belongs to run j.
    high = (raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = _runs(raw[:, 48:]) | (high << np.uint8(4))
    return (codes * scales - minima).reshape(len(raw), 256)


def _q6_k(raw: np.ndarray) -> np.ndarray:
    low, high = raw[:, :128].reshape(-1, 2, 1, 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(len(raw), 2, 4, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = (low | (high << np.uint8(4))).astype(np.float32) - 32
    scales = raw[:, 192:208].view(np.int8).astype(np.float32) * _half(raw, 208)
    return (codes.reshape(len(raw), 16, 16) * scales[:, :, None]).reshape(len(raw), 256)


def _plain(name: str) -> Kind:
    form = FORMATS[name]
    return Kind(name, 1, form.bits // 8, form)


# By their numbers in a file.
KINDS: dict[int, Kind] = {
    0: _plain("F32"),
    1: _plain("F16"),
    2: Kind("Q4_0", 32, 18, decode=_q4_0),
    3: Kind("Q4_1", 32, 20, decode=_q4_1),
    6: Kind("Q5_0", 32, 22, decode=_q5_0),
    7: Kind("Q5_1", 32, 24, decode=_q5_1),
    8: Kind("Q8_0", 32, 34, decode=_q8_0),
    12: Kind("Q4_K", 256, 144, decode=_q4_k),
    13: Kind("Q5_K", 256, 176, decode=_q5_k),
    14: Kind("Q6_K", 256, 210, decode=_q6_k),
    28: _plain("F64"),
    30: _plain("BF16"),
}
