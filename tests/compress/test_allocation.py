"""Allocation against an oracle that tries everything, and on tensors whose best share is known."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.allocation import Survey, allocate, check_ratio, estimate, survey
from capibara.compress.calibration.activations import Metric
from capibara.compress.codecs.protocol import get_codec
from capibara.compress.container import Archive, ArchiveWriter, writer
from capibara.compress.curves import Curve, Point, coded_size, measure, measure_curve
from capibara.compress.errors import ArchiveError, CompressError
from capibara.compress.formats import get_format
from capibara.compress.models.source import Tensors, find_tied
from capibara.compress.sensitivity import by_scale
from capibara.compress.writing import add_tensors, compare

F32 = get_format("F32")


def source_of(arrays: dict[str, np.ndarray]) -> Tensors:
    return Tensors(
        {n: (F32, a.shape) for n, a in arrays.items()}, lambda n: arrays[n].reshape(-1).view(np.uint32)
    )


def normal(shape: tuple[int, ...], scale: float = 1.0, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(np.float32)


class _Nothing:
    def __iter__(self):
        return iter(())

    def read(self, name: str) -> np.ndarray:
        raise KeyError(name)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_choice_of_points_within_the_size_is_better_than_the_hull_allows(data):
    """Of all combinations (there are few) none of at most the bytes of the last on the convex hull has less error.

    Between that one and the limit a tensor's points have gaps, and what fills them need not be the best.
    """
    number = st.floats(0.1, 100)
    curves = {}
    for i in range(data.draw(st.integers(1, 3))):
        points = [Point("lossless", {}, 200.0, 0.0)]
        points += [
            Point("int8", {}, data.draw(number), data.draw(number))
            for _ in range(data.draw(st.integers(1, 3)))
        ]
        curves[f"t{i}"] = Curve(10, 1.0, points, weight=1.0)
    found = Survey(_Nothing(), curves, {}, 200 * len(curves), 0.0)
    weights = {n: data.draw(number) for n in curves}
    target = data.draw(st.floats(1.05, 20))
    limit = found.total / target
    every = [
        dict(zip(curves, c, strict=True)) for c in itertools.product(*(c.points for c in curves.values()))
    ]
    fits = [c for c in every if sum(p.size for p in c.values()) <= limit * 1.02]

    def cost(chosen):
        return sum(weights[n] * p.error for n, p in chosen.items())

    try:
        got = allocate(found, target, weights=weights)
    except CompressError:
        assert not fits or min(sum(p.size for p in c.values()) for c in every) > limit
        return
    assert got.size <= limit * 1.02
    chosen = {n: got.points.get(n, curves[n].points[0]) for n in curves}
    hull: list[tuple[float, float]] = []
    for x, y in sorted((sum(p.size for p in c.values()), cost(c)) for c in every):
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) <= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-2][0]):
            hull.pop()
        if not hull or y < hull[-1][1]:
            hull.append((x, y))
    last = max((x for x, _ in hull if x <= limit), default=0.0)
    assert not any(
        sum(p.size for p in c.values()) <= last and cost(c) < cost(chosen) * (1 - 1e-9) - 1e-9 for c in every
    )


def test_the_file_meets_the_ratio_and_the_error_is_near_the_one_predicted(tmp_path):
    arrays = {"a": normal((96, 128)), "b": normal((128, 64), 0.05, 1), "v": normal((33,))}
    source = source_of(arrays)
    found = survey(source, codecs=["uniform"])
    for ratio in (3.0, 5.0, 9.0):
        chosen = allocate(found, ratio)
        with ArchiveWriter(tmp_path / "a.capi") as archive:
            add_tensors(archive, source, {}, chosen)
        size = (tmp_path / "a.capi").stat().st_size
        assert abs(size * ratio / found.total - 1) < 0.02
        assert abs(size - chosen.size) < 40
        errors, lost, whole = compare(tmp_path / "a.capi", source)
        assert errors["v"] == 0
        kept = sum(float((arrays[n].astype(np.float64) ** 2).sum()) for n in "ab")
        assert (lost / kept) ** 0.5 == pytest.approx(chosen.error, rel=0.05)
        assert whole > kept


def test_equal_weights_give_equal_steps_and_a_tensor_that_counts_more_a_smaller_one():
    arrays = {"a": normal((128, 128)), "b": normal((128, 128), seed=1)}
    found = survey(source_of(arrays), codecs=["uniform"])
    same = allocate(found, 6.0)
    steps = [same.points[n].settings["step"] for n in "ab"]
    assert steps[0] == pytest.approx(steps[1], rel=0.1)
    other = allocate(found, 6.0, weights={"a": 16.0, "b": 1.0})
    assert other.points["b"].settings["step"] > 2.5 * other.points["a"].settings["step"]


def test_without_data_matrices_of_the_same_numbers_get_more_bits_the_smaller_they_are():
    arrays = {"table": normal((4096, 64)), "layer": normal((64, 256), seed=1)}
    found = survey(source_of(arrays), codecs=["uniform"])
    weights = by_scale(found)
    chosen = allocate(found, 6.0, weights=weights)
    assert weights["layer"] / weights["table"] == pytest.approx(16**0.25, rel=0.01)
    # A step goes with the inverse square root of a weight; what is left of a file goes to one of them.
    steps = {n: chosen.points[n].settings["step"] for n in arrays}
    assert 1.3 < steps["table"] / steps["layer"] < 2.5
    even = allocate(found, 6.0)
    assert chosen.size == pytest.approx(even.size, rel=0.01)
    errors = [{n: a.points[n].error / found.curves[n].square for n in arrays} for a in (chosen, even)]
    assert sum(errors[0].values()) < 0.9 * sum(errors[1].values())


def test_auto_is_as_good_as_each_codec_at_equal_bytes():
    rng = np.random.default_rng(3)
    thin = (rng.normal(size=(80, 3)) @ rng.normal(size=(3, 64))).astype(np.float32)
    spread = normal((80, 64), seed=5) * np.exp(rng.normal(size=(80, 1)) * 2).astype(np.float32)
    source = source_of({"thin": thin, "spread": spread, "plain": normal((80, 64), seed=6)})
    everything = survey(source)
    tried = 0
    for codec in ("uniform", "sparse", "low_rank", "int8", "int4", "nf4"):
        try:
            one = survey(source, codecs=[codec])
        except ArchiveError:
            continue  # not one of this version's codecs
        for ratio in (3.9, 7.0):
            try:
                alone = allocate(one, ratio)
            except CompressError:
                continue
            tried += 1
            best = allocate(everything, everything.total / alone.size)
            assert best.error <= alone.error * 1.02, (codec, ratio)
    assert tried >= 3


def test_what_is_small_enough_without_loss_loses_nothing():
    zeros = np.zeros((64, 64), np.float32)
    zeros[0, :3] = 1.5
    found = survey(source_of({"z": zeros}))
    assert allocate(found, 4.0).points == {}


def test_what_may_not_lose_stays_exact():
    arrays = {
        "head.w": normal((80, 80)), "w": normal((80, 80)), "small": normal((4, 4)),
        "nan": np.where(np.eye(80) > 0, np.nan, normal((80, 80))).astype(np.float32),
    }  # fmt: skip
    some = survey(source_of(arrays), exclude=("head.*",), codecs=["int8"])
    assert set(some.curves) == {"w", "nan"}  # this codec keeps what is not finite
    found = survey(source_of(arrays), exclude=("head.*",), codecs=["uniform"])
    assert set(found.curves) == {"w"}
    assert set(allocate(found, 1.6).points) == {"w"}


def test_ratios_that_cannot_be_met_name_one_that_can():
    found = survey(source_of({"w": normal((80, 80)), "v": normal((2000,))}), codecs=["uniform"])
    with pytest.raises(
        CompressError, match=r"ratio: 40 cannot be met.*Remedy: one up to ([\d.]+)\."
    ) as error:
        allocate(found, 40)
    best = float(str(error.value).rsplit("up to ", 1)[1].rstrip("."))
    assert allocate(found, best).size <= found.total / best * 1.02
    assert estimate(found, 40, weights={}) is None


@pytest.mark.parametrize("ratio", [1, 0.5, -2, True, "4", float("nan"), float("inf"), None])
def test_ratios_that_are_none(ratio):
    with pytest.raises(CompressError, match="ratio: got"):
        check_ratio(ratio)


def test_an_unknown_codec_is_named():
    with pytest.raises(ArchiveError, match="'unifrom' is not known here"):
        survey(source_of({"w": normal((80, 80))}), codecs=["unifrom"])


def test_a_curve_is_near_what_coding_gives():
    array = normal((64, 256))
    bits = array.reshape(-1).view(np.uint32)
    curve = measure_curve(bits, F32, array.shape, ["uniform"], lossless=60000)
    for step in (0.9, 0.21, 0.03):
        real = measure("uniform", {"step": step}, bits, F32, array.shape)
        i = int(np.argmin(np.abs(curve.log_steps - np.log2(step))))
        nearest = measure("uniform", {"step": 2.0 ** curve.log_steps[i]}, bits, F32, array.shape)
        assert curve.sizes[i] == pytest.approx(nearest.size, rel=0.03)
        assert curve.errors[i] == pytest.approx(nearest.error, rel=0.05)
        assert real.error == pytest.approx(nearest.error, rel=0.2)


def test_errors_are_those_of_a_layers_outputs_where_its_inputs_are_known():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(500, 64)) * np.exp(rng.normal(size=64))
    second = inputs.T @ inputs / len(inputs)
    weight = normal((80, 64))
    bits = weight.reshape(-1).view(np.uint32)
    point = measure("uniform", {"step": 0.3}, bits, F32, weight.shape, Metric(second, (1,)))
    payload = get_codec("uniform").encode(bits, F32, weight.shape, {"step": 0.3})
    back = get_codec("uniform").decode(memoryview(payload), F32, weight.shape, {}).view(np.float32)
    wrong = inputs @ (back.reshape(80, 64).astype(np.float64) - weight).T
    expected = (wrong**2).sum() / len(inputs) / (np.trace(second) / 64)
    assert point.error == pytest.approx(expected, rel=1e-6)


def test_tied_parameters_are_tensors_of_the_same_bytes():
    one = normal((40, 40))
    arrays = {
        "a": one,
        "b": one.copy(),
        "c": one.T.copy(),
        "tiny": one[:2, :2].copy(),
        "tiny2": one[:2, :2].copy(),
    }
    assert find_tied(source_of(arrays)) == {"b": "a"}


@pytest.mark.parametrize(
    ("codec", "chosen"), [("lossless", {}), ("uniform", {"step": 0.05}), ("int8", {}), ("nf4", {})]
)
def test_sizes_and_errors_are_those_of_an_archive_that_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, chosen: dict[str, float]
) -> None:
    monkeypatch.setattr(writer, "CHUNK", 5000)
    form = get_format("F32")
    values = np.random.default_rng(3).normal(size=(301, 64)).astype(np.float32)
    bits = values.reshape(-1).view(np.uint32)
    point = measure(codec, chosen, bits, form, values.shape)
    with ArchiveWriter(tmp_path / "a.capi") as archive:
        entry = archive.add("w", bits, form, values.shape, codec=codec, settings=chosen)
    assert len(entry.chunks) == 4
    assert point.size == entry.coded_bytes == coded_size(codec, chosen, bits, form, values.shape)
    with Archive(tmp_path / "a.capi") as archive:
        found = archive.read("w").view(np.float32)
    np.testing.assert_allclose(point.error, np.square(found - values, dtype=np.float64).sum(), rtol=1e-9)
