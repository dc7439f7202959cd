"""Products with matrices in codes, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from quantised_oracle import KINDS, LEVELS, quantised_case

from capibara import native
from capibara.ops import explain
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.linalg import quantised, quantised_matmul
from capibara.ops.linalg.specs import QUANTISED, QuantisedSpec
from capibara.ops.tagged import tagged

RANDOM = np.random.default_rng(0)
NAMED = {spec.name: spec for spec in QUANTISED}


@pytest.mark.thin(3)
@pytest.mark.parametrize("implementation", ["auto", "xla", "reference"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", tagged(QUANTISED, "small"), ids=lambda s: s.name)
def test_against_numpy(kind: str, spec: QuantisedSpec, implementation: str) -> None:
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    out = quantised_matmul(x, codes, scales, levels, group=spec.group, implementation=implementation)
    expected = x.astype(np.float64) @ weight.T
    assert out.shape == expected.shape
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(weight).max() * max(spec.inner, 8))


@pytest.mark.parametrize("kind", KINDS)
def test_slabs_are_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = NAMED["slabs"]
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    assert spec.rows == 11
    monkeypatch.setattr(quantised, "_SLAB", spec.inner * 3)  # three slabs of three rows, and two rows
    jax.clear_caches()

    def run(x: Any, scales: Any, name: str) -> Any:
        return quantised_matmul(x, codes, scales, levels, group=spec.group, implementation=name)

    assert "scan" in str(jax.make_jaxpr(lambda x: run(x, scales, "xla"))(x))
    np.testing.assert_allclose(run(x, scales, "xla"), x @ weight.T, rtol=2e-4, atol=2e-3)
    gradients = [
        jax.grad(lambda x, s, n=name: jnp.sin(run(x, s, n)).sum(), argnums=(0, 1))(x / 100, scales)
        for name in ("xla", "reference")
    ]
    for ours, theirs in zip(*gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-3 * np.abs(theirs).max())
    jax.clear_caches()


@pytest.mark.parametrize("name", ["plain", "odd groups", "slabs"])
@pytest.mark.parametrize("kind", KINDS)
def test_derivatives(kind: str, name: str) -> None:
    spec = NAMED[name]
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    direction = RANDOM.normal(size=(*spec.batch, spec.rows)).astype(np.float32)

    def total(x: Any, scales: Any) -> Any:
        return (quantised_matmul(x, codes, scales, levels, group=spec.group) * direction).sum()

    by_x, by_scales = jax.grad(total, argnums=(0, 1))(x, scales)
    np.testing.assert_allclose(by_x, direction @ weight, rtol=1e-4, atol=1e-3)
    step = np.zeros_like(scales)
    step[2, 1] = 1.0
    change = total(x, scales + step) - total(x, scales)  # it is linear in the scales
    np.testing.assert_allclose(by_scales[2, 1], change, rtol=2e-3, atol=2e-2)


def test_under_vmap_and_in_bfloat16() -> None:
    spec = NAMED["plain"]
    group = spec.group
    x, codes, scales, _, weight = quantised_case("int8", spec)
    both = np.stack([codes, ~codes])  # -1 - codes
    stacked = jax.vmap(lambda c: quantised_matmul(x, c, scales, group=group))(both)
    ones = x @ np.repeat(scales, group, 1).T
    np.testing.assert_allclose(stacked[0], -ones - stacked[1], rtol=1e-3, atol=1e-2)
    low = quantised_matmul(device_array(x, jnp.bfloat16), codes, scales, group=group)
    assert low.dtype == jnp.bfloat16
    expected = x @ weight.T
    np.testing.assert_allclose(low.astype(np.float32), expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.parametrize("spec", QUANTISED, ids=lambda s: s.name)
@pytest.mark.parametrize("bits", [8, 4])
def test_what_runs(bits: int, spec: QuantisedSpec) -> None:
    kinds = (jnp.bfloat16, jnp.int8 if bits == 8 else jnp.uint8, jnp.float32)
    arrays = [jax.ShapeDtypeStruct(s, k) for s, k in zip(spec.shapes(bits), kinds, strict=True)]
    out = jax.eval_shape(lambda *a: quantised_matmul(*a, group=spec.group), *arrays)
    assert (out.shape, out.dtype) == ((*spec.batch, spec.rows), jnp.bfloat16)
    for platform in ("cpu", "tpu", "cuda"):
        answer = explain(quantised_matmul, *arrays, group=spec.group, platform=platform)
        # Sizes that no tile has are XLA's.
        own = "native" if native.problem() is None else "xla"
        by = {"cpu": own, "tpu": "pallas_tpu" if spec.name in ("token", "prompt") else "xla"}
        assert answer.chosen == by.get(platform, "xla")


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
        ((X, CODES, SCALES), {"group": 8, "scale_table": SCALES[0]}, OpTypeError, "scales must be uint8"),
        (
            (X, CODES, CODES[:, :2].view(np.uint8)),
            {"group": 8, "scale_table": SCALES},
            OpShapeError,
            "one axis",
        ),
        (
            (X, CODES, CODES[:, :2].view(np.uint8)),
            {"group": 8, "scale_table": SCALES[0, :0]},
            OpShapeError,
            r"1 to 256 entries, got \(0,\)",
        ),
        ((X, CODES, SCALES), {"group": 8, "implementation": "xlaa"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        quantised_matmul(*arguments, **options)
