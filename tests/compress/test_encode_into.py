"""Codecs write into memory that holds something else, and move parts about in it: the payload is the same."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs import fixed_storage
from capibara.compress.codecs.fixed_search import KINDS
from capibara.compress.codecs.fixed_storage import store_codes
from capibara.compress.codecs.in_place import InPlace
from capibara.compress.codecs.protocol import CODECS
from capibara.compress.formats import from_float, get_format

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "lossless": [{}],
    "sparse": [{}, {"density": 0.5}, {"density": 0.5, "step": 0.1}, {"density": 0.3, "values": "int8"}],
    **{name: [{}, {"group": 7}, {"coded": True}, {"outliers": 0.05}, {"axis": 0}] for name in ("int8", "int4", "nf4")},
}  # fmt: skip


def test_every_codec_that_does_it_is_tried() -> None:
    assert {name for name, codec in CODECS.items() if isinstance(codec, InPlace)} == set(SETTINGS)


@pytest.mark.thin(3)
@pytest.mark.parametrize("codec", SETTINGS)
@pytest.mark.parametrize(
    "shape", [(0,), (0, 5), (1,), (40,), (7, 33), (30, 64), (3, 4, 20), (50, 3)], ids=str
)
def test_what_was_there_before_does_not_matter(codec: str, shape: tuple[int, ...]) -> None:
    form = get_format("BF16")
    how: Any = CODECS[codec]
    bits = from_float(np.random.default_rng(0).normal(size=math.prod(shape)).astype(np.float32), form)
    for chosen in SETTINGS[codec]:
        if chosen.get("axis") == 0 and len(shape) < 2:
            continue
        payload, bound = how.encode(bits, form, shape, chosen), how.size_bound(form, bits.size, chosen)
        for before in (0, 255):
            out = np.full(bound + 64, before, np.uint8)
            size = how.encode_into(out[:bound], bits, form, shape, chosen)
            assert out[:size].tobytes() == payload
            assert (out[bound:] == before).all()


@given(
    rows=st.integers(0, 9), length=st.integers(1, 9), gap=st.integers(0, 5), block=st.sampled_from([1, 8, 1000]),
    kind=st.sampled_from(["int8", "int4", "nf4"]), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_codes_that_lie_where_they_are_stored(
    rows: int, length: int, gap: int, block: int, kind: str, seed: int
) -> None:
    low, high = {"int8": (-128, 128), "int4": (-8, 8), "nf4": (0, 16)}[kind]
    codes = np.random.default_rng(seed).integers(low, high, (rows, length)).astype(np.int8)
    if kind == "int8":
        expected = codes.tobytes()
    else:
        low_first = codes.astype(int) + (8 if kind == "int4" else 0)
        expected = bytes(
            row[i] | (row[i + 1] << 4 if i + 1 < length else 0)
            for row in low_first
            for i in range(0, length, 2)
        )
    out = np.full(3 + gap + codes.size + 5, 0xAA, np.uint8)
    there = out[3 + gap : 3 + gap + codes.size].view(np.int8).reshape(codes.shape)
    there[:] = codes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fixed_storage, "_BLOCK", block)
        end = store_codes(out, 3, there, KINDS[kind], False)
    assert out[3:end].tobytes() == expected
    assert (out[:3] == 0xAA).all()
    assert (out[-5:] == 0xAA).all()
