"""Products with matrices in codes, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops import explain
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.linalg import quantised, quantised_matmul

RANDOM = np.random.default_rng(0)
LEVELS = np.sort(RANDOM.normal(size=16)).astype(np.float32)
KINDS = ("int8", "int4", "table")
SHAPES = [((3, 64), 10, 32), ((2, 5, 37), 9, 8), ((50,), 7, 16), ((4, 6), 3, 100), ((1, 1), 1, 4)]


def problem(kind: str, batch: tuple[int, ...], rows: int, group: int) -> tuple[Any, ...]:
    """Arrays of a call, and the matrix in float64."""
    inner = batch[-1]
    x = RANDOM.normal(size=batch).astype(np.float32)
    scales = RANDOM.normal(size=(rows, -(-inner // group))).astype(np.float32)
    spread = np.repeat(scales.astype(np.float64), group, 1)[:, :inner]
    if kind == "int8":
        codes = RANDOM.integers(-128, 128, (rows, inner), np.int8)
        return x, codes, scales, None, codes * spread
    four = RANDOM.integers(0, 16, (rows, inner), np.uint8)
    levels = LEVELS if kind == "table" else None
    packed = np.zeros((rows, -(-inner // 2)), np.uint8)
    for i in range(inner):
        packed[:, i // 2] |= four[:, i] << (4 * (i % 2))
    return x, packed, scales, levels, (np.arange(-8.0, 8) if levels is None else levels)[four] * spread


@pytest.mark.parametrize("implementation", ["auto", "xla", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "rows", "group"), SHAPES)
def test_against_numpy(kind: str, batch: tuple[int, ...], rows: int, group: int, implementation: str) -> None:
    x, codes, scales, levels, weight = problem(kind, batch, rows, group)
    out = quantised_matmul(x, codes, scales, levels, group=group, implementation=implementation)
    expected = x.astype(np.float64) @ weight.T
    assert out.shape == expected.shape
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(weight).max() * max(batch[-1], 8))


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, codes, scales, levels, weight = problem(kind, (3, 24), 11, 8)
    monkeypatch.setattr(quantised, "_SLAB", 24 * 3)  # three slabs of three rows, and two rows
    jax.clear_caches()

    def run(x: Any, scales: Any, name: str) -> Any:
        return quantised_matmul(x, codes, scales, levels, group=8, implementation=name)

    assert "scan" in str(jax.make_jaxpr(lambda x: run(x, scales, "xla"))(x))
    np.testing.assert_allclose(run(x, scales, "xla"), x @ weight.T, rtol=2e-4, atol=2e-3)
    gradients = [
        jax.grad(lambda x, s, n=name: jnp.sin(run(x, s, n)).sum(), argnums=(0, 1))(x / 100, scales)
        for name in ("xla", "reference")
    ]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3 * np.abs(theirs).max())
    jax.clear_caches()


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str) -> None:
    x, codes, scales, levels, weight = problem(kind, (3, 20), 6, 8)
    direction = RANDOM.normal(size=(3, 6)).astype(np.float32)

    def total(x: Any, scales: Any) -> Any:
        return (quantised_matmul(x, codes, scales, levels, group=8) * direction).sum()

    by_x, by_scales = jax.grad(total, argnums=(0, 1))(x, scales)
    np.testing.assert_allclose(by_x, direction @ weight, rtol=1e-4, atol=1e-3)
    step = np.zeros_like(scales)
    step[2, 1] = 1.0
    change = total(x, scales + step) - total(x, scales)  # it is linear in the scales
    np.testing.assert_allclose(by_scales[2, 1], change, rtol=2e-3, atol=2e-2)


def test_under_vmap_and_in_bfloat16() -> None:
    x, codes, scales, _, weight = problem("int8", (3, 32), 6, 16)
    both = np.stack([codes, ~codes])  # -1 - codes
    stacked = jax.vmap(lambda c: quantised_matmul(x, c, scales, group=16))(both)
    ones = x @ np.repeat(scales, 16, 1).T
    np.testing.assert_allclose(stacked[0], -ones - stacked[1], rtol=1e-3, atol=1e-2)
    low = quantised_matmul(jnp.asarray(x, jnp.bfloat16), codes, scales, group=16)
    assert low.dtype == jnp.bfloat16
    expected = x @ weight.T
    np.testing.assert_allclose(low.astype(np.float32), expected, atol=0.03 * np.abs(expected).max())


def test_nothing_to_multiply() -> None:
    out = quantised_matmul(np.ones((0, 8), np.float32), np.ones((3, 8), np.int8), np.ones((3, 1)), group=8)
    assert out.shape == (0, 3)


def test_what_runs() -> None:
    x, codes, scales, _, _ = problem("int8", (3, 32), 6, 16)
    assert explain(quantised_matmul, x, codes, scales, group=16, platform="tpu").chosen == "xla"


X, CODES, SCALES = np.ones((2, 16), np.float32), np.ones((3, 16), np.int8), np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X, CODES, SCALES), {"group": 0}, OpValueError, "group must be at least 1"),
        ((X, CODES, SCALES), {"group": 4}, OpShapeError, r"scales must be \(3, 4\)"),
        ((X, CODES[:, :3], SCALES), {"group": 8}, OpShapeError, r"codes must be \[rows, 16\]"),
        ((X, CODES.astype(np.uint8), SCALES), {"group": 8}, OpShapeError, r"codes must be \[rows, 8\]"),
        ((X, CODES[None], SCALES), {"group": 8}, OpShapeError, "two axes"),
        ((X, CODES.astype(np.int32), SCALES), {"group": 8}, OpTypeError, "codes must be int8 or uint8"),
        ((X.astype(int), CODES, SCALES), {"group": 8}, OpTypeError, "x must be float32"),
        ((X, CODES, SCALES, LEVELS), {"group": 8}, OpTypeError, "levels go with uint8"),
        ((X, CODES[:, :8].astype(np.uint8), SCALES, LEVELS[:4]), {"group": 8}, OpShapeError, r"\(16,\)"),
        ((X, CODES, SCALES), {"group": 8, "implementation": "xlaa"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantised_matmul(*arguments, **options)
