"""The compiled products with matrices in codes, against NumPy in float64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from instruction_sets import instruction_sets
from quantised_oracle import KINDS, quantised_case

from capibara import native
from capibara.measure import count_flops
from capibara.native import build
from capibara.ops import NoImplementationError, explain
from capibara.ops.linalg import quantised_matmul
from capibara.ops.linalg.specs import QuantisedSpec

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
RANDOM = np.random.default_rng(3)
# Few vectors and many; groups of whole chunks of codes, parts of them, and neither; rows that end within a chunk.
PROBLEMS = (
    QuantisedSpec("one", (1,), 192, 9, 64),
    QuantisedSpec("one, two groups at once and an end", (1,), 231, 9, 32),
    QuantisedSpec("two, an end within a group", (2,), 342, 6, 128),
    QuantisedSpec("three", (3,), 128, 6, 32),
    QuantisedSpec("six, with ends", (6,), 75, 11, 32),
    QuantisedSpec("three chunks a group", (4,), 151, 10, 48),
    QuantisedSpec("seven, several blocks", (7,), 300, 37, 64),
    QuantisedSpec("five, odd groups", (5,), 101, 21, 7),
    QuantisedSpec("odd groups", (2,), 101, 5, 7),
    QuantisedSpec("half a chunk", (1,), 96, 5, 16),
    QuantisedSpec("few codes a group", (9,), 40, 7, 2),
    QuantisedSpec("a panel and some", (37,), 131, 29, 33),
    QuantisedSpec("more than a block", (21,), 500, 130, 128),
    QuantisedSpec("one column", (40,), 1, 3, 1),
)


def _close(got: Any, x: np.ndarray, weight: np.ndarray) -> None:
    """Within what rounding may make of sums of these sizes."""
    error = np.abs(np.asarray(got, np.float64) - x.astype(np.float64) @ weight)
    assert (error <= 1e-6 * (np.abs(x).astype(np.float64) @ np.abs(weight)) + 1e-30).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", PROBLEMS, ids=lambda s: s.name)
def test_products_both_ways(kind: str, spec: QuantisedSpec, coded: bool) -> None:
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    table = None
    if coded:
        table = RANDOM.normal(size=200).astype(np.float32)
        scales = RANDOM.integers(0, 200, scales.shape, np.uint8)
        group = np.arange(spec.inner) // spec.group
        plain = np.ones(scales.shape, np.float32)
        weight = _numbers(kind, codes, plain, levels, spec) * table[scales].astype(np.float64)[:, group]

    def product(x: Any) -> Any:
        return quantised_matmul(
            x, codes, scales, levels, group=spec.group, scale_table=table, implementation="native"
        )

    out, pull = jax.vjp(product, device_array(x))
    _close(out, x, weight.T)
    back = RANDOM.normal(size=out.shape).astype(np.float32)
    _close(pull(device_array(back))[0], back, weight)


def _numbers(kind: str, codes: np.ndarray, scales: np.ndarray, levels: Any, spec: QuantisedSpec) -> Any:
    """The matrix, from the definition, one entry after another."""
    out = np.zeros((spec.rows, spec.inner))
    for r in range(spec.rows):
        for k in range(spec.inner):
            if kind == "int8":
                level = float(codes[r, k])
            else:
                code = (int(codes[r, k // 2]) >> (4 * (k % 2))) & 15
                level = code - 8 if levels is None else float(levels[code])
            out[r, k] = level * scales[r, k // spec.group]
    return out


@pytest.mark.parametrize("group", [32, 64, 48])
@pytest.mark.parametrize("kind", ["integers", "bfloat16", "floats", "beyond 16 bits"])
def test_levels_are_exact(kind: str, group: int) -> None:
    """What kernels know of levels lets them read these faster, and changes no bit."""
    levels = RANDOM.integers(-32768, 32768, 16).astype(np.float32)
    levels[[3, 7, 11]] = -32768, 32767, 0
    if kind == "bfloat16":
        levels = np.asarray(jnp.asarray(levels, jnp.bfloat16), np.float32)
    elif kind == "floats":
        levels[5] = 0.1
    elif kind == "beyond 16 bits":
        levels[5] = 32769
    rows, inner = 9, 150
    every = np.tile(np.arange(16, dtype=np.uint8), 2)
    codes = RANDOM.permutation(np.resize(every, rows * inner)).reshape(rows, inner)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    scales = np.ones((rows, -(-inner // group)), np.float32)

    def product(x: Any) -> Any:
        return quantised_matmul(x, packed, scales, levels, group=group, implementation="native")

    for count in (1, 3, 8):
        for first in range(0, inner - count + 1, count):
            some = np.eye(count, inner, first, dtype=np.float32)
            out = np.asarray(jax.jit(product)(some))
            np.testing.assert_array_equal(out, levels[codes[:, first : first + count]].T)
        _, pull = jax.vjp(product, jnp.zeros((count, inner)))
        np.testing.assert_array_equal(pull(jnp.eye(count, rows))[0], levels[codes[:count]])


def test_derivatives_of_every_kind() -> None:
    spec = QuantisedSpec("", (3,), 40, 6, 16)
    x, codes, scales, levels, _ = quantised_case("table", spec)
    table = RANDOM.normal(size=9).astype(np.float32)
    places = RANDOM.integers(0, 9, scales.shape, np.uint8)

    def loss(way: str, x: Any, levels: Any, scales: Any, table: Any) -> Any:
        options: Any = {"group": spec.group, "implementation": way}
        plain = quantised_matmul(x, codes, scales, levels, **options)
        return jnp.sum(
            jnp.sin(plain + quantised_matmul(x, codes, places, levels, scale_table=table, **options))
        )

    arrays = [device_array(a) for a in (x, levels, scales, table)]
    every = tuple(range(4))
    for transform in (jax.grad, jax.jacfwd):
        mine, theirs = (
            jax.jit(transform(lambda *a, w=way: loss(w, *a), every))(*arrays)
            for way in ("native", "reference")
        )
        for one, other in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3 * float(jnp.abs(other).max()))

    def slope(way: str, x: Any) -> Any:
        return jnp.sum(jax.grad(lambda x: loss(way, x, *arrays[1:]))(x) ** 2)

    mine, theirs = (jax.jit(jax.grad(lambda x, w=way: slope(w, x)))(x) for way in ("native", "reference"))
    np.testing.assert_allclose(mine, theirs, rtol=1e-2, atol=1e-2 * float(jnp.abs(theirs).max()))


def test_vmap_over_vectors_and_over_matrices() -> None:
    spec = QuantisedSpec("", (2, 3), 40, 6, 8)
    x, codes, scales, _, weight = quantised_case("int8", spec)
    mapped = jax.vmap(lambda x: quantised_matmul(x, codes, scales, group=8, implementation="native"), 1, 1)(x)
    np.testing.assert_allclose(mapped, x @ weight.T, rtol=1e-4, atol=1e-2)
    both = jax.vmap(
        lambda c, s: quantised_matmul(x[0], c, s, group=8, implementation="native"), (0, None), 1
    )(np.stack([codes, codes[::-1]]), scales)
    spread = np.repeat(scales, 8, 1)
    np.testing.assert_allclose(both[:, 0], x[0] @ weight.T, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(both[:, 1], x[0] @ (codes[::-1] * spread).T, rtol=1e-4, atol=1e-2)
    # Vectors that are mapped over become more vectors of one call, and the matrix is there once.
    program = str(jax.make_jaxpr(jax.vmap(lambda x: quantised_matmul(x, codes, scales, group=8)))(x))
    assert "f32[6,40]" in program


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_vectors_are_summed_in_float32(dtype: Any) -> None:
    spec = QuantisedSpec("", (3,), 64, 10, 32)
    x, codes, scales, _, weight = quantised_case("int4", spec)
    narrow = device_array(x, dtype)
    out = quantised_matmul(narrow, codes, scales, group=32, implementation="native")
    assert out.dtype == dtype
    want = np.asarray(narrow, np.float64) @ weight.T
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, rtol=float(jnp.finfo(dtype).eps), atol=1e-3 * np.abs(want).max()
    )


def test_what_is_not_finite_stays_in_its_rows() -> None:
    spec = QuantisedSpec("", (2,), 70, 8, 16)
    x, codes, scales, levels, _ = quantised_case("table", spec)
    x[0, 3], x[1, 69], scales[2, 4], scales[5, 0] = np.nan, np.inf, np.inf, np.nan
    for count in (1, 20):  # few vectors and many
        some = np.concatenate([x] * count)
        mine, theirs = (
            np.asarray(quantised_matmul(some, codes, scales, levels, group=16, implementation=way))
            for way in ("native", "reference")
        )
        np.testing.assert_array_equal(np.isfinite(mine), np.isfinite(theirs))
        np.testing.assert_array_equal(np.isnan(mine), np.isnan(theirs))


@pytest.mark.parametrize("group", [32, 64, 48])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_codes_that_overflow_without_their_scales(kind: str, group: int) -> None:
    spec = QuantisedSpec("", (1,), 150, 9, group)
    x, codes, scales, levels, weight = quantised_case(kind, spec)
    # The results are far below the largest float32; sums of the codes alone are not.
    shrink = np.float32(1e-6)
    x = np.where(np.arange(150) % 2 == 0, np.float32(2e38), np.float32(-1e38))[None]
    for count in (1, 5):
        some = np.repeat(x, count, 0)
        out = quantised_matmul(some, codes, scales * shrink, levels, group=group, implementation="native")
        assert np.isfinite(out).all()
        _close(out, some, weight.T * float(shrink))


@pytest.mark.parametrize("way", ["native", "xla", "reference"])
def test_groups_of_any_length_beyond_a_row_and_tables_of_any_length(way: str) -> None:
    spec = QuantisedSpec("", (2,), 70, 8, 70)
    x, codes, scales, _, weight = quantised_case("int8", spec)
    for group in (128, 1 << 31, (1 << 63) - 1, 1 << 70):
        _close(quantised_matmul(x, codes, scales, group=group, implementation=way), x, weight.T)
    table = np.array([0.5, -2.0], np.float32)
    places = np.arange(8, dtype=np.uint8)[:, None]  # the last scale stands for all codes beyond it

    def total(table: Any) -> Any:
        out = quantised_matmul(x, codes, places, group=70, scale_table=table, implementation=way)
        return out.sum(), out

    (_, out), slope = jax.value_and_grad(total, has_aux=True)(device_array(table))
    rows = x.astype(np.float64) @ codes.T.astype(np.float64)
    _close(out, x, codes.T * np.repeat(table, [1, 7]).astype(np.float64))
    np.testing.assert_allclose(slope, rows.sum(0)[:2], rtol=1e-4, atol=1e-3)


def test_what_runs_and_what_it_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = QuantisedSpec("", (3,), 64, 10, 32)
    x, codes, scales, *_ = quantised_case("int8", spec)
    assert explain(quantised_matmul, x, codes, scales, group=32, platform="cpu").chosen == "native"
    assert int(count_flops(lambda x: quantised_matmul(x, codes, scales, group=32), x)) == 2 * 3 * 64 * 10
    with jax.enable_x64(True):
        wide = x.astype(np.float64)
        found = explain(quantised_matmul, wide, codes, scales, group=32, platform="cpu")
        assert found.chosen == "xla"
        assert "float64" in found.reasons["native"]
        with pytest.raises(NoImplementationError, match="float64"):
            quantised_matmul(wide, codes, scales, group=32, implementation="native")
    monkeypatch.setattr(native, "problem", lambda: "the native library is not built")
    found = explain(quantised_matmul, x, codes, scales, group=32, platform="cpu")
    assert found.chosen == "xla"
    assert "not built" in found.reasons["native"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import numpy as np, jax, jax.numpy as jnp
from capibara import native
from capibara.ops.linalg import quantised_matmul
from quantised_oracle import quantised_case
from capibara.ops.linalg.specs import QuantisedSpec
for kind in ("int8", "int4", "table"):
    for sizes in ((1, 192, 9, 64), (3, 75, 11, 32), (2, 101, 5, 7), (1, 96, 5, 16), (37, 450, 29, 32),
                  (4, 151, 10, 48), (7, 300, 37, 64)):
        count, inner, rows, group = sizes
        x, codes, scales, levels, weight = quantised_case(kind, QuantisedSpec("", (count,), inner, rows, group))
        run = lambda x: quantised_matmul(x, codes, scales, levels, group=group, implementation="native")
        out, pull = jax.vjp(run, jnp.asarray(x))
        assert (np.abs(out - x @ weight.T) <= 1e-6 * (np.abs(x) @ np.abs(weight).T)).all(), (kind, count)
        back = np.asarray(out)
        found = pull(out)[0]
        assert (np.abs(found - back @ weight) <= 1e-6 * (np.abs(back) @ np.abs(weight))).all(), (kind, count)
print(native.isa())
"""
    support = Path(__file__).resolve().parent.parent / "support"
    path = os.pathsep.join([str(support), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"CAPIBARA_NATIVE_ISA": name, "PYTHONPATH": path},
    )
    assert done.stdout.strip() == name, done.stderr[-3000:]


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("across", [0, 1])
def test_calls_whose_arrays_do_not_fit_together_are_refused(count: int, across: int) -> None:
    x = RANDOM.normal(size=(count, 16 if across else 8)).astype(np.float32)
    codes, scales = RANDOM.integers(-99, 99, (16, 8), np.int8), RANDOM.normal(size=(16, 2)).astype(np.float32)
    none, most = np.zeros(0, np.float32), (1 << 63) - 1

    def call(
        codes: Any, scales: Any, levels: Any, table: Any, inner: tuple[int, ...], group: tuple[int, ...]
    ) -> Any:
        out = [jax.ShapeDtypeStruct((count, 8 if across else 16), jnp.float32)]
        arrays = x, codes, scales, levels, table
        found = native.call("capibara_codes_product", out, *arrays, inner=inner, group=group, across=across)
        return jax.block_until_ready(found)[0]

    whole = codes * np.repeat(scales, 4, axis=1).astype(np.float64)
    _close(call(codes, scales, none, none, (8,), (4,)), x, whole if across else whole.T)
    # As many columns as there may be have one scale for each row.
    whole = codes * scales[:, :1].astype(np.float64)
    _close(call(codes, scales[:, :1], none, none, (8,), (most,)), x, whole if across else whole.T)
    for changed, message in (
        ({"scales": scales[:, :0], "group": (most,)}, "shapes do not fit together"),
        ({"inner": (most,), "group": (most,)}, "shapes do not fit together"),
        ({"inner": (9,)}, "shapes do not fit together"),
        ({"inner": (-8,)}, "groups a number"),
        ({"group": (0,)}, "groups a number"),
        ({"group": (3,)}, "shapes do not fit together"),
        ({"group": (4, 4)}, "a length and a group"),
        ({"codes": codes.view(np.uint8)}, "shapes do not fit together"),
        ({"levels": np.zeros(16, np.float32)}, "shapes do not fit together"),
        ({"scales": scales.astype(np.uint8)}, "shapes do not fit together"),
        ({"scales": scales[:15]}, "shapes do not fit together"),
        ({"scales": scales.astype(np.float16)}, "scales must be float32 or uint8"),
        ({"codes": codes.astype(np.int16)}, "types do not fit"),
    ):
        given: dict[str, Any] = {"codes": codes, "scales": scales, "levels": none, "table": none}
        given |= {"inner": (8,), "group": (4,)} | changed
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            call(**given)
