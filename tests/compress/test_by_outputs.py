"""Rounding by what a layer puts out: against plain rounding at equal bytes, and the method without its short cuts."""

from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.calibration import gptq
from capibara.compress.calibration.activations import Moments, as_matrix, from_matrix
from capibara.compress.calibration.gptq import get_factor
from capibara.compress.codecs.by_features import read_steps
from capibara.compress.codecs.uniform import UNIFORM
from capibara.compress.container import Archive, ArchiveWriter
from capibara.compress.container import writer as writing
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import from_float, get_format, to_float

F32 = get_format("F32")
HEAD = 25  # step, sixteen means, bytes of a multiple


def skewed(features: int, seed: int = 0, decay: float = 0.97) -> np.ndarray:
    """Moments of inputs that lie mostly in some directions."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(4 * features, features)) * decay ** np.arange(features)
    inputs = inputs @ rng.normal(size=(features, features))
    return inputs.T @ inputs / len(inputs)


def heavy(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(5, size=shape).astype(np.float32)


def coded(weight: np.ndarray, **given: Any) -> tuple[bytes, np.ndarray]:
    payload = UNIFORM.encode(weight.reshape(-1).view(np.uint32), F32, weight.shape, given)
    back = UNIFORM.decode(memoryview(payload), F32, weight.shape, {})
    return payload, back.view(np.float32).reshape(weight.shape)


def curve(weight: np.ndarray, known: Moments, **given: Any) -> Any:
    """log₂ error of the outputs as a function of bits a number."""
    points = []
    for step in 2.0 ** np.arange(-5, 2.1, 0.5):
        payload, back = coded(weight, step=step, **given)
        points.append((8 * len(payload) / weight.size, np.log2(known.error(weight, back))))
    bits, errors = np.array(sorted(points)).T
    return lambda at: np.interp(at, bits, errors)


@pytest.mark.parametrize(
    ("shape", "axes"), [((192, 128), (1,)), ((128, 192), (0,)), ((96, 14, 3, 3), (1, 2, 3))]
)
def test_outputs_at_equal_bytes(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    weight = heavy(*shape)
    features = int(np.prod([shape[a] for a in axes]))
    hessian = skewed(features)
    known = Moments(hessian, 1, axes)
    plain, better = curve(weight, known), curve(weight, known, **known.settings())
    # What feeding back gains is 1 / (diagonal of the inverse's factor)² over the diagonal of the moments, 1 in the
    # mean; a step for each input, its arithmetic mean over the geometric one.
    ideal = np.log2(get_factor(hessian, 0.01).diagonal()).mean()
    assert ideal > 1.4
    for bits in (1, 1.5, 2, 3, 4, 5, 6):
        assert plain(bits) - better(bits) > ideal - (0.7 if bits < 2 else 0.4 if bits < 3 else 0.15)


@pytest.mark.parametrize("axes", [(0,), (1,)])
@pytest.mark.parametrize("decay", [0.9, 0.9999])
def test_as_the_method_without_short_cuts(axes: tuple[int, ...], decay: float) -> None:
    """Optimal brain surgery column by column, with an inverse from which each column that is done is eliminated."""
    weight, hessian, step = heavy(48, 48), skewed(48, decay=decay), 0.4
    payload, back = coded(weight, step=step, hessian=hessian, input_axes=list(axes), damping=0.02)
    head = struct.unpack("<d16bB", payload[:HEAD])
    offsets = np.append(np.array(head[1:-1]) / 256, 0.0)
    steps = np.full(48, step)
    if head[-1] & 0x80:
        found, steps, _ = read_steps(memoryview(payload)[HEAD:], step, weight.shape)
        assert found == axes
    assert bool(head[-1] & 0x80) == (decay == 0.9)
    inverse = np.linalg.inv(hessian + 0.02 * np.trace(hessian) / 48 * np.eye(48))
    matrix = as_matrix(weight.astype(np.float64), axes).copy()
    expected = np.empty_like(matrix)
    for j in range(48):
        multiples = np.rint(matrix[:, j] / steps[j])
        small = np.minimum(np.abs(multiples), 16).astype(int)
        expected[:, j] = np.sign(multiples) * (np.abs(multiples) + offsets[small]) * steps[j]
        matrix -= np.outer((matrix[:, j] - expected[:, j]) / inverse[j, j], inverse[j])
        inverse = inverse - np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    np.testing.assert_allclose(back, from_matrix(expected, weight.shape, axes), rtol=1e-6)


def test_every_input_costs_the_outputs_as_much() -> None:
    hessian = np.diag(4.0 ** -np.arange(8.0)).repeat(8, 0).repeat(8, 1) * np.eye(64)
    payload, _ = coded(heavy(256, 64), step=0.01, hessian=hessian, input_axes=[1], damping=0.0)
    _, steps, _ = read_steps(memoryview(payload)[HEAD:], 0.01, (256, 64))
    np.testing.assert_allclose(steps * hessian.diagonal() ** 0.5, 0.01 * 2.0**-3.5, rtol=2**0.125 - 1)
    assert np.exp(np.log(steps).mean()) == pytest.approx(0.01)


@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    axis=st.integers(0, 1),
    name=st.sampled_from(["F32", "BF16", "F16", "F64", "F8_E4M3"]),
    decay=st.floats(0.3, 1),
    step=st.floats(1e-3, 10),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_any_matrix(
    shape: tuple[int, int], axis: int, name: str, decay: float, step: float, seed: int
) -> None:
    form = get_format(name)
    weight = from_float(np.random.default_rng(seed).normal(size=shape).astype(np.float32), form)
    values = to_float(weight.reshape(-1), form).astype(np.float64).reshape(shape)
    hessian = skewed(shape[axis], seed, decay)
    given = {"step": step, "hessian": hessian, "input_axes": [axis]}
    payload = UNIFORM.encode(weight.reshape(-1), form, shape, given)
    assert len(payload) <= UNIFORM.size_bound(form, weight.size, given)
    back = UNIFORM.decode(memoryview(payload), form, shape, {})
    assert back.dtype == form.unsigned
    assert UNIFORM.may_hold(len(payload), form, weight.size)
    found = to_float(back, form).astype(np.float64).reshape(shape)
    assert np.isfinite(found).all()
    if name in ("F32", "F64"):
        # With steps that are short beside the numbers the outputs are nearer than without any numbers at all.
        lost = Moments(hessian, 1, (axis,)).error(values, found)
        assert lost <= 1 or step > 0.1


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"hessian": np.eye(4)}, "hessian: got the shape"),
        ({"hessian": np.full((6, 6), np.nan)}, "hessian: got a matrix that is not a second moment"),
        ({"hessian": -np.eye(6)}, "hessian: got a matrix that is not a second moment"),
        ({"hessian": np.eye(6) - 3}, "hessian: got"),
        ({"hessian": np.eye(6), "damping": -1}, "damping: got -1"),
        ({"hessian": np.eye(6), "damping": "much"}, "damping: got 'much'"),
        ({"hessian": np.eye(6), "input_axes": [2]}, "input_axes: got"),
        ({"hessian": np.eye(6), "input_axes": 1}, "input_axes: got"),
    ],
)
def test_bad_settings(given: dict[str, Any], named: str) -> None:
    with pytest.raises(CompressError, match=f"^{named}"):
        coded(heavy(5, 6), step=0.1, **given)


def test_what_cannot_be_rounded() -> None:
    weight = heavy(5, 6)
    weight[2, 3] = np.inf
    with pytest.raises(CompressError, match="NaN or infinite"):
        coded(weight, step=0.1, hessian=np.eye(6))
    with pytest.raises(CompressError, match=r"integers|floats|I32"):
        UNIFORM.encode(
            np.zeros(30, np.uint32), get_format("I32"), (5, 6), {"step": 1.0, "hessian": np.eye(6)}
        )
    with pytest.raises(CompressError, match="step: got 1e-30, which is too small"):
        coded(heavy(5, 6), step=1e-30, hessian=np.eye(6))
    with pytest.raises(CompressError, match="step: got 1e-290, which is too small"):
        coded(heavy(5, 6) * 1e30, step=1e-290, hessian=np.eye(6))


def test_steps_of_inputs_that_are_too_small_leave_the_same_step_for_all() -> None:
    weight = np.clip(heavy(64, 8), -3, 3)
    payload, back = coded(weight, step=1e-18, hessian=np.diag([1.0] + [1e-4] * 7), damping=0.0)
    assert not payload[HEAD - 1] & 0x80
    np.testing.assert_array_equal(back, weight)


@pytest.mark.parametrize("scale", [1e-320, 1e-310, 1e-200, 1e200, 1e306])
def test_the_scale_of_moments_does_not_matter(scale: float) -> None:
    weight, hessian = heavy(64, 24), skewed(24)
    _, expected = coded(weight, step=0.3, hessian=hessian)
    _, back = coded(weight, step=0.3, hessian=hessian / hessian.max() * scale)
    if scale > 1e-300:
        np.testing.assert_array_equal(back, expected)
    assert Moments(hessian, 1).error(weight, back) < 1.2 * Moments(hessian, 1).error(weight, expected)


@pytest.mark.parametrize("name", ["BF16", "F16", "F8_E4M3", "F8_E5M2"])
def test_what_the_type_rounds_is_made_up_for_too(name: str) -> None:
    """Near the type's own precision plain rounding loses little or nothing: it is never better by much."""
    form, hessian = get_format(name), skewed(96)
    weight = from_float(heavy(128, 96).reshape(-1), form)
    values = to_float(weight, form).astype(np.float64).reshape(128, 96)

    def points(**given: Any) -> tuple[np.ndarray, np.ndarray]:
        out = []
        for step in 2.0 ** np.arange(-9.0, 0.1, 0.5):
            payload = UNIFORM.encode(weight, form, (128, 96), {"step": step, **given})
            back = to_float(UNIFORM.decode(memoryview(payload), form, (128, 96), {}), form)
            error = Moments(hessian, 1).error(values, back.reshape(128, 96))
            out.append((8 * len(payload) / weight.size, np.log2(error + 1e-9)))
        bits, errors = np.array(sorted(out)).T
        return bits, np.minimum.accumulate(errors)

    plain, better = points(), points(hessian=hessian)
    at = np.arange(2, min(plain[0][-1], better[0][-1]), 0.5)
    gained = np.interp(at, *plain) - np.interp(at, *better)
    assert (gained > -0.1).all()
    assert (gained[at <= form.mantissa] > 0.3).all()


def test_few_numbers_with_steps_of_their_own(tmp_path) -> None:
    """What is stored as it is has a size that says how much it is, but for the steps."""
    for rows, features in ((12, 4), (3, 3), (2, 30), (30, 2), (1, 8), (1, 1)):
        weight = np.random.default_rng(0).normal(size=(rows, features)).astype(np.float32)
        given = {"step": 0.1, "hessian": np.diag(100.0 ** -np.arange(features))}
        payload, back = coded(weight, **given)
        assert UNIFORM.may_hold(len(payload), F32, weight.size)
        assert len(payload) <= UNIFORM.size_bound(F32, weight.size, given)
        with ArchiveWriter(tmp_path / "a.capi") as archive:
            bits = weight.reshape(-1).view(np.uint32)
            archive.add("w", bits, F32, weight.shape, codec="uniform", settings=given)
        with Archive(tmp_path / "a.capi") as archive:
            np.testing.assert_array_equal(archive.read("w").view(np.float32).reshape(back.shape), back)
    assert not UNIFORM.may_hold(40, F32, 1 << 30)


def test_chunks_of_a_vector_and_of_moments_as_lists(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(type(UNIFORM), "chunk", 24)
    for shape, hessian in (((12, 4), skewed(12).tolist()), ((60,), skewed(60))):
        given: dict[str, Any] = {"step": 0.1, "hessian": hessian}
        if len(shape) > 1:
            given["input_axes"] = [0]
        weight = heavy(*shape)
        with ArchiveWriter(tmp_path / "a.capi") as archive:
            bits = weight.reshape(-1).view(np.uint32)
            archive.add("w", bits, F32, shape, codec="uniform", settings=given)
        with Archive(tmp_path / "a.capi") as archive:
            assert len(archive["w"].chunks) > 1
            back = archive.read("w").view(np.float32).reshape(shape)
        assert np.abs(back - weight).max() < 5


def test_inputs_that_never_occur() -> None:
    weight, hessian = heavy(64, 32), skewed(32)
    nothing = np.zeros((32, 32))
    _, plain = coded(weight, step=0.3)
    _, blind = coded(weight, step=0.3, hessian=nothing)
    np.testing.assert_array_equal(blind, plain)
    hessian[5] = hessian[:, 5] = 0
    _, back = coded(weight, step=0.3, hessian=hessian)
    assert Moments(hessian, 1).error(weight, back) < Moments(hessian, 1).error(weight, plain)


@pytest.mark.parametrize("axes", [(0,), (1,)])
def test_in_an_archive_moments_are_used_and_not_kept(tmp_path, monkeypatch, axes: tuple[int, ...]) -> None:
    weight, hessian = heavy(96, 96), skewed(96, decay=0.9)
    known = {"step": 0.25, "hessian": hessian, "input_axes": list(axes)}
    errors = []
    for chunk in (1 << 20, 30 * 96):
        monkeypatch.setattr(type(UNIFORM), "chunk", chunk)
        with ArchiveWriter(tmp_path / "a.capi") as archive:
            archive.add(
                "w", weight.reshape(-1).view(np.uint32), F32, weight.shape, codec="uniform", settings=known
            )
        with Archive(tmp_path / "a.capi") as archive:
            assert archive["w"].settings == {"step": 0.25}
            assert len(archive["w"].chunks) == (1 if chunk > 96 * 96 else 4)
            back = archive.read("w").view(np.float32).reshape(weight.shape)
            rows = archive.read("w", slice(10, 50)).view(np.float32).reshape(40, 96)
        np.testing.assert_array_equal(rows, back[10:50])
        errors.append(Moments(hessian, 1, axes).error(weight, back))
    _, plain = coded(weight, step=0.25)
    assert errors[0] < 0.5 * Moments(hessian, 1, axes).error(weight, plain)
    # Chunks along the inputs know nothing of one another.
    assert errors[1] < (0.5 if axes == (1,) else 1) * Moments(hessian, 1, axes).error(weight, plain)


def test_rows_that_are_cut_are_rounded_as_they_are(tmp_path, monkeypatch) -> None:
    weight = heavy(4, 600)
    monkeypatch.setattr(writing, "CHUNK", 128)
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        known = {"step": 0.25, "hessian": skewed(4), "input_axes": [0]}
        archive.add(
            "w", weight.reshape(-1).view(np.uint32), F32, weight.shape, codec="uniform", settings=known
        )
    with Archive(tmp_path / "a.capi") as archive:
        back = archive.read("w").view(np.float32).reshape(weight.shape)
    assert np.abs(back - weight).max() <= 0.25


def test_tampered_steps() -> None:
    weight = heavy(32, 64)
    payload, _ = coded(weight, step=0.25, hessian=skewed(64, decay=0.8), input_axes=[1])
    assert payload[HEAD - 1] & 0x80
    rng, shape = np.random.default_rng(0), weight.shape
    for at in range(HEAD - 1, HEAD + 80):
        for value in {payload[at] ^ 1, payload[at] ^ 0x80, int(rng.integers(256))} - {payload[at]}:
            changed = bytearray(payload)
            changed[at] = value
            try:
                back = UNIFORM.decode(memoryview(bytes(changed)), F32, shape, {})
            except DamagedError:
                continue
            assert back.shape == (weight.size,)
    for end in range(HEAD, HEAD + 90):
        with pytest.raises(DamagedError):
            UNIFORM.decode(memoryview(payload[:end]), F32, shape, {})
    # A step beyond all numbers.
    far = struct.pack("<d", 1.7e308) + payload[8:]
    with pytest.raises(DamagedError, match="steps are invalid"):
        UNIFORM.decode(memoryview(far), F32, shape, {})
    # Inputs along axes that the tensor has not.
    axes = payload[:HEAD] + b"\x01\x07" + payload[HEAD + 2 :]
    with pytest.raises(DamagedError, match="input axes"):
        UNIFORM.decode(memoryview(axes), F32, shape, {})


def test_factors_are_of_what_a_hessian_holds_and_go_with_it(monkeypatch) -> None:
    made = []
    real = gptq._factor
    monkeypatch.setattr(gptq, "_factor", lambda *given: made.append(1) or real(*given))
    kept = gptq._FACTORS._kept
    gc.collect()
    hessian, before = skewed(24), len(kept)
    first = get_factor(hessian, 0.01)
    assert get_factor(hessian, 0.01) is first
    assert len(made) == 1
    damped = hessian / np.mean(hessian.diagonal()) + 0.01 * np.eye(24)
    np.testing.assert_allclose(first.T @ first, np.linalg.inv(damped), rtol=1e-7, atol=1e-12)
    assert get_factor(hessian, 0.02) is not first
    hessian *= 2
    np.testing.assert_allclose(get_factor(hessian, 0.01), first)
    assert len(made) == 3
    assert len(kept) == before + 2
    del hessian
    gc.collect()
    assert len(kept) == before
    small = gptq._Factors(2000)
    hessians = [skewed(8, seed) for seed in range(9)]
    for one in hessians:
        small.get(one, 0.01)
    assert 0 < small._size <= 2000
    assert small._size == sum(f.nbytes for *_, f in small._kept.values())
    large = skewed(20)
    kept_one = small.get(large, 0.01)
    assert small.get(large, 0.01) is kept_one
    assert len(small._kept) == 1
