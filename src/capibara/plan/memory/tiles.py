"""The memory of an array on a TPU: tiles of (8, 128) elements in its last two dimensions.

The compiler stores an array in tiles of eight rows of 128 elements (four, two or one row if the dimension is that
small). It chooses the last two dimensions so that little is wasted: ``float32[4, 96, 3, 64]`` is stored as ``[4, 3,
64, 96 → 128]``. Two-byte elements are stored in pairs in the same tiles. Every buffer begins at a multiple of 512
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["LANES", "padded_bytes", "padded_rows"]

LANES = 128
"""Elements of a row of a tile."""
_ROWS = 8
_SMALLEST = 512


def padded_bytes(shape: Sequence[int], item_size: int) -> int:
    """Bytes of an array, including the padding to tiles.

    Args:
      shape: of the part that one device has.
      item_size: bytes per element.
    """
    sizes = [n for n in shape if n != 1]
    if 0 in sizes:
        return 0
    if not sizes:
        return _SMALLEST
    if len(sizes) == 1:
        # One line of an array is padded to 128 numbers; a vector longer than a tile, to whole tiles.
        line = LANES * max(1, 4 // item_size)
        unit = line * _ROWS if len(shape) == 1 and sizes[0] > line * _ROWS else line
        return _whole(_up(sizes[0], unit) * item_size)
    count = math.prod(sizes)
    least = min(
        count // (sizes[i] * sizes[j]) * _up(sizes[i], LANES) * _rows(sizes[j])
        for i in range(len(sizes))
        for j in range(len(sizes))
        if i != j
    )
    return _whole(least * item_size)


def padded_rows(shape: tuple[int, ...], item_size: int) -> int:
    """Bytes of a matrix whose rows lie in tiles one after another, whatever padding that needs."""
    *outer, rows, columns = shape
    return _whole(math.prod(outer) * _rows(rows) * _up(columns, LANES) * item_size)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _rows(size: int) -> int:
    if size >= _ROWS:
        return _up(size, _ROWS)
    return 1 << (size - 1).bit_length()


def _whole(size: int) -> int:
    return _up(size, _SMALLEST)
