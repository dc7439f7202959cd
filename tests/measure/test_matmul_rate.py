"""The measured matrix-multiply rate: a real figure, of the right order."""

from __future__ import annotations

import jax
import pytest

from capibara.measure import MeasureError, matmul_rate, measured_chip


def test_rate_is_a_real_figure():
    rate = matmul_rate("float32", size=256, budget=0.02)
    assert 1e8 < rate < 1e17


def test_default_size_and_bfloat16():
    assert matmul_rate("bfloat16", budget=0.02) > 1e8


def test_integers():
    assert matmul_rate("int8", size=64, budget=0.01) > 1e6


def test_one_by_one():
    assert matmul_rate(size=1, budget=0.001) > 0


def test_on_a_given_device():
    assert matmul_rate(size=64, budget=0.01, device=jax.devices()[-1]) > 1e6


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"dtype": "float31"}, "dtype"),
        ({"dtype": "bool"}, "dtype"),
        ({"dtype": "complex64"}, "dtype"),
        ({"size": 0}, "size"),
        ({"size": 2.0}, "size"),
        ({"size": True}, "size"),
        ({"size": 10**6}, "size"),
    ],
)
def test_bad_arguments(arguments, expected):
    with pytest.raises(MeasureError, match=expected):
        matmul_rate(**arguments)


def test_float64_needs_x64():
    if jax.config.read("jax_enable_x64"):
        assert matmul_rate("float64", size=32, budget=0.01) > 0
    else:
        with pytest.raises(MeasureError, match="jax_enable_x64"):
            matmul_rate("float64", size=32)


def test_measured_chip():
    chip = measured_chip(("float32",))
    assert chip.measured
    assert chip.peak("float32") > 1e8
    assert list(chip.peak_flops) == ["float32"]
