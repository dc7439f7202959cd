"""Matrices transposed in host memory, against NumPy's own copies."""

from __future__ import annotations

import os
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.native import transposed
from capibara.native.transposed import can_transpose, transpose_into

pytestmark = pytest.mark.skipif(not can_transpose(), reason="the native library is not there")
DTYPES = [np.float16, ml_dtypes.bfloat16, np.int32, np.float32, np.float64]


def numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)


@given(
    several=st.lists(st.integers(0, 3), max_size=2),
    rows=st.integers(0, 70),
    columns=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
)
def test_as_numpy_swaps_the_last_dimensions(several: list[int], rows: int, columns: int, dtype: Any):
    given = numbers((*several, rows, columns), dtype)
    out = np.full((*several, columns, rows), 7, dtype)
    transpose_into(given, out)
    assert (out == given.swapaxes(-1, -2)).all()


@pytest.mark.parametrize("workers", [1, 2, 3, 7, None])
@pytest.mark.parametrize("shape", [(1000, 333), (5, 129, 257), (2, 3, 4000), (100_000, 1), (1, 100_000)])
def test_large_matrices_by_several_threads(
    shape: tuple[int, ...], workers: int | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: workers)
    given = numbers(shape, np.float32)
    out = np.zeros((*shape[:-2], shape[-1], shape[-2]), np.float32)
    transpose_into(given, out)
    assert (out == given.swapaxes(-1, -2)).all()


def test_what_is_not_contiguous_is_copied_first():
    given = numbers((64, 96), np.float32)[::2, ::3]
    out = np.zeros((32, 32), np.float32)
    transpose_into(given, out)
    assert (out == given.T).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((2, 3), np.float32), r"got float32\[2, 3\], expected contiguous float32\[3, 2\]"),
        (np.zeros((3, 2), np.int32), r"got int32\[3, 2\]"),
        (np.zeros((3, 4), np.float32)[:, ::2], "contiguous"),
        (np.broadcast_to(np.float32(0), (3, 2)), "contiguous"),
        (np.frombuffer(bytes(24), np.float32).reshape(3, 2), "read-only"),
    ],
)
def test_what_it_cannot_be_written_into(out: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        transpose_into(np.zeros((2, 3), np.float32), out)


def test_items_of_other_sizes_are_refused():
    for dtype in (np.int8, np.complex128, object):
        with pytest.raises(ValueError, match="expected numbers of 2, 4 or 8 bytes"):
            transpose_into(np.zeros((2, 3), dtype), np.zeros((3, 2), dtype))


def test_other_arguments_are_refused():
    with pytest.raises(ValueError, match="got 1 dimensions, expected at least 2"):
        transpose_into(np.zeros(3), np.zeros(3))
    square = np.zeros((3, 3))
    with pytest.raises(ValueError, match="out: has memory of the matrices"):
        transpose_into(square, square)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transposed, "open_library", lambda: (None, "it is not built"))
    transposed._function.cache_clear()
    try:
        assert not can_transpose()
        with pytest.raises(NotImplementedError, match="it is not built"):
            transpose_into(np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32))
    finally:
        transposed._function.cache_clear()
