"""Tensors that are decoded when they are read, by whole entries of their first dimension: rows, or matrices."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

__all__ = ["Entries"]


class Entries:
    """A decoded tensor's elements in one dimension, read by slices that are not empty and may cut entries.

    Args:
      decode: gives entries ``first … last - 1``, in any shape; errors of a slice are those of this function.
      shape: of the tensor; a scalar is one entry.
    """

    def __init__(self, decode: Callable[[int, int], np.ndarray], shape: tuple[int, ...]) -> None:
        self._decode = decode
        self._size = max(math.prod(shape[1:]), 1)
        self._cut: tuple[int, np.ndarray] | None = None  # the last entry that was cut, whole

    def __getitem__(self, part: slice) -> np.ndarray:
        size, at, parts = self._size, part.start, []
        while at < part.stop:
            entry, skipped = divmod(at, size)
            if not skipped and part.stop - at >= size:
                end = part.stop // size * size
                parts.append(self._decode(entry, end // size).reshape(-1))
            else:
                # A copy: whoever keeps a part of an entry does not keep all of it.
                end = min((entry + 1) * size, part.stop)
                parts.append(self._whole(entry)[skipped : skipped + end - at].copy())
            at = end
        return np.concatenate(parts) if parts[1:] else parts[0]

    def _whole(self, entry: int) -> np.ndarray:
        """An entry of which a part is read: the next slice often has the next part."""
        if self._cut is None or self._cut[0] != entry:
            self._cut = None  # before another one takes memory
            self._cut = entry, self._decode(entry, entry + 1).reshape(-1)
        return self._cut[1]
