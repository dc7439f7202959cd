"""The search of :mod:`capibara.compress.codecs.fixed_search`, and decoding, in compiled code through ctypes.

The bytes are those of the other executors. Calls release Python's GIL, so several can run in parallel.
"""

from __future__ import annotations

import ctypes

import numpy as np

from capibara.compress.codecs.fixed_search import Kind, error_limits

__all__ = ["NativeExecutor"]

_NO_MEMORY = -2


class _Search(ctypes.Structure):
    # As fixed.h has it.
    _fields_ = (
        ("values", ctypes.c_void_p),
        ("groups", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
        ("book", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        ("largest", ctypes.c_double),
        *((name, ctypes.c_int32) for name in ("wide", "bits", "fraction", "both_signs")),
        *((name, ctypes.c_int32) for name in ("low", "high", "last", "cap", "shift")),
    )


class _Codes(ctypes.Structure):
    # As quantised.h has it.
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rows", "inner", "group", "width", "groups")),
        ("four", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "scale_codes", "table", "levels")),
    )


class _Product(ctypes.Structure):
    # As quantised.h has it.
    _fields_ = (
        ("matrix", _Codes),
        ("across", ctypes.c_bool),
        *((name, ctypes.c_int64) for name in ("count", "threads")),
        *((name, ctypes.c_void_p) for name in ("x", "out", "room")),
    )


def _address(array: np.ndarray | None) -> int | None:
    return None if array is None else array.ctypes.data


class NativeExecutor:
    """Compiled code.

    Args:
      library: with the functions of ``fixed.cc``.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._search = library.capibara_fixed_search
        self._search.argtypes, self._search.restype = (pointer,), ctypes.c_int32
        self._largest = library.capibara_fixed_largest
        self._largest.argtypes, self._largest.restype = (pointer, size, size, ctypes.c_int32, pointer), None
        self._decode = library.capibara_codes_decode
        self._decode.argtypes, self._decode.restype = (pointer, *(size,) * 4, ctypes.c_float, pointer), None

        self._multiply = library.capibara_codes_multiply
        self._multiply.argtypes, self._multiply.restype = (pointer,), ctypes.c_int32

    def largest(self, values: np.ndarray) -> np.ndarray:
        """The largest magnitude in each group, float64 [groups]; for finite float32 or float64 [groups, size]."""
        values = np.ascontiguousarray(values)
        out = np.empty(len(values), np.float64)
        self._largest(_address(values), *values.shape, values.dtype == np.float64, _address(out))
        return out

    def search(
        self, kind: Kind, book: np.ndarray | None, units: np.ndarray, scales: np.ndarray, ratios: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        raise NotImplementedError("compiled code does the whole search")

    def whole_search(
        self,
        kind: Kind,
        book: np.ndarray | None,
        values: np.ndarray,
        table: np.ndarray,
        resolution: int,
        last: int,
    ) -> tuple[np.ndarray, np.ndarray]:
        """As :func:`capibara.compress.codecs.fixed_search.search`; ``table`` float64: the scale of each scale code.

        Args:
          values: float32 or float64 [groups, size], finite.
        """
        wide = values.dtype == np.float64
        values = np.ascontiguousarray(values, np.float64 if wide else np.float32)
        table = np.ascontiguousarray(table, np.float64)
        book = None if book is None else np.ascontiguousarray(book, np.int32)
        chosen, codes = np.empty(len(values), np.uint8), np.empty(values.shape, np.int8)
        cap, shift = error_limits(kind, values.shape[1])
        low, high = kind.steps(resolution)
        task = _Search(
            _address(values), *values.shape, _address(table), _address(book), _address(chosen), _address(codes),
            kind.largest, wide, kind.bits, kind.fraction, kind.signed, low, high, last, (1 << cap) - 1, shift,
        )  # fmt: skip
        if self._search(ctypes.byref(task)) == _NO_MEMORY:
            raise MemoryError
        return chosen, codes

    def decode(
        self,
        codes: np.ndarray,
        scales: np.ndarray,
        levels: np.ndarray | None,
        group: int,
        length: int,
        rows: slice,
        columns: slice,
        top: np.float32,
    ) -> np.ndarray:
        """Decode a quantized matrix to float32 [rows, columns], clipped to ``±top``.

        Args:
          codes: int8 [rows, length], or uint8 [rows, ceil(length / 2)] with ``levels``.
          scales: float32 [rows, groups].
          levels: float32 [16], or ``None``.
          columns: from a multiple of 64 on.
        """
        arrays = [np.ascontiguousarray(a) for a in (codes, scales)]
        book = None if levels is None else np.ascontiguousarray(levels, np.float32)
        task = _Codes(
            len(codes), length, group, codes.shape[1], scales.shape[1], levels is not None,
            _address(arrays[0]), _address(arrays[1]), None, None, _address(book),
        )  # fmt: skip
        first, last, begin, end = rows.start, min(rows.stop, len(codes)), columns.start, columns.stop
        out = np.empty((last - first, end - begin), np.float32)
        self._decode(ctypes.byref(task), first, last, begin, end, top, _address(out))
        return out

    def multiply(
        self,
        x: np.ndarray,
        codes: np.ndarray,
        scale_codes: np.ndarray,
        table: np.ndarray,
        levels: np.ndarray | None,
        group: int,
        length: int,
        *,
        across: bool,
        threads: int,
    ) -> np.ndarray:
        """``x @ W.T`` [count, rows], or with ``across`` ``x @ W`` [count, length], for a quantized matrix; float32.

        Args:
          x: float32 [count, length], or ``across`` [count, rows]; like all arrays in C order.
          codes: int8 [rows, length], or uint8 [rows, ceil(length / 2)] with ``levels``; not empty.
          scale_codes: uint8 [rows, groups], indices into ``table``.
          table: float32 [256].
          levels: float32 [16], or ``None``.
        """
        rows = len(codes)
        out = np.empty((len(x), length if across else rows), np.float32)
        matrix = _Codes(
            rows, length, group, codes.shape[1], scale_codes.shape[1], levels is not None,
            _address(codes), None, _address(scale_codes), _address(table), _address(levels),
        )  # fmt: skip
        task = _Product(matrix, across, len(x), threads, _address(x), _address(out), None)
        if self._multiply(ctypes.byref(task)) == _NO_MEMORY:
            raise MemoryError
        return out
