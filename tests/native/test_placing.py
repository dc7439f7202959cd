"""Matrices put where they are wanted, against NumPy's own copies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.native import placing
from capibara.native.placing import InFile, Placing, can_place, place

pytestmark = pytest.mark.skipif(not can_place(), reason="the native library is not there")
DTYPES = [np.int8, np.float16, ml_dtypes.bfloat16, np.int32, np.float32, np.float64]
LAYOUTS = ["same", "transposed", "panels", "turned panels"]


def numbers(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return (np.arange(np.prod(shape, dtype=int)) % 251).astype(np.uint8).reshape(shape).astype(dtype)


def expected(matrices: np.ndarray, layout: str) -> np.ndarray:
    count, rows, columns = matrices.shape
    if layout == "transposed":
        return matrices.swapaxes(1, 2)
    if layout == "panels":
        return matrices.reshape(count, rows, columns // 16, 16).swapaxes(1, 2)
    if layout == "turned panels":
        return matrices.reshape(count, rows // 16, 16, columns).swapaxes(2, 3)
    return matrices


def part_of(matrices: np.ndarray, layout: Any, source: Any = None) -> tuple[Placing, np.ndarray]:
    wanted = expected(matrices, layout)
    out = np.full(wanted.shape, 7, matrices.dtype)
    count, rows, columns = matrices.shape
    return Placing(matrices if source is None else source, (count, rows, columns), out, layout), wanted


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    """Matrices as a file has them, from an odd byte on."""
    descriptors = []

    def write(matrices: np.ndarray) -> InFile:
        path = tmp_path / f"{len(descriptors)}.bin"
        path.write_bytes(b"?" * 13 + matrices.tobytes())
        descriptors.append(os.open(path, os.O_RDONLY))
        return InFile(descriptors[-1], 13)

    yield write
    for one in descriptors:
        os.close(one)


@given(
    count=st.integers(0, 3),
    rows=st.integers(0, 70),
    columns=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(LAYOUTS),
)
def test_from_memory_as_numpy_does_it(count: int, rows: int, columns: int, dtype: Any, layout: str):
    if layout != "same" and np.dtype(dtype).itemsize == 1:
        return
    if "panels" in layout:
        if np.dtype(dtype).itemsize == 8:
            return
        rows, columns = (rows, columns // 16 * 16) if layout == "panels" else (rows // 16 * 16, columns)
    part, wanted = part_of(numbers((count, rows, columns), dtype), layout)
    assert place([part]) is None
    assert (part.out == wanted).all()


@pytest.mark.parametrize(("workers", "pause"), [(1, 100), (1, 0), (2, 100), (3, 0), (7, 0), (None, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1008, 336), (5, 144, 272), (2, 16, 40_000), (1, 100_000, 16)])
def test_large_matrices_of_files_by_several_threads(
    shape: tuple[int, int, int],
    layout: str,
    workers: int | None,
    pause: int,
    opened: Any,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(os, "cpu_count", lambda: workers)
    monkeypatch.setattr(placing, "_PAUSE_MS", pause)  # it goes on where it was
    matrices = numbers(shape, np.float32)
    part, wanted = part_of(matrices, layout, opened(matrices))
    assert place([part]) is None
    assert (part.out == wanted).all()


def test_many_of_all_kinds_at_once(opened: Any):
    parts, every = [], []
    for n, layout in enumerate(LAYOUTS * 5):
        matrices = numbers((1 + n % 3, 16 * (1 + n), 48), [np.float32, ml_dtypes.bfloat16][n % 2])
        part, wanted = part_of(matrices, layout, opened(matrices) if n % 4 else None)
        parts.append(part)
        every.append(wanted)
    assert place(parts) is None
    for part, wanted in zip(parts, every, strict=True):
        assert (part.out == wanted).all()
    assert place([]) is None


def test_signals_are_handled_in_between(opened: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placing, "_PAUSE_MS", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    matrices = numbers((8, 256, 512), np.float32)  # two units each
    part, wanted = part_of(matrices, "transposed", opened(matrices))
    seen: list[bool] = []

    def handle(*_: object) -> None:
        seen.append(bool((part.out == wanted).all()))
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    run, reason = placing._function()
    assert run is not None

    calls: list[int] = []

    def counted(*given: Any) -> int:
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGALRM)
        return run(*given)

    monkeypatch.setattr(placing, "_function", lambda: (counted, reason))
    try:
        with pytest.raises(KeyboardInterrupt):
            place([part])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == [False]
    assert (part.out[0] == wanted[0]).all()


def test_one_that_cannot_be_read(opened: Any, tmp_path: Path):
    matrices = numbers((1, 64, 64), np.float32)
    whole, wanted = part_of(matrices, "turned panels", opened(matrices))
    path = tmp_path / "short.bin"
    path.write_bytes(matrices.tobytes()[:-1])
    with open(path, "rb") as file:
        for layout in LAYOUTS:
            short, _ = part_of(matrices, layout, InFile(file.fileno(), 0))
            assert place([whole, short]) == 1
            assert place([short, whole]) == 0
    closed, _ = part_of(matrices, "same", InFile(10_000, 0))
    assert place([closed]) == 0
    assert place([whole]) is None
    assert (whole.out == wanted).all()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros((2, 4), np.float32), r"got float32\[2, 4\], expected 6 numbers, contiguous"),
        (np.zeros((3, 4), np.float32)[:, ::2], "contiguous"),
        (np.broadcast_to(np.float32(0), (3, 2)), "contiguous"),
        (np.frombuffer(bytes(24), np.float32).reshape(3, 2), "read-only"),
        (np.zeros((3, 2), np.int64), r"got float32\[2, 3\], expected 48 bytes, contiguous"),
    ],
)
def test_what_they_cannot_be_written_into(out: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        Placing(np.zeros((2, 3), np.float32), (1, 2, 3), out)


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "message"),
    [
        ((1, 2, 3), np.int8, "transposed", "'transposed' of int8, expected numbers of"),
        ((1, 16, 16), np.float64, "panels", "'panels' of float64"),
        ((1, 16, 16), np.float32, "turned", "got 'turned' of float32"),
        ((1, 16, 17), np.float32, "panels", "expected a multiple of 16"),
        ((1, 17, 16), np.float32, "turned panels", "expected a multiple of 16"),
    ],
)
def test_layouts_that_do_not_fit(shape: tuple[int, int, int], dtype: Any, layout: Any, message: str):
    with pytest.raises(ValueError, match=message):
        Placing(np.zeros(shape, dtype), shape, np.zeros(shape, dtype), layout)


def test_other_sources_are_refused():
    square = np.zeros((3, 3), np.float32)
    with pytest.raises(ValueError, match="out: has memory of the source"):
        Placing(square, (1, 3, 3), square)
    with pytest.raises(ValueError, match="contiguous"):
        Placing(np.zeros((3, 6), np.float32)[:, ::2], (1, 3, 3), square)
    for source in (InFile(-1, 0), InFile(3, -1)):
        with pytest.raises(ValueError, match="expected an open file, and an offset from 0"):
            Placing(source, (1, 3, 3), square)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placing, "open_library", lambda: (None, "it is not built"))
    placing._function.cache_clear()
    try:
        assert not can_place()
        with pytest.raises(NotImplementedError, match="it is not built"):
            place([part_of(numbers((1, 2, 3), np.float32), "same")[0]])
    finally:
        placing._function.cache_clear()
