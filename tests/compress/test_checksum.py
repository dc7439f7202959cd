"""The compiled checksum is zlib's."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from capibara.compress.container.checksum import crc32


@pytest.mark.parametrize("size", [0, 1, 100, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 40_000, 100_015, 1 << 20])
def test_any_length_and_place(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size + 3, dtype=np.uint8).tobytes()
    for begin in (0, 3):
        part = memoryview(data)[begin : begin + size]
        assert crc32(part) == zlib.crc32(part)
        assert crc32(bytes(part)) == zlib.crc32(part)
