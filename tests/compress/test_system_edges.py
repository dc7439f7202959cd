"""The coordinator at its edges: numbers that are not finite, views, alerts that fail, models without a ratio."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from capibara.compress.codecs.protocol import CODECS
from capibara.compress.errors import CompressError
from capibara.compress.formats import NumberFormat, get_format
from capibara.compress.system.configuration import SystemConfiguration
from capibara.compress.system.coordinator import SystemIntegrationCoordinator
from capibara.compress.system.monitor import MetricType, UnifiedPerformanceMonitor
from capibara.compress.system.strategies import relative_error
from capibara.compress.system.tensors import read_tensor

F16, F32, F64 = map(get_format, ("F16", "F32", "F64"))


@pytest.fixture(scope="module")
def system() -> Iterator[SystemIntegrationCoordinator]:
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False)) as made:
        yield made


@pytest.mark.parametrize("codec", ["int8", "int4", "nf4"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_error_is_that_of_the_finite_numbers(
    system: SystemIntegrationCoordinator, codec: str, dtype: str
) -> None:
    values = np.random.default_rng(0).normal(size=(300, 200)).astype(dtype)
    for strange in ([np.nan], [np.inf], [np.nan, -np.inf, np.inf]):
        values[1, : len(strange)] = strange
        made = system.compress(values, strategy=codec)
        back, finite = system.decompress(made), np.isfinite(values)
        assert back[~finite].tobytes() == values[~finite].tobytes()
        wide = values[finite].astype(np.float64)
        expected = np.linalg.norm(back[finite] - wide) / np.linalg.norm(wide)
        assert made.relative_error == pytest.approx(expected)
        assert 0 < expected < 0.2
    assert system.monitor.latest(MetricType.RELATIVE_ERROR) == made.relative_error


def test_zeros_that_lose_their_sign_are_equal(system: SystemIntegrationCoordinator) -> None:
    made = system.compress(-np.zeros((64, 64), np.float32), strategy="int8")
    assert (made.codec, made.relative_error) == ("int8", 0)


def _error(before: Sequence[float], after: Sequence[float], form: NumberFormat) -> float:
    old, new = (np.array(x, form.numpy).view(form.unsigned) for x in (before, after))
    return relative_error(old, new, form)


@pytest.mark.parametrize("form", [F16, F32, F64], ids=["F16", "F32", "F64"])
def test_relative_errors(form: NumberFormat) -> None:
    nan, inf = float("nan"), float("inf")
    assert _error([3, 4], [3, 4], form) == 0
    assert _error([3, 4, nan, inf], [3, 2, nan, inf], form) == pytest.approx(2 / 5)
    assert _error([nan, -0.0], [nan, 0.0], form) == 0
    for before, after in (
        ([nan, 1], [0, 1]),
        ([inf, 1], [-inf, 1]),
        ([1, 2], [1, inf]),
        ([1, 2], [nan, 2]),
        ([0, 0], [1, 0]),
    ):
        assert _error(before, after, form) == inf


@pytest.mark.parametrize("unit", [1e-300, 1e-170, 1.0, 1e170, 1e300])
def test_relative_errors_of_very_large_and_very_small_numbers(unit: float) -> None:
    assert _error([3 * unit, 4 * unit], [3 * unit, 2 * unit], F64) == pytest.approx(2 / 5)


def test_integers_that_changed() -> None:
    assert relative_error(np.zeros(2, "u4"), np.ones(2, "u4"), get_format("I32")) == float("inf")


def test_a_codec_that_changes_what_is_not_finite_is_an_error_that_does_not_count(
    system: SystemIntegrationCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = CODECS["int8"].decode

    def without_nan(*args: Any) -> np.ndarray:
        values = decode(*args).view(np.float32)
        return np.where(np.isnan(values), np.float32(0), values).view(np.uint32)

    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    values[3, 4] = np.nan
    before = system.get_system_status()["counts"]
    monkeypatch.setattr(type(CODECS["int8"]), "decode", lambda self, *args: without_nan(*args))
    with pytest.raises(CompressError, match="layer: int8 changed a NaN"):
        system.compress(values, strategy="int8", name="layer")
    assert system.get_system_status()["counts"] == before


def test_a_call_that_failed_is_not_counted(
    system: SystemIntegrationCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    made, before = system.compress(values), system.get_system_status()["counts"]

    def fail(*args: object) -> None:
        raise CompressError("no")

    monkeypatch.setattr(system.monitor, "record", fail)
    for call in (lambda: system.compress(values), lambda: system.decompress(made)):
        with pytest.raises(CompressError, match="no"):
            call()
    monkeypatch.undo()
    assert system.get_system_status()["counts"] == before


def test_an_alert_whose_function_fails_does_not_lose_the_result() -> None:
    def fail(alert: object) -> None:
        raise OSError("the pager is down")

    monitor = UnifiedPerformanceMonitor(on_alert=fail)
    monitor.set_threshold(MetricType.RELATIVE_ERROR, 1e-9)
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    config = SystemConfiguration(enable_jax=False)
    with SystemIntegrationCoordinator(config, monitor=monitor) as system:
        with pytest.warns(RuntimeWarning, match="on_alert: .*fail raised OSError: the pager is down"):
            made = system.compress(values, strategy="int8")
        assert made.codec == "int8"
        assert system.get_system_status()["counts"]["compressed"] == len(monitor.alerts) == 1
        json.dumps(monitor.report(), allow_nan=False)


def test_views_that_stand_for_other_numbers_than_lie_there(system: SystemIntegrationCoordinator) -> None:
    torch = pytest.importorskip("torch")
    plain = torch.randn(30, 20)
    for view in (torch._neg_view(plain), torch.complex(plain, plain).conj().imag, torch._neg_view(plain).T):
        assert view.is_neg()
        back = system.decompress(system.compress(view))
        assert torch.equal(back, view)
        assert not back.is_neg()
    with pytest.raises(CompressError, match="complex64"):
        read_tensor(torch.complex(plain, plain).conj())


def _matrix(rows: int, columns: int) -> dict[str, np.ndarray]:
    return {"w": np.random.default_rng(0).normal(size=(rows, columns)).astype(np.float32)}


@pytest.mark.parametrize(("strategy", "ratio"), [("int8", 3.5), ("int4", 7), ("nf4", 7)])
def test_the_codec_of_the_configuration_counts_for_models(strategy: str, ratio: float) -> None:
    model = _matrix(256, 256)
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False, strategy=strategy)) as system:
        made = system.compress_model(model)
        assert [t.codec for t in made.stats.tensors] == [system.compress(model["w"]).codec] == [strategy]
        assert made.stats.compression_ratio > ratio


@pytest.mark.parametrize("strategy", ["auto", "lossless", "sparse", "exponent"])
def test_models_without_a_ratio_stay_exact(strategy: str) -> None:
    model = _matrix(128, 128)
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False, strategy=strategy)) as system:
        made = system.compress_model(model)
        assert {t.codec for t in made.stats.tensors} == {system.compress(model["w"]).codec}
        assert made.decompress()["w"].tobytes() == model["w"].tobytes()


@pytest.mark.parametrize("strategy", ["uniform", "low_rank"])
def test_a_codec_that_needs_a_ratio_says_so_for_tensors_and_models(strategy: str) -> None:
    model = _matrix(128, 128)
    with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False, strategy=strategy)) as system:
        with pytest.raises(CompressError, match=f"strategy: {strategy} without a ratio") as of_tensor:
            system.compress(model["w"])
        with pytest.raises(CompressError) as of_model:
            system.compress_model(model)
        assert str(of_model.value) == str(of_tensor.value)
    config = SystemConfiguration(enable_jax=False, strategy=strategy, target_compression_ratio=4)
    with SystemIntegrationCoordinator(config) as system:
        assert 3.9 < system.compress_model(model).stats.compression_ratio < 4.3  # ranks are integers
