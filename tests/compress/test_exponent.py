"""Codes of one length: on the processor with NumPy, and on JAX's device."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs.exponent import EXPONENT
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import get_format

RANDOM = np.random.default_rng(0)


def weights(name: str, shape: tuple[int, ...], odd: int = 3) -> np.ndarray:
    """Normal numbers, each row of its own scale, and some of any bits."""
    form, count = get_format(name), math.prod(shape)
    wide = RANDOM.normal(size=shape) * np.exp(3 * RANDOM.normal(size=(*shape[:-1], 1) if shape else ()))
    bits = np.asarray(wide, np.float32).view(np.uint32).reshape(-1) >> np.uint32(32 - form.bits)
    bits = bits.astype(form.unsigned)
    some = RANDOM.integers(0, max(count, 1), min(odd, count))
    bits[some] = RANDOM.integers(0, 1 << form.bits, len(some), dtype=np.uint64).astype(form.unsigned)
    return bits


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["BF16", "F32"])
@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (70,), (33, 41), (5, 3, 3, 7), (700, 1)])
@pytest.mark.parametrize("given_settings", [{}, {"width": 3}, {"width": 4}])
def test_every_bit_comes_back(name: str, shape: tuple[int, ...], given_settings: dict[str, int]) -> None:
    form, bits = get_format(name), weights(name, shape)
    payload = EXPONENT.encode(bits, form, shape, given_settings)
    assert len(payload) <= EXPONENT.size_bound(form, bits.size, given_settings)
    np.testing.assert_array_equal(EXPONENT.decode(payload, form, shape, {}), bits)


@given(st.lists(st.integers(0, 65535), min_size=1, max_size=200), st.sampled_from([3, 4]))
@settings(deadline=None)
def test_any_numbers(numbers: list[int], width: int) -> None:
    form, bits = get_format("BF16"), np.array(numbers, np.uint16)
    payload = EXPONENT.encode(bits, form, bits.shape, {"width": width})
    np.testing.assert_array_equal(EXPONENT.decode(payload, form, bits.shape, {}), bits)


def test_seven_tenths_of_normal_numbers() -> None:
    # 8 bits as they are, 3 for the code, and an eighth of a number each for the 2 to 3 % outside the window.
    bits = weights("BF16", (500, 400), 0)
    payload = EXPONENT.encode(bits, get_format("BF16"), (500, 400), {})
    assert 11 / 16 < len(payload) / bits.nbytes < 0.72


def test_what_it_refuses() -> None:
    with pytest.raises(CompressError, match="dtype: got F16, expected one of BF16, F32"):
        EXPONENT.encode(np.zeros(9, np.uint16), get_format("F16"), (9,), {})
    for width in (5, "3", True):
        with pytest.raises(CompressError, match="width: got"):
            EXPONENT.encode(np.zeros(9, np.uint16), get_format("BF16"), (9,), {"width": width})
    assert EXPONENT.candidates(get_format("I8"), (4,)) == []


def test_damage_is_found_or_harmless() -> None:
    form, shape = get_format("BF16"), (20, 40)
    bits = weights("BF16", shape)
    good, found = EXPONENT.encode(bits, form, shape, {}), 0
    for _ in range(1000):
        bad = bytearray(good)
        bad[RANDOM.integers(len(bad) if RANDOM.integers(2) else 8)] ^= 1 << RANDOM.integers(8)
        try:
            assert EXPONENT.decode(bytes(bad), form, shape, {}).shape == bits.shape
        except DamagedError:
            found += 1
    assert found > 300
    for end in (0, 1, 7, 8, 100, len(good) - 1):
        with pytest.raises(DamagedError):
            EXPONENT.decode(good[:end], form, shape, {})


@pytest.mark.parametrize("name", ["BF16", "F32"])
def test_decoded_by_the_device(tmp_path: Path, name: str) -> None:
    jax = pytest.importorskip("jax")
    from capibara.compress.on_device import expand, read_on_device

    form = get_format(name)
    shapes = {"matrix": (33, 41), "odd": (5, 7), "scalar": (), "none": (0, 4), "any": (50,)}
    tensors = {key: weights(name, shape) for key, shape in shapes.items()}
    tensors["any"] = RANDOM.integers(0, 1 << form.bits, 50, dtype=np.uint64).astype(form.unsigned)
    with ArchiveWriter(tmp_path / "a.capi") as writer:
        for key, bits in tensors.items():
            writer.add(key, bits, form, shapes[key], codec="exponent")
        writer.add_tied("tied", "matrix")
        writer.add("other", tensors["matrix"], form, shapes["matrix"])
    with Archive(tmp_path / "a.capi") as archive:
        for key, bits in tensors.items():
            made = read_on_device(archive, key)
            assert made.shape == shapes[key]
            assert made.dtype == ("bfloat16" if name == "BF16" else "float32")
            np.testing.assert_array_equal(np.asarray(made).view(form.unsigned).reshape(-1), bits)
        tied = read_on_device(archive, "tied", device=jax.devices()[-1])
        np.testing.assert_array_equal(np.asarray(tied).view(form.unsigned).reshape(-1), tensors["matrix"])
        with pytest.raises(CompressError, match="got the codec 'lossless', expected 'exponent'"):
            read_on_device(archive, "other")
    # Inside a program of one's own: the coded parts are its arguments.
    parts = EXPONENT.parts(EXPONENT.encode(tensors["matrix"], form, (33, 41), {}), form, (33, 41), {})

    def sums(codes, rest, escaped):
        from dataclasses import replace

        return expand(replace(parts, codes=codes, rest=rest, escaped=escaped), form, (33, 41))

    made, escapes = jax.jit(sums)(parts.codes, parts.rest, parts.escaped)
    np.testing.assert_array_equal(np.asarray(made).view(form.unsigned).reshape(-1), tensors["matrix"])
    assert int(escapes) == len(parts.escaped) > 0


def test_escapes_that_are_missing_are_seen_by_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("jax")
    from capibara.compress.on_device import read_on_device

    form, bits = get_format("BF16"), weights("BF16", (33, 41))
    payload = bytearray(EXPONENT.encode(bits, form, (33, 41), {}))
    payload[8 + 33] ^= 3  # a code of two bits: to or from the last one, or a wrong number
    monkeypatch.setattr(EXPONENT, "encode", lambda *_: bytes(payload))
    codes = EXPONENT.parts(bytes(payload), form, (33, 41), {}).codes
    with ArchiveWriter(tmp_path / "a.capi") as writer:
        writer.add("x", bits, form, (33, 41), codec="exponent")
    with Archive(tmp_path / "a.capi") as archive:
        try:
            EXPONENT.decode(bytes(payload), form, (33, 41), {})
        except DamagedError:
            with pytest.raises(DamagedError, match="number of escapes"):
                read_on_device(archive, "x")
        else:
            assert len(codes)
            read_on_device(archive, "x")
