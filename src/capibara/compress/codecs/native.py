"""The lossless codec's steps in compiled code, through ctypes: neither JAX nor PyTorch is needed.

The library is the one that attention's kernels are in (``python -m capibara.native`` builds it). The calls let go
of Python's lock, so blocks and groups go over the processor's cores.
"""

from __future__ import annotations

import ctypes
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np

from capibara.compress.codecs.cut import Cut
from capibara.compress.entropy import LANES, SCALE_BITS, Stream, packed_size
from capibara.compress.errors import DamagedError

__all__ = ["NativeExecutor"]


class _Cut(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "shift", "symbol_bits", "sign", "drop")),
    )


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="capibara-codec")


# Threads do not survive a fork: a child that inherited the pool would wait for them for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def _each(work: Callable[[int], Any], count: int, size: int) -> list[Any]:
    """``work`` of 0 to count - 1, over the cores if it is about enough numbers to be worth waking them."""
    if count == 1 or size < 1 << 17:
        return [work(i) for i in range(count)]
    return list(_pool().map(work, range(count)))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class NativeExecutor:
    """Compiled code, if the library is there.

    Args:
      library: with the functions of ``codec.cc``.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.capibara_codec_split.restype = ctypes.c_int64
        library.capibara_codec_join.restype = ctypes.c_int64
        library.capibara_codec_encode.restype = ctypes.c_int64
        library.capibara_codec_decode.restype = ctypes.c_int32

    @staticmethod
    def _cut(rows: np.ndarray, cut: Cut, drop: int = 0, first: int = 0) -> Any:
        if not rows.flags.c_contiguous:
            raise ValueError("rows: expected an array in C order")
        at = rows.ctypes.data + first * rows.shape[1] * rows.itemsize
        return ctypes.byref(_Cut(at, rows.shape[1], rows.itemsize, cut.shift, cut.symbol, cut.sign, drop))

    @staticmethod
    def _parts(rows: np.ndarray) -> list[tuple[int, int]]:
        """Rows for each core, where there is enough to share."""
        count = min(os.cpu_count() or 1, max(rows.size >> 16, 1), max(len(rows), 1))
        edges = [len(rows) * i // count for i in range(count + 1)]
        return list(itertools.pairwise(edges))

    def measure(self, rows: np.ndarray, cut: Cut, coarse: int) -> tuple[np.ndarray, np.ndarray]:
        sums, ors = np.empty(len(rows), np.int64), np.empty(len(rows), np.uint64)
        parts = self._parts(rows)

        def work(i: int) -> None:
            first, last = parts[i]
            where = self._cut(rows, cut, first=first)
            self._library.capibara_codec_measure(
                where, ctypes.c_int64(last - first), coarse, _pointer(sums[first:]), _pointer(ors[first:])
            )

        _each(work, len(parts), rows.size)
        return sums, ors

    def histogram(self, rows: np.ndarray, cut: Cut, kinds: np.ndarray, count: int) -> np.ndarray:
        kinds = np.ascontiguousarray(kinds, np.uint8)
        parts = self._parts(rows)

        def work(i: int) -> np.ndarray:
            first, last = parts[i]
            out = np.zeros((count, 1 << cut.symbol), np.int64)
            where = self._cut(rows, cut, first=first)
            self._library.capibara_codec_histogram(
                where, ctypes.c_int64(last - first), _pointer(kinds[first:]), _pointer(out)
            )
            return out

        return np.sum(_each(work, len(parts), rows.size), axis=0)

    def split(
        self, rows: np.ndarray, chosen: np.ndarray, cut: Cut, drop: int, entry: np.ndarray, escape: int
    ) -> tuple[np.ndarray, bytes, np.ndarray]:
        chosen, entry = np.ascontiguousarray(chosen, np.int64), np.ascontiguousarray(entry, np.uint8)
        count = len(chosen) * rows.shape[1]
        symbols, planes = np.empty(count, np.uint8), np.empty(packed_size(count, cut.width(drop)), np.uint8)
        # Written only where they occur: the pages of the rest are never touched.
        escaped = np.empty(count, np.uint16)
        found = self._library.capibara_codec_split(
            self._cut(rows, cut, drop), _pointer(chosen), ctypes.c_int64(len(chosen)), _pointer(entry), escape,
            _pointer(symbols), _pointer(planes), _pointer(escaped),
        )  # fmt: skip
        return symbols, planes.tobytes(), escaped[:found].copy()

    def join(
        self,
        out: np.ndarray,
        chosen: np.ndarray,
        cut: Cut,
        drop: int,
        values: np.ndarray,
        symbols: np.ndarray,
        rest: np.ndarray,
        escaped: np.ndarray,
    ) -> None:
        chosen, escaped = np.ascontiguousarray(chosen, np.int64), np.ascontiguousarray(escaped, np.uint16)
        table = np.zeros(256, np.uint64)
        table[: len(values)] = values
        if (
            len(rest) != packed_size(len(symbols), cut.width(drop))
            or len(symbols) != len(chosen) * out.shape[1]
        ):
            raise DamagedError("packed bits of another length than expected: the file is damaged")
        found = self._library.capibara_codec_join(
            self._cut(out, cut, drop), _pointer(out), _pointer(chosen), ctypes.c_int64(len(chosen)), _pointer(table),
            len(values), _pointer(symbols), _pointer(rest), _pointer(escaped), ctypes.c_int64(len(escaped)),
            ctypes.c_uint64(cut.base & ((1 << 64) - 1)),
        )  # fmt: skip
        if found != len(escaped):
            raise DamagedError(
                "a block holds another number of escapes than its header says: the file is damaged"
            )

    def encode(
        self, symbols: Sequence[np.ndarray], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[Stream]:
        frequency = np.zeros((len(frequencies), 256), np.uint16)
        frequency[:, : frequencies.shape[1]] = frequencies
        start = (np.cumsum(frequency, axis=1) - frequency).astype(np.uint16)

        def work(i: int) -> Stream:
            block, states = np.ascontiguousarray(symbols[i]), np.empty(LANES, np.uint32)
            words = np.empty(len(block) + 1, np.uint16)
            count = self._library.capibara_codec_encode(
                _pointer(block), ctypes.c_int64(len(block)), _pointer(frequency[tables[i]]),
                _pointer(start[tables[i]]), _pointer(states), ctypes.c_void_p(words.ctypes.data + words.nbytes),
            )  # fmt: skip
            if count < 0:
                raise ValueError("symbols: one occurs whose frequency is 0")
            return Stream(states, words[len(words) - count :])

        return _each(work, len(symbols), sum(map(len, symbols)))

    def decode(
        self, streams: Sequence[Stream], counts: Sequence[int], frequencies: np.ndarray, tables: Sequence[int]
    ) -> list[np.ndarray]:
        frequency = np.asarray(frequencies, np.int64)
        start = np.cumsum(frequency, axis=1) - frequency
        symbol = np.repeat(np.tile(np.arange(frequency.shape[1]), len(frequency)), frequency.ravel())
        rows = np.arange(len(frequency)).repeat(1 << SCALE_BITS)
        within = np.tile(np.arange(1 << SCALE_BITS), len(frequency)) - start[rows, symbol]
        table = (symbol | (frequency[rows, symbol] - 1) << 8 | within << 20).astype(np.uint32)
        table = table.reshape(len(frequency), -1)

        def work(i: int) -> np.ndarray:
            states, words = (np.ascontiguousarray(x) for x in streams[i])
            out = np.empty(counts[i], np.uint8)
            if self._library.capibara_codec_decode(
                _pointer(states), _pointer(words), ctypes.c_int64(len(words)), _pointer(table[tables[i]]),
                _pointer(out), ctypes.c_int64(counts[i]),
            ):  # fmt: skip
                raise DamagedError("a block of coded symbols does not come out even: the file is damaged")
            return out

        return _each(work, len(streams), sum(counts))
