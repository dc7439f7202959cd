"""The sparse codec works some numbers at a time: its bytes are those of the whole matrix sorted and masked at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.calibration.activations import as_matrix, moments
from capibara.compress.codecs import matrices, nested, pruning, sparse
from capibara.compress.codecs.nested import join, part_of
from capibara.compress.codecs.sparse import SPARSE
from capibara.compress.errors import CompressError, DamagedError
from capibara.compress.formats import FORMATS, NumberFormat, from_float, get_format, to_float

RANDOM = np.random.default_rng(0)
FLOATS = [f.name for f in FORMATS.values() if f.is_float]


def at_once(bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], given: dict[str, Any]) -> bytes:
    """The payload, by sorting all numbers and masks of the whole matrix; without moments."""
    axes = tuple(given.get("input_axes") or (range(1, len(shape)) if len(shape) != 1 else (0,)))
    matrix = np.ascontiguousarray(as_matrix(bits.reshape(shape), axes))
    if "density" in given or "pattern" in given:
        size = np.abs(to_float(matrix, form).astype(np.float64)).reshape(1, -1)
        share = given.get("density", 0.0)
        if "pattern" in given:
            kept, of = map(int, given["pattern"].split(":"))
            size, share = size.reshape(-1, of), kept / of
        order = np.argsort(-size, axis=1, kind="stable")[:, : round(share * size.shape[1])]
        mask = np.zeros(size.shape, bool)
        np.put_along_axis(mask, order, True, axis=1)
        mask = mask.reshape(matrix.shape)
    else:
        mask = matrix != 0
    bitmap = np.packbits(mask.reshape(-1), bitorder="little")
    kept, counts = matrix[mask], mask.sum(1)
    if len(counts) and counts[0] and (counts == counts[0]).all():
        kept = kept.reshape(len(counts), -1)
    inner = {"step": given["step"]} if "step" in given else {}
    values = part_of(kept, form, "uniform" if inner else "lossless", inner, bits=True)
    return join({"axes": axes}, [part_of(bitmap, get_format("U8"), "lossless", {}, bits=True), values])


@pytest.fixture(params=[64, 1 << 18])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (matrices, pruning, sparse):
        monkeypatch.setattr(module, "BLOCK", request.param)
    monkeypatch.setattr(matrices.InOrder.blocks, "__defaults__", (request.param,))


def numbers(form: NumberFormat, count: int, seed: int, levels: int | None) -> np.ndarray:
    """Floats of all sizes, or of few ones, so that many are equal; zeros of both signs among them."""
    random = np.random.default_rng(seed)
    if levels is None:
        values = random.normal(size=count) * np.exp(
            random.normal(size=count) * (2 if form.exponent > 5 else 0.5)
        )
    else:
        values = random.integers(-levels, levels + 1, count).astype(float)
    bits = from_float(values if form.bits == 64 else values.astype(np.float32), form)
    if form.name == "F8_E4M3":
        bits = np.where(np.isfinite(to_float(bits, form)), bits, 0).astype(np.uint8)
    bits[random.random(count) < 0.05] = form.unsigned.type(1 << (form.bits - 1))
    return bits


SHAPES = st.sampled_from(
    [
        (0,),
        (1,),
        (7,),
        (300,),
        (1, 240),
        (240, 1),
        (16, 24),
        (24, 16),
        (12, 4, 5),
        (5, 4, 12),
        (3, 2, 2, 20),
        (0, 4),
        (4, 0),
        (),
    ]
)


@given(
    name=st.sampled_from(FLOATS),
    shape=SHAPES,
    density=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    levels=st.sampled_from([None, 0, 1, 3]),
    turned=st.booleans(),
    step=st.sampled_from([None, 0.25]),
    seed=st.integers(0, 999),
)
@settings(max_examples=150, deadline=None)
@pytest.mark.usefixtures("blocks")
def test_densities(
    name: str,
    shape: tuple[int, ...],
    density: float,
    levels: int | None,
    turned: bool,
    step: float | None,
    seed: int,
) -> None:
    form = get_format(name)
    bits = numbers(form, math.prod(shape), seed, levels)
    given: dict[str, Any] = {"density": density}
    if turned and len(shape) > 1:
        given["input_axes"] = [0]
    if step is not None:
        given["step"] = step
    expected = at_once(bits, form, shape, given)
    assert SPARSE.encode(bits, form, shape, given) == expected
    check_decoding(expected, bits, form, shape, given)


@given(
    name=st.sampled_from(FLOATS),
    shape=st.sampled_from([(16, 24), (24, 36), (240,), (12, 4, 6), (5, 2, 12), (0, 12), (12, 0), (40, 48)]),
    pattern=st.sampled_from(["2:4", "1:2", "1:4", "2:3", "5:6"]),
    levels=st.sampled_from([None, 1, 3]),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
@pytest.mark.usefixtures("blocks")
def test_patterns(name: str, shape: tuple[int, ...], pattern: str, levels: int | None, seed: int) -> None:
    form = get_format(name)
    bits = numbers(form, math.prod(shape), seed, levels)
    given = {"pattern": pattern}
    expected = at_once(bits, form, shape, given)
    assert SPARSE.encode(bits, form, shape, given) == expected
    check_decoding(expected, bits, form, shape, given)


@given(
    name=st.sampled_from(list(FORMATS)),
    shape=SHAPES,
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    turned=st.booleans(),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
@pytest.mark.usefixtures("blocks")
def test_zeros_that_are_there(
    name: str, shape: tuple[int, ...], density: float, turned: bool, seed: int
) -> None:
    random, form = np.random.default_rng(seed), get_format(name)
    bits = random.integers(0, 256, math.prod(shape) * form.bits // 8).astype(np.uint8).view(form.unsigned)
    bits = np.where(random.random(bits.size) < density, bits, 0).astype(form.unsigned)
    given = {"input_axes": [0]} if turned and len(shape) > 1 else {}
    expected = at_once(bits, form, shape, given)
    assert SPARSE.encode(bits, form, shape, given) == expected
    np.testing.assert_array_equal(SPARSE.decode(memoryview(expected), form, shape, {}), bits)


def check_decoding(
    payload: bytes, bits: np.ndarray, form: NumberFormat, shape: tuple[int, ...], given: dict[str, Any]
) -> None:
    """What is decoded is what bitmap and values say, put together at once."""
    found = SPARSE.parts(memoryview(payload), form, shape, {})
    matrix = np.zeros(found.mask.shape, form.unsigned)
    matrix[found.mask] = found.values
    back = np.full(bits.shape, 77, form.unsigned)
    SPARSE.decode_into(back, memoryview(payload), form, shape, {})
    turned = as_matrix(back.reshape(shape), found.axes)
    np.testing.assert_array_equal(turned, matrix)
    if "step" not in given:
        np.testing.assert_array_equal(back[back != 0], bits[back != 0])


@pytest.mark.parametrize("given", [{"density": 0.4}, {"pattern": "2:4"}])
@pytest.mark.parametrize("refit", [True, False])
def test_rows_with_moments(given: dict[str, Any], refit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x = RANDOM.normal(size=(400, 48)) @ (RANDOM.normal(size=(48, 48)) * 0.3 + np.eye(48))
    w, form = RANDOM.normal(size=(100, 48)).astype(np.float32), get_format("F32")
    given = {**given, **moments(x).settings(), "refit": refit}

    def parts() -> Any:
        payload = SPARSE.encode(w.reshape(-1).view(np.uint32), form, w.shape, given)
        return SPARSE.parts(memoryview(payload), form, w.shape, {})

    whole = parts()
    monkeypatch.setattr(pruning, "_ROWS", 400)  # eight rows at a time
    some = parts()
    np.testing.assert_array_equal(some.mask, whole.mask)
    # Sums of products may be added up in another order.
    np.testing.assert_allclose(
        some.values.view(np.float32), whole.values.view(np.float32), rtol=1e-5, atol=1e-6
    )


@pytest.mark.usefixtures("blocks")
def test_a_strange_number_anywhere_is_found() -> None:
    form = get_format("F64")
    for place in (0, 63, 64, 799):
        for value, text in ((np.nan, "NaN"), (np.inf, "NaN"), (1e200, "squares overflow")):
            w = np.ones(800)
            w[place] = value
            with pytest.raises(CompressError, match=text):
                SPARSE.encode(w.view(np.uint64), form, (20, 40), {"density": 0.5})


def test_a_head_that_gets_shorter_moves_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    # Bounds of six digits, sizes of fewer.
    form = get_format("F32")
    w = np.zeros(60_000, np.uint32)
    w[::9] = 0x3F800000
    assert SPARSE.encode(w, form, (200, 300), {}) == at_once(w, form, (200, 300), {})
    monkeypatch.setattr(nested, "_MOST_HEAD", 10)
    with pytest.raises(CompressError, match="bytes as text"):
        SPARSE.encode(w, form, (200, 300), {})


def test_a_bitmap_of_too_many_or_too_late() -> None:
    form, u8 = get_format("F32"), get_format("U8")
    for bitmap, values in (([3], 1), ([0b1000000], 1), ([0b111111], 5), ([0], 1)):
        parts = [
            part_of(np.array(bitmap, np.uint8), u8, "lossless", {}, bits=True),
            part_of(np.ones(values), form, "lossless", {}),
        ]
        with pytest.raises(DamagedError, match="does not fit its values"):
            SPARSE.decode(memoryview(join({"axes": [1]}, parts)), form, (2, 3), {})
