"""Bit-exact storage: every format, odd shapes, numbers that are none, and payloads that were tampered with."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs import lossless
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat, get_format

RANDOM = np.random.default_rng(0)


def roundtrip(bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...]) -> bytes:
    bits = np.ascontiguousarray(bits).reshape(-1).view(form.unsigned)
    payload = lossless.encode(bits, form, shape)
    assert len(payload) <= lossless.size_bound(form, len(bits))
    back = lossless.decode(payload, form, shape)
    assert back.dtype == form.unsigned
    np.testing.assert_array_equal(back, bits)
    return payload


def bfloat16(x: np.ndarray) -> np.ndarray:
    return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "shape", [(), (0,), (1,), (63,), (64,), (65,), (3, 0), (1, 700), (700, 1), (50, 40), (33, 3, 3, 3)]
)
def test_random_bits_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    form = get_format(name)
    roundtrip(RANDOM.integers(0, 256, math.prod(shape) * form.bits // 8).astype(np.uint8), form, shape)


@pytest.mark.parametrize("name", ["F64", "F32", "F16"])
def test_numbers_that_are_none(name: str) -> None:
    form = get_format(name)
    x = RANDOM.normal(size=(64, 64)).astype(form.numpy)
    x[0, :6] = [0.0, -0.0, np.inf, -np.inf, np.nan, np.finfo(x.dtype).smallest_subnormal]
    bits = x.view(form.unsigned)
    bits[1, :3] = bits[0, 4] | np.arange(1, 4, dtype=bits.dtype)  # NaNs with payloads
    roundtrip(bits, form, x.shape)


def test_weights_shrink_by_what_their_exponents_allow() -> None:
    scales = np.exp(RANDOM.normal(size=(256, 1)))
    weights = RANDOM.normal(size=(256, 512)) * scales * 0.02
    for name, bits, at_most in (
        ("BF16", bfloat16(weights), 0.68),
        ("F32", weights.astype(np.float32).view(np.uint32), 0.84),
        ("F16", weights.astype(np.float16).view(np.uint16), 0.89),
    ):
        payload = roundtrip(bits, get_format(name), weights.shape)
        assert len(payload) < at_most * bits.nbytes, name


def test_the_coder_is_within_a_hundredth_of_the_entropy() -> None:
    weights = bfloat16(RANDOM.normal(size=1 << 18))
    payload = roundtrip(weights, get_format("BF16"), weights.shape)
    exponents = np.bincount(weights >> 7 & 255)
    p = exponents[exponents > 0] / weights.size
    ideal = weights.size * (8 - (p * np.log2(p)).sum()) / 8
    assert len(payload) < 1.01 * ideal


def test_rows_that_came_from_a_narrower_type_leave_their_zeros_out() -> None:
    wide = RANDOM.normal(size=(64, 256)).astype(np.float32)
    narrow = RANDOM.normal(size=(64, 256)).astype(np.float16).astype(np.float32)
    mixed = np.concatenate([wide, narrow])[RANDOM.permutation(128)]
    both = len(roundtrip(wide, get_format("F32"), wide.shape)) + len(
        roundtrip(narrow, get_format("F32"), wide.shape)
    )
    assert len(roundtrip(narrow, get_format("F32"), wide.shape)) < 0.5 * narrow.nbytes
    assert len(roundtrip(mixed, get_format("F32"), mixed.shape)) < 1.01 * both


def test_small_integers_take_few_bits() -> None:
    numbers = RANDOM.integers(-5, 5, size=4096)
    assert len(roundtrip(numbers, get_format("I64"), (4096,))) < 4096 * 4 / 8 + 200
    assert len(roundtrip(np.arange(4096) + 10**12, get_format("I64"), (4096,))) < 4096 * 13 / 8 + 300
    assert len(roundtrip(np.full(4096, -7), get_format("I64"), (4096,))) < 400
    assert len(roundtrip(RANDOM.random(4096) < 0.1, get_format("BOOL"), (4096,))) < 4096 / 8


def test_several_blocks_of_a_group() -> None:
    count = (1 << 18) + 77
    roundtrip(bfloat16(RANDOM.normal(size=count)), get_format("BF16"), (count,))


@given(
    name=st.sampled_from(sorted(FORMATS)),
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([1, 3, 20, 300]),
)
@settings(max_examples=80, deadline=None)
def test_any_tensor_comes_back(name: str, shape: tuple[int, ...], seed: int, spread: int) -> None:
    form = get_format(name)
    few = np.random.default_rng(seed).integers(0, 256, (spread, form.bits // 8)).astype(np.uint8)
    which = np.random.default_rng(seed + 1).integers(0, spread, math.prod(shape))
    roundtrip(few[which].reshape(-1), form, shape)


def test_tampered_payloads_are_found_or_harmless() -> None:
    form, shape = get_format("BF16"), (40, 64)
    bits = bfloat16(RANDOM.normal(size=shape)).reshape(-1)
    good = lossless.encode(bits, form, shape)
    found = 0
    for _ in range(400):
        bad = bytearray(good)
        for _ in range(RANDOM.integers(1, 4)):
            bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        if RANDOM.random() < 0.3:
            del bad[RANDOM.integers(len(bad)) :]
        try:
            assert lossless.decode(bytes(bad), form, shape).shape == bits.shape
        except DamagedError:
            found += 1
    assert found > 100


@pytest.mark.parametrize("count", [63, 65, 2**40])
def test_a_payload_of_another_shape_is_damage(count: int) -> None:
    form = get_format("BF16")
    payload = lossless.encode(bfloat16(RANDOM.normal(size=64 * 64)).reshape(-1), form, (64, 64))
    with pytest.raises(DamagedError):
        lossless.decode(payload, form, (count,))


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(CompressError, match="Did you mean 'BF16'"):
        get_format("BF61")
