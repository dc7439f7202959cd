"""Products of groups of rows with a matrix each, against NumPy in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara import native
from capibara.measure import count_flops
from capibara.ops import explain
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.linalg import grouped_matmul
from capibara.ops.linalg.specs import GROUPED, GroupedSpec, grouped_arguments
from capibara.ops.registry import portable
from capibara.ops.tagged import tagged

NATIVE = pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
IMPLEMENTATIONS = [pytest.param("native", marks=NATIVE), "cpu", "xla", "reference"]
SMALL = tagged(GROUPED, "small")


def oracle(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """Row by row."""
    out, row = np.zeros((lhs.shape[0], rhs.shape[2])), 0
    for group, size in enumerate(sizes):
        for _ in range(max(size, 0)):
            if row < len(out):
                out[row] = lhs[row].astype(np.float64) @ rhs[group].astype(np.float64)
                row += 1
    return out


def slopes(lhs: Any, rhs: Any, sizes: Any, ahead: Any) -> tuple[np.ndarray, np.ndarray]:
    """The gradients of ``sum(out * ahead)``."""
    by_lhs, by_rhs, row = np.zeros(lhs.shape), np.zeros(rhs.shape), 0
    for group, size in enumerate(sizes):
        for _ in range(max(size, 0)):
            if row < len(lhs):
                by_lhs[row] = rhs[group] @ ahead[row]
                by_rhs[group] += np.outer(lhs[row], ahead[row])
                row += 1
    return by_lhs, by_rhs


@pytest.mark.thin(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_values_and_gradients(spec: GroupedSpec, implementation: str) -> None:
    random = np.random.default_rng(0)
    lhs, rhs, sizes = grouped_arguments(spec, random)
    ahead = random.normal(size=(spec.rows, spec.columns))
    for transposed in (False, True)[: 1 if "odd" in spec.tags else 2]:

        @jax.jit
        def run(lhs: Any, rhs: Any, sizes: Any, ahead: Any, transposed: bool = transposed) -> Any:
            rhs = rhs.swapaxes(1, 2) if transposed else rhs

            def product(lhs: Any, rhs: Any) -> Any:
                return grouped_matmul(
                    lhs, rhs, sizes, transpose_rhs=transposed, implementation=implementation
                )

            out, pull = jax.vjp(product, lhs, rhs)
            by_lhs, by_rhs = pull(ahead)
            return out, by_lhs, by_rhs.swapaxes(1, 2) if transposed else by_rhs

        found = run(*(x.astype(np.float32) for x in (lhs, rhs)), sizes, ahead.astype(np.float32))
        wanted = (oracle(lhs, rhs, sizes), *slopes(lhs, rhs, sizes, ahead))
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype == jnp.float32
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * max(1.0, np.abs(want).max()))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(0, 2**32 - 1))
def test_any_sizes(sizes: list[int], seed: int) -> None:
    spec = GroupedSpec("any", 60, 3, 2, tuple(sizes))
    lhs, rhs, numbers = grouped_arguments(spec, np.random.default_rng(seed))
    got = _jitted(lhs.astype(np.float32), rhs.astype(np.float32), numbers)
    np.testing.assert_allclose(got, oracle(lhs, rhs, sizes), rtol=1e-4, atol=1e-4)


_jitted = jax.jit(grouped_matmul)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_not_finite_stays_in_its_row_and_its_matrix(implementation: str) -> None:
    lhs, rhs = np.ones((20, 3), np.float32), np.ones((3, 3, 2), np.float32)
    sizes = jnp.array([5, 4, 6], jnp.int32)
    lhs[6], lhs[19] = np.nan, np.inf  # of group 1, and of none

    @jax.jit
    def run(lhs: Any, rhs: Any) -> Any:
        out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes, implementation=implementation), lhs, rhs)
        by_lhs, by_rhs = pull(jnp.ones_like(out))
        return out, by_lhs, by_rhs

    out, by_lhs, by_rhs = run(lhs, rhs)
    assert np.isnan(out[6]).all()
    assert np.isfinite(np.delete(out, 6, 0)).all()
    assert np.isfinite(by_lhs).all()
    assert [bool(np.isnan(x).all()) for x in by_rhs] == [False, True, False]
    assert np.isfinite(by_rhs[::2]).all()


def test_narrow_dtypes_and_sums() -> None:
    lhs, rhs, sizes = grouped_arguments(SMALL[0], np.random.default_rng(0))
    want = oracle(lhs, rhs, sizes)
    low = grouped_matmul(device_array(lhs, jnp.bfloat16), device_array(rhs, jnp.bfloat16), sizes)
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(np.float32), want, atol=0.05 * np.abs(want).max())
    mixed = grouped_matmul(device_array(lhs, jnp.bfloat16), rhs.astype(np.float32), sizes)
    assert mixed.dtype == jnp.float32


def test_what_runs() -> None:
    arrays = [
        jax.ShapeDtypeStruct(shape, kind)
        for shape, kind in (
            ((64, 16), jnp.bfloat16),
            ((4, 16, 8), jnp.bfloat16),
            ((4,), jnp.int32),
        )
    ]
    out = jax.eval_shape(grouped_matmul, *arrays)
    assert (out.shape, out.dtype) == ((64, 8), jnp.bfloat16)
    chosen = {p: explain(grouped_matmul, *arrays, platform=p).chosen for p in ("cpu", "tpu", "cuda")}
    assert chosen == {"cpu": "cpu", "tpu": "xla", "cuda": "xla"}


@NATIVE
def test_what_the_compiled_kernels_take() -> None:
    def found(kind: Any, **options: Any) -> Any:
        shapes = ((64, 16), kind), ((4, 16, 8), kind), ((4,), jnp.int32)
        given = [jax.ShapeDtypeStruct(*each) for each in shapes]
        return explain(grouped_matmul, *given, platform="cpu", **options)

    assert found(jnp.float32).chosen == "native"
    assert "takes float32, not bfloat16" in found(jnp.bfloat16).reasons["native"]
    assert (
        "sums in float32, not bfloat16" in found(jnp.float32, accumulate_dtype="bfloat16").reasons["native"]
    )
    with portable():
        assert found(jnp.float32).chosen == "cpu"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kind", "sizes", "wanted"),
    [
        ("int8", (100, -3, 120), (100, 0, 120)),  # a limit of 300 rows would not fit into 8 bits
        ("uint8", (200, 0, 250), (200, 0, 100)),
        ("uint32", (40, 3_000_000_000, 7), (40, 260, 0)),  # negative as int32
        ("int32", (40, 2_147_483_647, 2_147_483_647), (40, 260, 0)),  # their sum does not fit
    ],
)
def test_sizes_of_any_integers(
    implementation: str, kind: str, sizes: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    random = np.random.default_rng(6)
    lhs, rhs = random.normal(size=(300, 4)), random.normal(size=(3, 4, 5))
    counts = jnp.asarray(np.array(sizes, kind))
    found = grouped_matmul(
        jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32), counts, implementation=implementation
    )
    np.testing.assert_allclose(found, oracle(lhs, rhs, np.array(wanted)), rtol=1e-5, atol=1e-5)


@NATIVE
def test_many_small_groups() -> None:
    """In runs of several blocks a thread, with empty groups among them, in the forward product and both gradients."""
    random = np.random.default_rng(7)
    sizes = np.where(random.random(300) < 0.2, 0, random.integers(1, 40, 300)).astype(np.int32)
    rows, inner, columns = int(sizes.sum()) + 5, 24, 40
    lhs, rhs = random.normal(size=(rows, inner)), random.normal(size=(300, inner, columns))
    ahead = random.normal(size=(rows, columns))

    def run(lhs: Any, rhs: Any, ahead: Any) -> Any:
        def product(lhs: Any, rhs: Any) -> Any:
            return grouped_matmul(lhs, rhs, jnp.asarray(sizes), implementation="native")

        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(ahead)

    found = jax.jit(run)(*(x.astype(np.float32) for x in (lhs, rhs, ahead)))
    for got, want in zip(found, (oracle(lhs, rhs, sizes), *slopes(lhs, rhs, sizes, ahead)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6 * np.abs(want).max())


@NATIVE
@pytest.mark.parametrize(
    ("rows", "inner", "columns", "sizes"),
    [
        (900, 47, 65, (0, 33, 500, 1, 12)),  # rows of no group, several blocks of rows, edges of tiles
        (50, 900, 40, (13, 0, 37)),  # several parts of the depth
        (20, 13, 1100, (20, 0)),  # several blocks of columns
    ],
)
def test_edges_of_blocks(rows: int, inner: int, columns: int, sizes: tuple[int, ...]) -> None:
    spec = GroupedSpec("edges", rows, inner, columns, sizes)
    random = np.random.default_rng(3)
    lhs, rhs, numbers = grouped_arguments(spec, random)
    ahead = random.normal(size=(rows, columns))
    for transposed in (False, True):
        given = lhs, rhs.swapaxes(1, 2) if transposed else rhs, ahead

        def run(lhs: Any, rhs: Any, ahead: Any, transposed: bool = transposed) -> Any:
            def product(lhs: Any, rhs: Any) -> Any:
                return grouped_matmul(lhs, rhs, numbers, transpose_rhs=transposed, implementation="native")

            out, pull = jax.vjp(product, lhs, rhs)
            by_lhs, by_rhs = pull(ahead)
            return out, by_lhs, by_rhs.swapaxes(1, 2) if transposed else by_rhs

        found = jax.jit(run)(*(x.astype(np.float32) for x in given))
        wanted = (oracle(lhs, rhs, sizes), *slopes(lhs, rhs, sizes, ahead))
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6 * np.abs(want).max())


def test_operations_are_counted() -> None:
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 16), (4, 16, 8))]
    sizes = jnp.full(4, 16, jnp.int32)
    for name in ("native", "reference")[native.problem() is not None :]:

        def loss(lhs: Any, rhs: Any, name: str = name) -> Any:
            return jnp.sum(grouped_matmul(lhs, rhs, sizes, implementation=name) ** 2)

        # The reference multiplies every row with every matrix.
        many = 1 if name == "native" else 4
        assert int(count_flops(jax.grad(loss, (0, 1)), *given)) == 3 * 2 * 64 * 16 * 8 * many


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (4, 0, 2, 2), (4, 3, 0, 2), (4, 3, 2, 0)])
def test_nothing_to_multiply(shape: tuple[int, int, int, int]) -> None:
    rows, inner, columns, groups = shape
    lhs, rhs = np.ones((rows, inner), np.float32), np.ones((groups, inner, columns), np.float32)
    sizes = jnp.zeros(groups, jnp.int32)
    out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)
    assert out.shape == (rows, columns)
    assert not np.asarray(out).any()
    assert [x.shape for x in pull(out)] == [lhs.shape, rhs.shape]


X, W, SIZES = np.ones((4, 3), np.float32), np.ones((2, 3, 5), np.float32), np.array([1, 3], np.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((X[0], W, SIZES), {}, OpShapeError, r"lhs must be \[\.\.\., rows, columns\]"),
        ((X[None], W, SIZES), {}, OpShapeError, "Remedy: jax.vmap"),
        ((X, W[0], SIZES), {}, OpShapeError, r"rhs \[groups, inner, columns\]"),
        ((X[:, :2], W, SIZES), {}, OpShapeError, "has 2 columns, and the matrices of rhs"),
        ((X, W, SIZES), {"transpose_rhs": True}, OpShapeError, "transposed have 5 rows"),
        ((X, W, SIZES), {"transpose_rhs": 1}, OpTypeError, "transpose_rhs must be True or False"),
        ((X, W, SIZES[:1]), {}, OpShapeError, r"group_sizes must be \(2,\)"),
        ((X, W, SIZES.astype(np.float32)), {}, OpTypeError, "an array of integers, got float32"),
        ((X, W, [1, 3]), {}, OpTypeError, "got list"),
        ((X.astype(int), W, SIZES), {}, OpTypeError, "lhs must be float32"),
        ((X, W, SIZES), {"accumulate_dtype": "int8"}, OpTypeError, "accumulate_dtype must be one of"),
        ((X, W, SIZES), {"accumulate_dtype": "wide"}, OpTypeError, "got 'wide'"),
        ((X, W, SIZES), {"precision": "hihg"}, OpValueError, "precision must be"),
        ((X, W, SIZES), {"implementation": "xlaa"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        grouped_matmul(*arguments, **options)
