"""Payloads inside payloads: what a file may say of them, and what it may not."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from capibara.compress.codecs.nested import join, part_of, split
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import get_format

F32 = get_format("F32")
VALUES = np.random.default_rng(0).normal(size=(6, 40))


def head(**changes: Any) -> bytes:
    """A payload of one part, with other words in its head."""
    part = part_of(VALUES, F32, "lossless", {})
    said = {"codec": "lossless", "dtype": "F32", "shape": [6, 40], "size": len(part.payload), **changes}
    text = json.dumps({"axes": [1], "parts": [said]}).encode()
    return struct.pack("<I", len(text)) + text + part.payload


def read(payload: bytes) -> np.ndarray:
    return split(memoryview(payload), 1, 1000)[1][0].values()


def test_parts_come_back() -> None:
    parts = [part_of(VALUES, F32, "lossless", {}), part_of(VALUES, F32, "uniform", {"step": 0.5})]
    said, found = split(memoryview(join({"axes": [1]}, parts)), 2, 480)
    assert said == {"axes": [1]}
    np.testing.assert_array_equal(found[0].values(), VALUES.astype(np.float32))
    assert np.abs(found[1].values() - VALUES).max() <= 0.5
    np.testing.assert_array_equal(read(head()), VALUES.astype(np.float32))


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "low_rank"},
        {"codec": "sparse"},
        {"codec": ["lossless"]},
        {"codec": "unheard"},
        {"codec": "int4", "settings": {"group": "x"}},
        {"dtype": "F31"},
        {"dtype": 3},
        {"shape": [-6, -40]},
        {"shape": [6, True]},
        {"shape": [10**15, 10**15]},
        {"shape": [6, 41]},
        {"shape": 240},
        {"shape": [1] * 33},
        {"size": 10**9},
        {"size": 5},
        {"settings": []},
    ],
)
def test_words_that_do_not_fit(changes: dict[str, Any]) -> None:
    with pytest.raises(ArchiveError):
        read(head(**changes))


@pytest.mark.parametrize(
    "text", [b"", b"[]", b"{}", b"3", b"{", b'{"parts": 3}', b'{"parts": [3]}', b"[" * 60000]
)
def test_heads_that_are_none(text: bytes) -> None:
    with pytest.raises(DamagedError):
        split(memoryview(struct.pack("<I", len(text)) + text), 1, 100)
    with pytest.raises(DamagedError):
        split(memoryview(struct.pack("<I", len(text) + 1) + text), 1, 100)


def test_other_numbers_of_parts() -> None:
    with pytest.raises(DamagedError):
        split(memoryview(head()), 2, 1000)
    with pytest.raises(DamagedError):
        split(memoryview(head()), 1, 239)
    with pytest.raises(DamagedError):
        split(memoryview(head() + b"x"), 1, 1000)


def test_settings_have_bounds() -> None:
    part = part_of(VALUES, F32, "lossless", {})
    with pytest.raises(CompressError, match="settings: they take"):
        join({"axes": list(range(100_000))}, [part])
