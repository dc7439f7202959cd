"""Models with a few NaN and infinities: what can keep them is used, and everything that is said of it is a number."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from capibara.compress.errors import CompressError
from capibara.compress.model_api import ModelCompressionAPI
from capibara.compress.profile import CompressionProfile

STRANGE = np.array([np.nan, np.inf, -np.inf], np.float32)


def model() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(160, 128)).astype(np.float32) for name in ("a", "b")}
    params["a"].reshape(-1)[[5, 9, 5000]] = STRANGE
    params["a"].view(np.uint32)[7, 7] = 0x7FC01234  # a NaN with a payload
    return params


def api(strategy: str, ratio: float | None) -> ModelCompressionAPI:
    return ModelCompressionAPI(CompressionProfile(strategy=strategy, target_compression_ratio=ratio))


def numbers(stats: Any) -> dict[str, Any]:
    return {
        "ratio": stats.compression_ratio,
        "weight_error": stats.weight_error,
        "fidelity": stats.fidelity,
        "errors": [t.error for t in stats.tensors],
    }


@pytest.mark.parametrize(
    ("strategy", "ratio"),
    [("auto", 7.2), ("auto", 3.9), ("nf4", 6), ("int8", 3), ("nf4", None), ("int8", None)],
)
def test_a_ratio_is_met_and_they_come_back(strategy, ratio):
    params = model()
    made = api(strategy, ratio).compress(params)
    if ratio is not None:
        assert made.stats.compression_ratio > 0.98 * ratio
    if ratio is not None and strategy == "auto":
        assert made.stats.compression_ratio < 1.02 * ratio
    finite = np.isfinite(params["a"])
    np.testing.assert_array_equal(
        made.model["a"].view(np.uint32)[~finite], params["a"].view(np.uint32)[~finite]
    )
    kept = {n: np.isfinite(p) for n, p in params.items()}
    lost = sum(float(((made.model[n][kept[n]] - p[kept[n]]) ** 2).sum()) for n, p in params.items())
    whole = sum(float((p[kept[n]] ** 2).sum()) for n, p in params.items())
    assert made.stats.weight_error == pytest.approx((lost / whole) ** 0.5, rel=1e-4)
    assert 0 < made.stats.weight_error < 0.2
    json.dumps(numbers(made.stats), allow_nan=False)


def test_outputs_that_do_not_meet_them_weigh_the_tensor():
    params = model()
    params["a"][~np.isfinite(params["a"])] = 0
    params["a"][0, :3] = STRANGE
    x = np.random.default_rng(1).normal(size=(32, 128)).astype(np.float32)

    def run(p: Any, x: Any) -> Any:
        return x[:, 3:] @ p["a"][:, 3:].T @ p["b"]

    data = ModelCompressionAPI(CompressionProfile(target_compression_ratio=5.0))
    made = data.compress(params, x, apply=run)
    assert made.stats.compression_ratio == pytest.approx(5, rel=0.02)
    assert made.stats.output_error is not None
    assert made.stats.output_error < 0.1


def test_a_codec_that_cannot_keep_them_says_which_can():
    with pytest.raises(CompressError, match="NaN or infinities with all but int8, int4 and nf4"):
        api("uniform", 6).compress(model())


def test_too_many_of_them_stay_exact():
    params = model()
    params["a"][:, ::8] = np.nan
    made = api("auto", 1.7).compress(params)
    assert {t.name: t.codec for t in made.stats.tensors}["a"] == "lossless"
    np.testing.assert_array_equal(made.model["a"].view(np.uint32), params["a"].view(np.uint32))
