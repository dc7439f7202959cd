"""The sparse codec: exact for zeros that are there, and which numbers it makes zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.calibration.activations import moments
from capibara.compress.codecs.sparse import SPARSE, candidates
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.errors import ArchiveError, CompressError, DamagedError
from capibara.compress.formats import FORMATS, get_format

RANDOM = np.random.default_rng(0)
F32 = get_format("F32")


def run(w: np.ndarray, **given: Any) -> tuple[np.ndarray, int]:
    w = w.astype(np.float32)
    payload = SPARSE.encode(w.reshape(-1).view(np.uint32), F32, w.shape, given)
    assert len(payload) <= SPARSE.size_bound(F32, w.size, given)
    return SPARSE.decode(memoryview(payload), F32, w.shape, {}).view(np.float32).reshape(w.shape), len(
        payload
    )


@given(
    name=st.sampled_from(list(FORMATS)),
    shape=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    density=st.floats(0, 1),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_zeros_that_are_there(name: str, shape: tuple[int, ...], density: float, seed: int) -> None:
    random, form = np.random.default_rng(seed), get_format(name)
    count = int(np.prod(shape))
    bits = random.integers(0, 256, count * form.bits // 8).astype(np.uint8).view(form.unsigned)
    bits = np.where(random.random(count) < density, bits, 0).astype(form.unsigned)
    payload = SPARSE.encode(bits, form, shape, {})
    assert len(payload) <= SPARSE.size_bound(form, count, {})
    np.testing.assert_array_equal(SPARSE.decode(memoryview(payload), form, shape, {}), bits)
    assert SPARSE.error_bound({}) == 0


@pytest.mark.parametrize("density", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_the_largest_numbers_stay(density: float) -> None:
    w = RANDOM.normal(size=(200, 150)).astype(np.float32)
    back, size = run(w, density=density)
    kept = back != 0
    assert kept.sum() == round(density * w.size)
    np.testing.assert_array_equal(back[kept], w[kept])
    assert density in (0, 1) or np.abs(w[kept]).min() >= np.abs(w[~kept]).max()
    # The entropy of the bitmap, and values that hardly shrink.
    entropy = -sum(p * np.log2(p) for p in (density, 1 - density) if p)
    assert size * 8 / w.size < entropy * 1.03 + density * 32 + 0.2
    assert SPARSE.error_bound({"density": density}) is None


@pytest.mark.parametrize(("pattern", "kept", "of"), [("2:4", 2, 4), ("1:2", 1, 2), ("4:8", 4, 8)])
def test_patterns(pattern: str, kept: int, of: int) -> None:
    w = RANDOM.normal(size=(64, 48)).astype(np.float32)
    back, _ = run(w, pattern=pattern)
    groups, original = back.reshape(-1, of), w.reshape(-1, of)
    assert ((groups != 0).sum(1) == kept).all()
    expected = np.sort(np.abs(original), axis=1)[:, of - kept :]
    np.testing.assert_array_equal(np.sort(np.abs(groups), axis=1)[:, of - kept :], expected)


def test_two_of_four_takes_the_entropy_of_its_bitmap() -> None:
    w = RANDOM.normal(size=(256, 512)).astype(np.float32)
    _, all_of_them = run(w, density=1.0)
    _, size = run(w, pattern="2:4")
    assert (
        size - all_of_them / 2
    ) * 8 / w.size < 0.70  # log2(6) / 4 is 0.646; larger values have fewer exponents


def test_the_pattern_runs_along_the_inputs() -> None:
    w = RANDOM.normal(size=(48, 20)).astype(np.float32)
    back, _ = run(w, pattern="2:4", input_axes=[0])
    np.testing.assert_array_equal(back, run(w.T.copy(), pattern="2:4")[0].T)
    assert ((back.reshape(12, 4, 20) != 0).sum(1) == 2).all()


@pytest.mark.parametrize("given", [{"density": 0.5}, {"pattern": "2:4"}])
def test_inputs_tell_what_matters(given: dict[str, Any]) -> None:
    scale = np.exp(RANDOM.normal(size=64))
    x = RANDOM.normal(size=(600, 64)) @ (RANDOM.normal(size=(64, 64)) * 0.3 + np.eye(64)) * scale
    w, found = RANDOM.normal(size=(32, 64)), moments(x)
    magnitude = found.error(w, run(w, **given)[0])
    scored, _ = run(w, **given, **found.settings(), refit=False, damping=0.0)
    refitted, _ = run(w, **given, **found.settings())
    np.testing.assert_array_equal(scored[scored != 0], w.astype(np.float32)[scored != 0])
    assert found.error(w, scored) < 0.9 * magnitude
    assert found.error(w, refitted) < 0.95 * found.error(w, scored)
    assert ((refitted != 0).sum(1) == 32).all()
    # Scores as published: |W| times the norm of the input, the largest in each row.
    if "density" in given:
        scores = np.abs(w) * np.linalg.norm(x, axis=0)
        top = np.argsort(-scores, axis=1)[:, :32]
        assert all(set(top[i]) == set(np.flatnonzero(scored[i])) for i in range(32))


def test_the_sweep_is_least_squares_for_the_last_zero() -> None:
    # One zero in each row of two: what remains has a closed form, the regression of one input on the other.
    x = RANDOM.normal(size=(400, 2)) @ np.array([[1.0, 0.8], [0.0, 0.6]])
    w, found = np.array([[0.1, 2.0], [0.05, -1.0]]), moments(x)
    back, _ = run(w, pattern="1:2", damping=0.0, **found.settings())
    s = found.second
    expected = w[:, 1] + w[:, 0] * s[0, 1] / s[1, 1]
    np.testing.assert_allclose(back, np.stack([np.zeros(2), expected], 1), rtol=1e-5)


def test_values_by_another_codec() -> None:
    w = RANDOM.normal(size=(128, 128))
    back, size = run(w, density=0.5, step=0.1)
    assert np.abs(back - np.where(back != 0, w, 0)).max() <= 0.1
    assert size * 8 / w.size < 1 + 0.5 * np.log2(4.133 / 0.1) + 0.05
    with pytest.raises(CompressError, match="a step belongs to 'uniform'"):
        run(w, values="uniform")
    with pytest.raises(CompressError, match="codec of a part: got 'sparse'"):
        run(w, values="sparse")


def test_parts_for_kernels() -> None:
    w = RANDOM.normal(size=(8, 16)).astype(np.float32)
    payload = SPARSE.encode(w.reshape(-1).view(np.uint32), F32, w.shape, {"pattern": "2:4"})
    values, columns = SPARSE.parts(memoryview(payload), F32, w.shape, {}).compact()
    assert values.shape == columns.shape == (8, 8)
    dense = np.zeros_like(w)
    np.put_along_axis(dense, columns, values.view(np.float32), axis=1)
    np.testing.assert_array_equal(dense, run(w, pattern="2:4")[0])
    payload = SPARSE.encode(w.reshape(-1).view(np.uint32), F32, w.shape, {"density": 0.3})
    with pytest.raises(CompressError, match="rows keep"):
        SPARSE.parts(memoryview(payload), F32, w.shape, {}).compact()


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"density": 1.5}, "density: got 1.5"),
        ({"density": True}, "density: got True"),
        ({"pattern": "4:2"}, "pattern: got '4:2'"),
        ({"pattern": 24}, "pattern: got 24"),
        ({"pattern": "2:5"}, "expected a multiple of 5"),
        ({"pattern": "2:4", "density": 0.5}, "expected one of them"),
        ({"densty": 0.5}, "densty: is not a setting"),
        ({"hessian": np.eye(8)}, "without a density"),
        ({"refit": True, "density": 0.5}, "refit: got True"),
        ({"density": 0.5, "hessian": np.eye(7)}, "hessian: got the shape"),
    ],
)
def test_bad_settings(given: dict[str, Any], text: str) -> None:
    with pytest.raises(CompressError, match=text):
        run(np.ones((4, 8)), **given)


def test_numbers_that_have_no_size() -> None:
    with pytest.raises(CompressError, match="NaN or infinite"):
        run(np.full((4, 4), np.nan), density=0.5)
    with pytest.raises(CompressError, match="with a fraction"):
        SPARSE.encode(np.zeros(4, np.uint8), get_format("U8"), (4,), {"density": 0.5})


def test_tampered_payloads() -> None:
    w = RANDOM.normal(size=(40, 40)).astype(np.float32)
    good = SPARSE.encode(w.reshape(-1).view(np.uint32), F32, w.shape, {"density": 0.3})
    found = 0
    for _ in range(300):
        bad = bytearray(good)
        bad[RANDOM.integers(len(bad))] ^= 1 << RANDOM.integers(8)
        try:
            assert SPARSE.decode(memoryview(bytes(bad)), F32, w.shape, {}).size == w.size
        except ArchiveError:
            found += 1
    assert found > 30
    for size in (0, 3, 50, len(good) - 1):
        with pytest.raises(DamagedError):
            SPARSE.decode(memoryview(good[:size]), F32, w.shape, {})
    with pytest.raises(DamagedError):
        SPARSE.decode(memoryview(good), F32, (40, 41), {})
    with pytest.raises(DamagedError):
        SPARSE.decode(memoryview(good), get_format("I32"), (40, 40), {})


def test_rows_of_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capibara.compress.container.writer.CHUNK", 400)
    x = RANDOM.normal(size=(200, 24)) * np.arange(1, 25)
    w = RANDOM.normal(size=(24, 40)).astype(np.float32)
    given = {"density": 0.5, **moments(x, (0,)).settings()}
    with ArchiveWriter(tmp_path / "w.capi") as archive:
        archive.add("w", w.reshape(-1).view(np.uint32), F32, w.shape, codec="sparse", settings=given)
    with Archive(tmp_path / "w.capi") as archive:
        assert archive["w"].settings == {"density": 0.5}
        assert [c.rows for c in archive["w"].chunks] == [10, 10, 4]
        back = archive.read("w").view(np.float32)
    for start, stop in ((0, 10), (10, 20), (20, 24)):
        alone, _ = run(w[start:stop], density=0.5, **moments(x[:, start:stop], (0,)).settings())
        np.testing.assert_array_equal(back[start:stop], alone)


def test_candidates_shrink() -> None:
    w = RANDOM.normal(size=(64, 64))
    sizes = [run(w, **c)[1] for c in candidates(F32, w.shape)]
    assert len(sizes) > 4
    assert sizes == sorted(sizes, reverse=True)
    assert candidates(F32, (1000,)) == candidates(get_format("I32"), (64, 64)) == []
