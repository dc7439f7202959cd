"""Codes of fixed width: their errors, sizes, parts, and the same bytes from every executor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.codecs.fixed import INT4, INT8, NF4_CODEC, Fixed
from capibara.compress.codecs.fixed_search import NF4, get_executor, multipliers
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import get_format, to_float

F32 = get_format("F32")
CODECS = [INT8, INT4, NF4_CODEC]
each_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda c: c.kind.name)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def encode(codec: Fixed, x: np.ndarray, **chosen: Any) -> bytes:
    return codec.encode(x.reshape(-1).view("<u4"), F32, x.shape, chosen)


def there_and_back(codec: Fixed, x: np.ndarray, **chosen: Any) -> tuple[np.ndarray, int]:
    payload = encode(codec, x, **chosen)
    assert len(payload) <= codec.size_bound(F32, x.size, chosen)
    kept = {k: v for k, v in chosen.items() if k not in ("hessian", "input_axes")}
    return codec.decode(memoryview(payload), F32, x.shape, kept).view("<f4").reshape(x.shape), len(payload)


def relative(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(y - x) / np.linalg.norm(x))


def absolute_maximum(x: np.ndarray, levels: np.ndarray, group: int) -> float:
    """The relative error where each group's largest number sets its scale, as it is usually done."""
    g = x.reshape(-1, group).astype(np.float64)
    scale = np.abs(g).max(1, keepdims=True) / np.abs(levels).max()
    nearest = np.abs(g[..., None] / scale[..., None] - levels).argmin(-1)
    return relative(g, levels[nearest] * scale)


@pytest.mark.parametrize(
    ("codec", "levels", "gain"),
    [(INT4, np.arange(-8.0, 8), 0.88), (NF4_CODEC, NF4 / 1024.0, 0.90)],
    ids=["int4", "nf4"],
)
def test_searched_scales_are_better_than_the_largest_number(
    codec: Fixed, levels: np.ndarray, gain: float
) -> None:
    x = normal(64, 256)
    y, size = there_and_back(codec, x)
    assert size * 8 / x.size < 4.25 + 0.03
    assert relative(x, y) < gain * absolute_maximum(x, levels, 32)


def test_four_bits_cost_what_they_say() -> None:
    payload = encode(INT4, normal(64, 256))
    # Codes, scales and 200 bits of header.
    assert 64 * 128 < len(payload) <= 64 * 128 + 64 * 8 + 25


def test_fitted_levels_are_better_than_those_of_the_bell_curve() -> None:
    x = normal(64, 256)
    assert relative(x, there_and_back(NF4_CODEC, x)[0]) < relative(
        x, there_and_back(NF4_CODEC, x, levels="nf4")[0]
    )


def test_eight_bits_are_within_half_a_scale() -> None:
    x = normal(8, 128)
    payload = encode(INT8, x, group=32)
    parts = INT8.parts(memoryview(payload), F32, x.shape, {})
    y = INT8.decode(memoryview(payload), F32, x.shape, {}).view("<f4").reshape(x.shape)
    scale = np.repeat(np.abs(parts.scales), 32, 1)
    # Scales may cut a tenth off, where that is better for the sum.
    inside = np.abs(x) < 127 * scale
    assert inside.mean() > 0.95
    assert (np.abs(y - x)[inside] <= scale[inside] * 0.52).all()


@each_codec
@pytest.mark.parametrize("chosen", [{}, {"coded": True}, {"group": 24}, {"axis": 0}, {"outliers": 0.02}])
def test_parts_are_what_is_decoded(codec: Fixed, chosen: dict[str, Any]) -> None:
    x = normal(48, 70)
    payload = memoryview(encode(codec, x, **chosen))
    parts = codec.parts(payload, F32, x.shape, chosen)
    values = parts.dequantise().reshape(-1)
    values[parts.positions] = parts.exact.view("<f4")
    values = values.reshape(-1, parts.length)
    decoded = codec.decode(payload, F32, x.shape, chosen).view("<f4").reshape(x.shape)
    np.testing.assert_array_equal(values.T if parts.turned else values, decoded)
    assert parts.turned == ("axis" in chosen)
    assert relative(x, decoded) < (0.01 if codec is INT8 else 0.12)


@each_codec
def test_entropy_coding_changes_the_size_alone(codec: Fixed) -> None:
    x = normal(64, 256)
    plain, size = there_and_back(codec, x)
    coded, smaller = there_and_back(codec, x, coded=True)
    np.testing.assert_array_equal(plain, coded)
    # Fitted levels are nearly equally frequent: there is nothing to gain, and a table to store.
    assert smaller < {"int8": 0.98, "int4": 0.98, "nf4": 1.006}[codec.kind.name] * size


def test_a_smallest_step_saves_bits_in_groups_of_small_numbers() -> None:
    x = normal(64, 256) * np.exp2(-(np.arange(64, dtype=np.float32) % 6))[:, None]
    plain, size = there_and_back(INT8, x, coded=True, group=16)
    stepped, smaller = there_and_back(INT8, x, coded=True, group=16, step=0.012)
    assert smaller < 0.85 * size
    assert np.abs(stepped - x).max() < np.abs(x).max() / 127
    assert relative(x, stepped) < 2 * relative(x, plain)


@each_codec
@pytest.mark.parametrize("form", ["F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"])
def test_every_float_format(codec: Fixed, form: str) -> None:
    from capibara.compress.formats import from_float

    which = get_format(form)
    x = normal(16, 64) / 4
    bits = from_float(x.astype(np.float64) if form == "F64" else x, which).reshape(-1)
    payload = codec.encode(bits, which, x.shape, {})
    decoded = codec.decode(memoryview(payload), which, x.shape, {})
    assert decoded.dtype == which.unsigned
    assert relative(to_float(bits, which), to_float(decoded, which)) < 0.1


@each_codec
@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=3).map(tuple),
    group=st.sampled_from([4, 7, 32, 1024]),
    scale=st.sampled_from([0.0, 1e-20, 1.0, 1e20]),
    coded=st.booleans(),
)
def test_any_shape(codec: Fixed, shape: tuple[int, ...], group: int, scale: float, coded: bool) -> None:
    x = (normal(*shape) * np.float32(scale)).astype(np.float32).reshape(shape)
    y, _ = there_and_back(codec, x, group=group, coded=coded)
    assert y.shape == x.shape
    assert np.abs(y - x).max(initial=0) <= 0.4 * np.abs(x).max(initial=0)


@each_codec
@pytest.mark.parametrize("chosen", [{}, {"group": 20}, {"levels": "nf4"}, {"axis": 0, "group": 128}])
def test_every_executor_gives_the_same_bytes(codec: Fixed, chosen: dict[str, Any]) -> None:
    if "levels" in chosen and codec is not NF4_CODEC:
        chosen = {}
    pytest.importorskip("torch")
    pytest.importorskip("jax")
    x = normal(40, 72) * np.exp(normal(40, 1, seed=1) * 3)
    expected = encode(codec, x, **chosen)
    for executor in ("torch", "jax"):
        assert encode(codec, x, **chosen, executor=executor) == expected


def test_the_search_finds_the_best_of_the_scales() -> None:
    x = normal(6, 32)
    payload = encode(INT4, x)
    parts = INT4.parts(memoryview(payload), F32, x.shape, {})
    top = np.frombuffer(payload, "<f4", 1, 4)[0]
    candidates = np.float64(top) * multipliers(payload[1]).astype(np.float64)
    candidates = np.concatenate([candidates, -candidates])
    codes = np.clip(np.rint(x[:, None].astype(np.float64) / candidates[:, None]), -8, 7)
    errors = np.square(codes * candidates[:, None] - x[:, None]).sum(-1)
    found = np.square(parts.dequantise() - x.astype(np.float64)).sum(-1)
    # Integers of fifteen bits decide.
    assert (found <= errors.min(1) * 1.002).all()


def test_what_is_not_finite_stays() -> None:
    x = normal(32, 64)
    x[3, 5], x[4, 4], x[31, 63] = np.nan, np.inf, -np.inf
    x.reshape(-1).view("<u4")[7] = 0x7FA12345  # a NaN with a payload
    y, _ = there_and_back(INT4, x)
    bad = ~np.isfinite(x)
    np.testing.assert_array_equal(x.view("<u4")[bad], y.view("<u4")[bad])
    assert relative(x[~bad], y[~bad]) < 0.1


def test_outliers_are_kept_exactly() -> None:
    x = normal(64, 64)
    x[np.arange(0, 64, 7), np.arange(0, 64, 7)] = 40.0
    plain, _ = there_and_back(INT4, x)
    kept, _ = there_and_back(INT4, x, outliers=0.003)
    assert (kept[x == 40] == 40).all()
    rest = x != 40
    assert relative(x[rest], kept[rest]) < 0.6 * relative(x[rest], plain[rest])


@each_codec
@pytest.mark.parametrize("first", [False, True], ids=["torch's layout", "JAX's layout"])
def test_error_feedback_lowers_the_error_of_the_output(codec: Fixed, first: bool) -> None:
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(500, 64)) @ rng.normal(size=(64, 64))
    hessian = inputs.T @ inputs / len(inputs)
    x = normal(48, 64)
    weight = np.ascontiguousarray(x.T) if first else x
    axes = [0] if first else [1]
    fed, size = there_and_back(codec, weight, hessian=hessian, input_axes=axes, group=32)
    plain, plain_size = there_and_back(codec, weight, group=32, axis=0 if first else -1)

    def error(y: np.ndarray) -> float:
        return float(np.linalg.norm(inputs @ ((y.T if first else y) - x).T))

    assert error(fed) < 0.8 * error(plain)
    assert abs(size - plain_size) < 0.02 * plain_size


def test_inputs_without_correlation_change_nothing_much() -> None:
    x = normal(32, 64)
    fed, _ = there_and_back(INT4, x, hessian=np.eye(64))
    assert relative(x, fed) == pytest.approx(relative(x, there_and_back(INT4, x)[0]), rel=0.02)


def test_inputs_that_never_occur() -> None:
    hessian = np.diag(np.repeat([1.0, 0.0], 32))
    y, _ = there_and_back(INT4, normal(8, 64), hessian=hessian)
    assert relative(normal(8, 64), y) < 0.2
    y, _ = there_and_back(INT4, normal(8, 64), hessian=np.zeros((64, 64)))
    assert relative(normal(8, 64), y) < 0.2


@pytest.mark.parametrize(
    ("codec", "chosen", "message"),
    [
        (INT8, {"group": 3}, "group: got 3, expected an integer from 4 to 1024"),
        (INT8, {"group": True}, "group: got True"),
        (INT4, {"group": 32.0}, "group: got 32.0"),
        (INT4, {"gruop": 32}, "Did you mean 'group'"),
        (INT4, {"step": 0.1}, "not a setting of int4"),
        (INT8, {"step": 0}, "step: got 0"),
        (INT8, {"levels": "nf4"}, "not a setting of int8"),
        (NF4_CODEC, {"levels": "best"}, "levels: got 'best'"),
        (INT8, {"coded": 1}, "coded: got 1"),
        (INT8, {"axis": 1}, "axis: got 1"),
        (INT8, {"outliers": 0.5}, "outliers: got 0.5"),
        (INT8, {"executor": "numpi"}, "Did you mean 'numpy'"),
        (INT8, {"executor": 3}, "executor: got 3"),
        (INT4, {"hessian": np.eye(3)}, r"hessian: got the shape \(3, 3\), expected \(64, 64\)"),
        (INT4, {"hessian": np.full((64, 64), np.nan)}, "hessian: got a matrix that is not a second moment"),
        (INT4, {"hessian": np.eye(64) - 40}, "not positive|negative"),
        (INT4, {"hessian": np.eye(64), "input_axes": [0, 1]}, "input_axes"),
    ],
)
def test_settings_that_are_none(codec: Fixed, chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressError, match=message):
        encode(codec, normal(8, 64), **chosen)


def test_what_cannot_be_rounded() -> None:
    with pytest.raises(CompressError, match="I32"):
        INT4.encode(np.zeros(64, "<u4"), get_format("I32"), (64,), {})
    with pytest.raises(CompressError, match="I8"):
        INT4.encode(np.zeros(0, "u1"), get_format("I8"), (0, 4), {})
    with pytest.raises(CompressError, match="NaN or infinite"):
        encode(INT4, np.full((8, 8), np.nan, np.float32))
    with pytest.raises(CompressError, match="too small"):
        encode(INT8, normal(8, 64) * np.float32(1e20), step=1e-30)
    with pytest.raises(CompressError, match="axis"):
        encode(INT4, normal(64), axis=0)
    huge = np.full((2, 32), 1e300)
    with pytest.raises(CompressError, match="largest scale"):
        INT4.encode(huge.reshape(-1).view("<u8"), get_format("F64"), huge.shape, {})


@each_codec
@pytest.mark.parametrize("chosen", [{}, {"coded": True, "outliers": 0.02}])
def test_damage_is_found_or_harmless(codec: Fixed, chosen: dict[str, Any]) -> None:
    rng = np.random.default_rng(5)
    x = normal(12, 40)
    payload = encode(codec, x, **chosen)
    found = 0
    for _ in range(150):
        data = bytearray(payload)
        data[rng.integers(len(data))] ^= 1 << rng.integers(8)
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        try:
            out = codec.decode(memoryview(bytes(data)), F32, x.shape, {})
        except DamagedError:
            found += 1
        else:
            assert out.shape == (x.size,)
    assert found > 30


def test_executors_have_names() -> None:
    assert get_executor("numpy") is get_executor("numpy")
    with pytest.raises(CompressError, match="executor"):
        get_executor("cuda")
