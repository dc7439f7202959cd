"""Exact storage of tensors with many zeros: bits come back, sizes near the entropy, damage is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from capibara.compress.archive_files import compress_files, plan_compress
from capibara.compress.codecs.zeros import ZEROS, exact_codec
from capibara.compress.container import Archive
from capibara.compress.curves import coded_size
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import from_float, get_format
from capibara.compress.safetensors_file import write_safetensors


def sparse(name: str, share: float, shape: tuple[int, ...] = (256, 512), seed: int = 0) -> np.ndarray:
    """Normal numbers times a mask, so that zeros have both signs."""
    random = np.random.default_rng(seed)
    values = (random.normal(size=shape) * 0.02 * (random.random(shape) >= share)).astype(np.float32)
    return from_float(values, get_format(name)).reshape(-1)


@pytest.mark.thin(3)
@pytest.mark.parametrize("name", ["BF16", "F16", "F32", "F64", "F8_E4M3", "I8", "U16", "I64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (13,), (5, 40), (3, 3, 4)])
def test_bits_come_back(name: str, shape: tuple[int, ...]) -> None:
    form = get_format(name)
    random = np.random.default_rng(1)
    bits = random.integers(0, 1 << min(form.bits, 62), shape).astype(form.unsigned).reshape(-1)
    for zeros in (0.0, 0.6, 1.0):
        some = np.where(random.random(bits.shape) < zeros, bits.dtype.type(0), bits)
        for signs in (0, 1 << (form.bits - 1)):
            flipped = some ^ np.where(
                random.random(bits.shape) < 0.5, some.dtype.type(signs), some.dtype.type(0)
            )
            payload = ZEROS.encode(flipped, form, shape, {})
            assert len(payload) <= ZEROS.size_bound(form, bits.size, {})
            np.testing.assert_array_equal(ZEROS.decode(memoryview(payload), form, shape, {}), flipped)


@pytest.mark.slow
def test_sizes_are_near_the_entropy() -> None:
    for name, share in (("BF16", 0.9), ("BF16", 0.6), ("F32", 0.8)):
        form, bits = get_format(name), sparse(name, share)
        size = coded_size("zeros", {}, bits, form, (256, 512))
        entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
        # A zero has a sign, and a number of a bell curve lossless takes four bits less than it has, at least.
        expected = entropy + share + (1 - share) * (form.bits - 4)
        assert size * 8 / bits.size < expected + 0.1
        assert size < 0.8 * len(gzip.compress(bits.tobytes()))
        assert size < 0.8 * coded_size("lossless", {}, bits, form, (256, 512))
    assert coded_size("zeros", {}, sparse("BF16", 0.9), get_format("BF16"), (256, 512)) < 0.22 * 2 * 256 * 512


def test_the_exact_codec_is_chosen_by_what_takes_fewer_bytes(tmp_path: Path) -> None:
    form, shape = get_format("BF16"), (256, 512)
    tensors = {"sparse": sparse("BF16", 0.9), "dense": sparse("BF16", 0.0), "few": sparse("BF16", 0.05)}
    tensors["none"] = np.zeros(256 * 512, np.uint16)
    for name, large in (("sparse", (1024, 384)), ("sparse", (3, 1 << 17)), ("dense", (1024, 384))):
        bits = sparse("BF16", 0.9 if name == "sparse" else 0.0, large)
        assert exact_codec(bits, form, large) == ("zeros" if name == "sparse" else "lossless")
    assert exact_codec(tensors["none"], form, shape) == "lossless"
    assert exact_codec(tensors["sparse"][:100], form, (100,)) == "lossless"
    source = tmp_path / "model.safetensors"
    write_safetensors(source, dict.fromkeys(tensors, (form, shape)), tensors.__getitem__, {})
    (written,) = compress_files(plan_compress(source, tmp_path / "model.capi"))
    assert {e.name: e.codec for e in written.entries} == {
        "sparse": "zeros",
        **dict.fromkeys(("dense", "few", "none"), "lossless"),
    }
    with Archive(written.path) as archive:
        for name, bits in tensors.items():
            np.testing.assert_array_equal(archive.read(name).reshape(-1).view(np.uint16), bits)


def test_damage_is_refused() -> None:
    form, shape = get_format("BF16"), (8, 20)
    bits = sparse("BF16", 0.6, shape)
    payload = ZEROS.encode(bits, form, shape, {})
    with pytest.raises(CompressError, match="step: not a setting of zeros"):
        ZEROS.encode(bits, form, shape, {"step": 1.0})
    with pytest.raises(DamagedError):
        ZEROS.decode(memoryview(payload), form, (8, 21), {})
    with pytest.raises(DamagedError):
        ZEROS.decode(memoryview(payload), get_format("F16"), shape, {})
    with pytest.raises(DamagedError, match="without signs"):
        whole = ZEROS.encode(bits, form, shape, {}).replace(b'"BF16"', b'"U16"')
        length = int.from_bytes(whole[:4], "little") - 1
        ZEROS.decode(memoryview(length.to_bytes(4, "little") + whole[4:]), get_format("U16"), shape, {})
    random = np.random.default_rng(2)
    for _ in range(300):
        broken = bytearray(payload)
        for _ in range(random.integers(1, 4)):
            broken[random.integers(len(broken))] = random.integers(256)
        cut = broken[: random.integers(1, len(broken) + 1)]
        try:
            found = ZEROS.decode(memoryview(cut), form, shape, {})
        except ArchiveError:
            continue
        assert found.shape == (160,)
