"""Rounded and entropy-coded numbers: the error that theory allows, at the size that was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from capibara.cli import main
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import FORMATS, from_float, get_format, to_float

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")
WIDE = {"F64": np.float64, "F32": np.float32}
DTYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("name", DTYPES)
def test_every_number_of_a_format_as_ml_dtypes_reads_it(name: str) -> None:
    form = get_format(name)
    codes = np.arange(1 << form.bits).astype(form.unsigned)
    expected = codes.view(DTYPES[name]).astype(np.float32)
    values = to_float(codes, form)
    np.testing.assert_array_equal(values, expected)
    finite = np.isfinite(values)
    np.testing.assert_array_equal(from_float(values[finite], form), codes[finite])
    assert np.isnan(to_float(from_float(np.array([np.nan], np.float32), form), form)).all()


@pytest.mark.parametrize("name", DTYPES)
def test_rounding_to_a_format_as_ml_dtypes_does(name: str) -> None:
    form = get_format(name)
    limit = {"F8_E4M3": 400.0, "F8_E5M2": 5e4, "F16": 6e4, "BF16": 1e30}[name]
    values = RANDOM.normal(size=4000).astype(np.float32) * np.exp(RANDOM.normal(size=4000) * 6).astype(
        np.float32
    )
    every = to_float(np.arange(1 << min(form.bits, 12)).astype(form.unsigned), form)
    every = every[np.isfinite(every)]
    ties = ((every[1:].astype(np.float64) + every[:-1]) / 2).astype(np.float32)
    values = np.clip(np.concatenate([values, ties]), -limit, limit)
    expected = values.astype(DTYPES[name]).astype(np.float32)
    np.testing.assert_array_equal(to_float(from_float(values, form), form), expected)


def run(x: np.ndarray, step: float) -> tuple[np.ndarray, float]:
    payload = UNIFORM.encode(x.reshape(-1).view(np.uint32), F32, x.shape, {"step": step})
    assert len(payload) <= UNIFORM.size_bound(F32, x.size, {})
    back = UNIFORM.decode(memoryview(payload), F32, x.shape, {}).view(np.float32).reshape(x.shape)
    return back, len(payload) * 8 / x.size


@pytest.mark.parametrize("bits", [2.2, 3.1, 4.3, 8.0])
def test_a_gaussian_at_the_error_of_an_ideal_scalar_quantiser(bits: float) -> None:
    x = RANDOM.normal(size=(1024, 1024)).astype(np.float32)
    back, size = run(x, 4.1327 * 2**-bits)
    assert abs(size - bits) < 0.06
    # Gish and Pierce: sqrt(pi e / 6) 2^-bits at high rates, a little less below three bits.
    assert np.linalg.norm(back - x) / np.linalg.norm(x) < 1.193 * 2**-size * 1.02


def test_rows_of_different_scale_are_told_apart() -> None:
    scales = np.exp(RANDOM.normal(size=(2048, 1)))
    x = (RANDOM.normal(size=(2048, 512)) * scales).astype(np.float32)
    _, size = run(x, 0.05)
    ideal = np.log2(4.1327 * scales / 0.05).mean()
    assert size < ideal + 0.1


@given(
    rows=st.integers(1, 30),
    columns=st.integers(1, 30),
    step=st.floats(1e-6, 1e3),
    scale=st.floats(1e-3, 1e4),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_no_number_is_off_by_more_than_a_step(
    rows: int, columns: int, step: float, scale: float, seed: int
) -> None:
    x = (np.random.default_rng(seed).standard_cauchy((rows, columns)) * scale).astype(np.float32)
    back, _ = run(x, step)
    assert (np.abs(back.astype(np.float64) - x) <= step + 1e-6 * np.abs(x)).all()


@pytest.mark.parametrize("step", [None, 0, -1.0, float("nan"), float("inf"), True, "1"])
def test_steps_that_are_none(step: object) -> None:
    with pytest.raises(CompressError, match="step: got"):
        UNIFORM.encode(np.zeros(4, np.uint32), F32, (4,), {"step": step})


def test_what_cannot_be_rounded() -> None:
    bad = np.array([1.0, np.nan], np.float32).view(np.uint32)
    with pytest.raises(CompressError, match="NaN or infinite"):
        UNIFORM.encode(bad, F32, (2,), {"step": 1.0})
    with pytest.raises(CompressError, match="too small"):
        UNIFORM.encode(np.array([1e30], np.float32).view(np.uint32), F32, (1,), {"step": 1e-9})
    with pytest.raises(CompressError, match="with a fraction"):
        UNIFORM.encode(np.zeros(4, np.uint8), get_format("U8"), (4,), {"step": 1.0})


def test_tampered_payloads() -> None:
    x = RANDOM.normal(size=(64, 64)).astype(np.float32)
    good = UNIFORM.encode(x.reshape(-1).view(np.uint32), F32, x.shape, {"step": 0.1})
    found = 0
    for _ in range(200):
        bad = bytearray(good)
        bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        try:
            assert UNIFORM.decode(memoryview(bytes(bad)), F32, x.shape, {}).size == x.size
        except DamagedError:
            found += 1
    assert found > 50
    with pytest.raises(DamagedError):
        UNIFORM.decode(memoryview(good[:10]), F32, x.shape, {})


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        f"layer{i}.weight": RANDOM.normal(size=(200, 150)).astype(np.float32) * (i + 1) for i in range(3)
    }
    tensors["bias"] = RANDOM.normal(size=200).astype(np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.mark.parametrize("ratio", [2, 4, 6, 8, 10, 16])
def test_a_file_meets_its_ratio(model: Path, ratio: float, capsys: pytest.CaptureFixture[str]) -> None:
    out = model.with_name("small.capi")
    assert main(["compress", str(model), str(out), f"--ratio={ratio}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"] == {str(out): out.stat().st_size}
    original = sum(x.nbytes for x in load_file(model).values())
    assert abs(original / out.stat().st_size / ratio - 1) < 0.02


def test_the_error_falls_with_the_ratio(model: Path) -> None:
    errors = []
    for ratio in (10, 8, 6, 4, 2):
        assert (
            main(["compress", str(model), str(model.with_name("m.capi")), f"--ratio={ratio}", "--json"]) == 0
        )
        assert (
            main(["decompress", str(model.with_name("m.capi")), str(model.with_name("back.safetensors"))])
            == 0
        )
        a, b = load_file(model), load_file(model.with_name("back.safetensors"))
        np.testing.assert_array_equal(a["bias"], b["bias"])
        errors.append(sum(float(((a[k] - b[k]) ** 2).sum()) for k in a))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0


@pytest.mark.parametrize("ratio", ["1", "0", "-3", "nan", "inf", "5000"])
def test_ratios_that_cannot_be(model: Path, ratio: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compress", str(model), str(model.with_name("m.capi")), f"--ratio={ratio}"]) == 2
    assert "ratio" in capsys.readouterr().err
    assert not model.with_name("m.capi").exists()


def test_every_float_format_is_tried() -> None:
    assert set(WIDE) | set(DTYPES) == {f.name for f in FORMATS.values() if f.is_float}


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", [(0,), (0, 5), (4, 0)])
def test_nothing_of_any_type_comes_back(name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    form = get_format(name)
    bits = np.empty(0, form.unsigned)
    payload = UNIFORM.encode(bits, form, shape, {"step": 0.1})
    back = UNIFORM.decode(memoryview(payload), form, shape, {"step": 0.1})
    assert (back.dtype, back.size) == (bits.dtype, 0)
    with ArchiveWriter(tmp_path / "a.capi") as out:
        out.add("x", bits, form, shape, codec="uniform", settings={"step": 0.1})
    with Archive(tmp_path / "a.capi") as archive:
        assert archive.read("x").shape == shape
        assert [problem for _, problem in archive.verify()] == [None]


def test_integers_are_still_none_of_its_numbers() -> None:
    form = get_format("I32")
    payload = UNIFORM.encode(np.zeros(3, np.uint32), F32, (3,), {"step": 0.1})
    with pytest.raises(DamagedError, match="type is invalid"):
        UNIFORM.decode(memoryview(payload), form, (3,), {"step": 0.1})
