"""A real model's weights at many ratios: the file meets each, and the error grows with it."""

from __future__ import annotations

import pytest
from minilm import needs_weights, weights

from capibara.compress.allocation import allocate, survey
from capibara.compress.archive_files import compress_files, plan_compress
from capibara.compress.errors import CompressError
from capibara.compress.safetensors_file import SafetensorsFile
from capibara.compress.sensitivity import by_scale

pytestmark = [
    pytest.mark.slow,
    needs_weights,
]


@pytest.mark.parametrize("strategy", ["uniform", "auto"])
def test_ratios_are_met_and_errors_grow(tmp_path, strategy):
    source = weights()
    assert source is not None
    errors = []
    for ratio in (2, 4, 6, 8, 10):
        target = tmp_path / f"{ratio}.capi"
        (written,) = compress_files(plan_compress(source, target), ratio=ratio, strategy=strategy)
        original = sum(e.original_bytes for e in written.entries)
        assert original / target.stat().st_size == pytest.approx(ratio, rel=0.02)
        errors.append(written.error)
    assert errors == sorted(errors)


@pytest.mark.parametrize(("bits", "error"), [(4.3, 0.062), (3.1, 0.145), (2.2, 0.28)])
def test_few_bits_and_small_errors(tmp_path, bits, error):
    source, target = weights(), tmp_path / "small.capi"
    assert source is not None
    # Four tenths of a percent are what a ratio may be off.
    (written,) = compress_files(plan_compress(source, target), ratio=32 / bits * 1.004, strategy="uniform")
    numbers = sum(e.original_bytes for e in written.entries) / 4
    assert target.stat().st_size * 8 / numbers <= bits
    assert written.error <= error


def test_auto_is_as_good_as_each_codec_at_equal_bytes():
    path = weights()
    assert path is not None
    with SafetensorsFile(path) as source:
        every = survey(source)
        scale = by_scale(every)
        tried = 0
        for codec in ("uniform", "int8", "int4", "nf4"):
            one = survey(source, codecs=[codec])
            for ratio in (3.9, 6.0):
                try:
                    alone = allocate(one, ratio, weights=scale)
                except CompressError:
                    continue
                tried += 1
                best = allocate(every, every.total / alone.size, weights=scale)
                assert best.error <= alone.error * 1.02, (codec, ratio)
        assert tried >= 2
