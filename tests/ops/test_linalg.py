"""Linear algebra: values against NumPy, gradients, derivatives of truncated decompositions, bounds, bad input."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from emulation import emulated

from capibara.ops import NoImplementationError, OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.linalg import cholesky_update, fast_svd, gemm, optimized_gemm, qr
from capibara.ops.linalg.orthogonal import orthonormal_rows
from capibara.ops.linalg.specs import FACTORS, GEMMS, MATRICES
from capibara.ops.tagged import tagged

FAST = {"xla_backend_optimization_level": 0}
SMALL_GEMMS, SMALL = tagged(GEMMS, "small"), tagged(MATRICES, "small")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def operands(spec):
    return normal(*spec.a), normal(*spec.b, seed=1)


def turned(spec, a, b):
    a = np.swapaxes(a, -1, -2) if spec.transpose_a else a
    return a, (np.swapaxes(b, -1, -2) if spec.transpose_b else b)


def options(spec):
    return {name: getattr(spec, name) for name in ("transpose_a", "transpose_b", "chunk_size")}


# -- products


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("spec", SMALL_GEMMS, ids=lambda s: s.name)
def test_product_and_its_gradient(spec, implementation):
    a, b = operands(spec)
    left, right = turned(spec, a, b)
    want = left @ right
    with jax.enable_x64(True):

        def both(a, b):
            out, pull = jax.vjp(
                lambda a, b: optimized_gemm(a, b, implementation=implementation, **options(spec)), a, b
            )
            plain, pull_plain = jax.vjp(
                lambda a, b: jnp.matmul(
                    *((jnp.swapaxes(x, -1, -2) if turn else x)
                      for x, turn in ((a, spec.transpose_a), (b, spec.transpose_b)))
                ), a, b,
            )  # fmt: skip
            return out, pull(jnp.cos(out)), pull_plain(jnp.cos(plain))

        out, got, expected = jax.jit(both, compiler_options=FAST)(device_array(a), device_array(b))
    assert out.dtype == jnp.float64
    np.testing.assert_allclose(out, want, rtol=1e-12, atol=1e-12)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("use_async", [True, False])
@pytest.mark.parametrize("spec", SMALL_GEMMS, ids=lambda s: s.name)
def test_operands_of_the_host_are_sent_in_slabs(spec, use_async):
    a, b = (x.astype(np.float32) for x in operands(spec))
    left, right = turned(spec, a, b)
    got = optimized_gemm(a, b, None, use_async, **options(spec))
    np.testing.assert_allclose(got, left @ right, rtol=1e-5, atol=1e-5)


def test_large_operands_of_the_host_are_sent_in_slabs_unasked(monkeypatch):
    a, b = normal(5, 64).astype(np.float32), normal(64, 3).astype(np.float32)
    sent = []
    add = gemm._add
    monkeypatch.setattr(gemm, "HOST_BYTES", 512)
    monkeypatch.setattr(gemm, "_add", lambda p, t, *x: sent.append(x[0].shape) or add(p, t, *x))
    np.testing.assert_allclose(optimized_gemm(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert len(sent) == 4
    assert all(shape[1] == 16 for shape in sent)


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_file_mapped_into_memory_is_read_slab_by_slab(tmp_path, precision):
    a, b = normal(5, 64).astype(np.float32), normal(64, 3).astype(np.float32)
    np.save(tmp_path / "a.npy", a)
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    got = optimized_gemm(mapped, device_array(b), precision, chunk_size=20)
    want = optimized_gemm(device_array(a), device_array(b), precision, implementation="reference")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_bfloat16_is_summed_in_float32():
    a, b = normal(4, 300).astype(np.float32), normal(300, 3, seed=1).astype(np.float32)
    narrow = [np.asarray(device_array(x, jnp.bfloat16), np.float64) for x in (a, b)]
    for implementation in ("auto", "reference"):
        got = optimized_gemm(device_array(a), device_array(b), "bfloat16", implementation=implementation)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, narrow[0] @ narrow[1], rtol=1e-4, atol=1e-4)
    assert optimized_gemm(device_array(a, jnp.bfloat16), device_array(b, jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_gradients_of_both_operands_forwards_and_backwards(precision, chunk_size):
    a, b = (device_array(normal(*shape, seed=i), jnp.float32) for i, shape in enumerate([(3, 9), (9, 5)]))
    ours = lambda a, b: optimized_gemm(a, b, precision, chunk_size=chunk_size)  # noqa: E731

    def plain(a, b):
        a, b = a.astype(precision), b.astype(precision)
        return jnp.matmul(a, b, preferred_element_type="float32")

    for each in (
        lambda f: jax.grad(lambda a: jnp.sum(jnp.sin(f(a, b))))(a),
        lambda f: jax.grad(lambda b: jnp.sum(jnp.sin(f(a, b))))(b),
        lambda f: jax.jvp(f, (a, b), (jnp.cos(a), jnp.sin(b)))[1],
        lambda f: jax.grad(lambda a: jnp.sum(jax.grad(lambda b: jnp.sum(f(a, b) ** 3))(b) ** 2))(a),
    ):
        np.testing.assert_allclose(each(ours), each(plain), rtol=2e-2, atol=1e-2 * np.abs(each(plain)).max())


def test_int8_is_exact_and_quantising_is_close():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (5, 700), np.int8), rng.integers(-128, 128, (700, 3), np.int8)
    for implementation in ("auto", "reference"):
        got = optimized_gemm(device_array(a), device_array(b), chunk_size=64, implementation=implementation)
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, a.astype(np.int64) @ b)
    x, y = normal(6, 200).astype(np.float32), normal(200, 4, seed=1).astype(np.float32)
    got = optimized_gemm(x, y, "int8", chunk_size=64)
    np.testing.assert_allclose(got, x @ y, atol=0.03 * np.abs(x @ y).max())
    np.testing.assert_allclose(got, optimized_gemm(x, y, "int8", implementation="reference"), rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(optimized_gemm(x, y, "int8")))(device_array(x))
    np.testing.assert_allclose(gradient, np.broadcast_to(y.sum(1), x.shape), rtol=1e-4, atol=1e-4)


def test_product_of_nan_inf_and_nothing():
    a = np.array([[1.0, np.nan], [np.inf, 1.0], [1.0, 2.0]], np.float32)
    b = np.ones((2, 2), np.float32)
    for precision in ("float32", "bfloat16"):
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(optimized_gemm(a, b, precision), a @ b)
    got = np.asarray(optimized_gemm(a, b, "int8"))
    assert not np.isfinite(got[:2]).any()
    assert np.isfinite(got[2]).all()
    wide = (
        jnp.ones((90, 100)).at[3].set(jnp.nan)
    )  # enough for XLA's vectorised maximum, which drops a NaN on CPUs
    got = np.asarray(optimized_gemm(wide, jnp.ones((100, 2)), "int8"))
    assert np.isnan(got[3]).all()
    assert np.isfinite(np.delete(got, 3, axis=0)).all()
    np.testing.assert_array_equal(optimized_gemm(np.ones((2, 0)), np.ones((0, 3))), np.zeros((2, 3)))
    assert optimized_gemm(jnp.ones((0, 2)), jnp.ones((2, 3))).shape == (0, 3)


def test_product_under_vmap():
    a, b = normal(3, 4, 6).astype(np.float32), normal(6, 2).astype(np.float32)
    got = jax.vmap(lambda a: optimized_gemm(a, b, chunk_size=4))(device_array(a))
    np.testing.assert_allclose(got, a @ b, rtol=1e-5, atol=1e-5)


# -- singular values


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_svd_of_a_low_rank_matrix(spec, implementation):
    *batch, m, n = spec.shape
    matrix = normal(*batch, m, spec.rank) @ normal(*batch, spec.rank, n, seed=1)

    def both(matrix):
        options = {"oversampling": 1, "implementation": implementation}
        return fast_svd(matrix, spec.rank, **options), fast_svd(matrix, spec.rank, False, **options)

    with jax.enable_x64(True):
        out = jax.jit(both, compiler_options=FAST)(device_array(matrix))
    (u, s, vh), only = jax.tree.map(np.asarray, out)
    np.testing.assert_allclose((u * s[..., None, :]) @ vh, matrix, atol=1e-10)
    want = np.linalg.svd(matrix, compute_uv=False)[..., : spec.rank]
    np.testing.assert_allclose(s, want, rtol=1e-9)
    np.testing.assert_allclose(only, want, rtol=1e-9)
    eye = np.eye(spec.rank)
    np.testing.assert_allclose(
        np.swapaxes(u, -1, -2) @ u, np.broadcast_to(eye, (*batch, *eye.shape)), atol=1e-9
    )
    np.testing.assert_allclose(
        vh @ np.swapaxes(vh, -1, -2), np.broadcast_to(eye, (*batch, *eye.shape)), atol=1e-9
    )


@pytest.mark.parametrize("decay", ["slow", "fast", "very fast", "step", "flat"])
def test_spectral_error_is_near_the_smallest_possible_and_bounded(decay):
    n, k = 300, 10
    j = np.arange(1, n + 1.0)
    s = {
        "slow": j**-0.25,
        "fast": np.exp(-j / 5),
        "very fast": np.exp(-j),  # the last of the sketch are far below rounding
        "step": np.where(j <= k, 1, 0.1),
        "flat": j**0,
    }[decay]
    left, right = (np.linalg.qr(normal(n, n, seed=i))[0] for i in (1, 2))
    matrix = ((left * s) @ right).astype(np.float32)
    u, sigma, vh, bound = (np.asarray(x, np.float64) for x in fast_svd(matrix, k, with_error_bound=True))
    error = np.linalg.norm(matrix - (u * sigma) @ vh, 2)
    assert error <= 1.1 * s[k]
    assert error <= bound <= 3 * error
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-5)
    assert np.all(np.diff(sigma) <= 0)


def test_derivatives_of_the_truncated_decomposition_are_those_of_the_whole():
    s = 0.8 ** np.arange(12.0)
    left, right = (np.linalg.qr(normal(20, 12, seed=i))[0] for i in (1, 2))
    with jax.enable_x64(True):
        matrix, change = device_array((left * s) @ right.T), device_array(normal(20, 20, seed=3))

        def reduced(matrix, implementation):
            u, s, vh = fast_svd(matrix, 4, power_iterations=40, oversampling=4, implementation=implementation)
            return s, (u * s) @ vh, u @ u.T, jnp.sqrt(s) * u[3] * vh[:, 5]

        def values(matrix, implementation):
            return fast_svd(
                matrix, 4, False, power_iterations=40, oversampling=4, implementation=implementation
            )

        def everything(implementation):
            def summed(f):
                return lambda m: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(f(m, implementation)))

            return (
                jax.jvp(lambda m: reduced(m, implementation), (matrix,), (change,)),
                jax.grad(summed(reduced))(matrix),
                jax.grad(summed(values))(matrix),
            )

        run = jax.jit(lambda: [everything(name) for name in ("xla", "reference")], compiler_options=FAST)
        got, want = run()
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-7)


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
def test_svd_of_zero_tiny_and_huge(scale):
    matrix = (normal(30, 40) * scale).astype(np.float32)
    u, s, _ = fast_svd(matrix, 3, power_iterations=10)
    want = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)[:3]
    np.testing.assert_allclose(s, want, rtol=1e-2)
    np.testing.assert_allclose(u.T @ u, np.eye(3), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_svd_of_what_is_not_finite(bad):
    matrix = normal(30, 40).astype(np.float32)
    matrix[3, 4] = bad
    assert np.isnan(jnp.linalg.svd(matrix, compute_uv=False)).all()
    for out in fast_svd(matrix, 3):
        assert np.isnan(out).all()


def test_svd_repeats_and_follows_its_key():
    matrix = normal(30, 40).astype(np.float32)
    first, again = fast_svd(matrix, 3, power_iterations=0), fast_svd(matrix, 3, power_iterations=0)
    other = fast_svd(matrix, 3, power_iterations=0, key=jax.random.key(5))
    np.testing.assert_array_equal(first[1], again[1])
    assert not np.array_equal(first[1], other[1])


def test_svd_under_vmap_and_in_bfloat16():
    batch = normal(3, 30, 24).astype(np.float32)
    one = lambda m: fast_svd(m, 3, oversampling=8)[1]  # noqa: E731
    got, alone = jax.jit(lambda batch: [jax.vmap(one)(batch), one(batch[2])], compiler_options=FAST)(batch)
    np.testing.assert_allclose(got[2], alone, rtol=1e-4)
    np.testing.assert_allclose(got, np.linalg.svd(batch, compute_uv=False)[:, :3], rtol=1e-2)
    s = fast_svd(device_array(batch[0], jnp.bfloat16), 3, False)
    assert s.dtype == jnp.float32
    np.testing.assert_allclose(s, np.linalg.svd(batch[0], compute_uv=False)[:3], rtol=2e-2)


def test_svd_of_nothing():
    u, s, vh, bound = fast_svd(jnp.zeros((0, 4)), with_error_bound=True)
    assert (u.shape, s.shape, vh.shape, bound.shape) == ((0, 0), (0,), (0, 4), ())
    assert fast_svd(jnp.ones((4, 4)), 0, False).shape == (0,)


def test_svd_says_why_it_computes_everything():
    matrix = jax.ShapeDtypeStruct((100, 90), jnp.float32)
    assert explain(fast_svd, matrix, 64, platform="tpu").chosen == "xla"
    answer = explain(fast_svd, matrix, 80, platform="tpu")
    assert answer.chosen == "reference"
    assert "80 + 16 = 96" in answer.reasons["xla"]
    assert "use_randomized=False" in explain(fast_svd, matrix, 5, use_randomized=False).reasons["xla"]


@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_explain_agrees_with_the_lowered_program(platform):
    matrix = jax.ShapeDtypeStruct((96, 90), jnp.float32)
    for rank in (8, 80):
        lowered = (
            jax.jit(lambda m, rank=rank: fast_svd(m, rank)[1])
            .trace(matrix)
            .lower(lowering_platforms=(platform,))
        )
        drawn = "threefry" in lowered.as_text() or "erf_inv" in lowered.as_text()
        assert drawn == (explain(fast_svd, matrix, rank, platform=platform).chosen == "xla")


# -- QR and Cholesky


@pytest.mark.parametrize("implementation", ["gram", "auto"])
@pytest.mark.parametrize("spec", SMALL, ids=lambda s: s.name)
def test_qr(spec, implementation):
    tall = spec.shape[-2] >= 4 * spec.shape[-1]
    shape = jax.ShapeDtypeStruct(spec.shape, jnp.float32)
    assert explain(qr, shape, platform="tpu").chosen == ("gram" if tall else "reference")
    assert explain(qr, shape, platform="cpu").chosen == "reference"
    if not tall and implementation == "gram":
        with pytest.raises(NoImplementationError, match="as tall as wide"):
            qr(np.ones(spec.shape), implementation="gram")
        return
    matrix = normal(*spec.shape)
    with jax.enable_x64(True):
        q, r = (np.asarray(x) for x in qr(device_array(matrix), implementation=implementation))
    want_q, want_r = np.linalg.qr(matrix)
    sign = np.where(np.diagonal(want_r, axis1=-2, axis2=-1) < 0, -1.0, 1.0)
    np.testing.assert_allclose(q, want_q * sign[..., None, :], atol=1e-10)
    np.testing.assert_allclose(r, want_r * sign[..., :, None], atol=1e-10)


def test_gradient_of_qr():
    with jax.enable_x64(True):
        matrix, weight = device_array(normal(24, 5)), device_array(normal(24, 5, seed=1))

        def loss(matrix, implementation):
            q, r = qr(matrix, implementation=implementation)
            return jnp.vdot(weight, jnp.sin(q)) + jnp.vdot(weight[:5], jnp.cos(r))

        got, want = (jax.grad(loss)(matrix, i) for i in ("gram", "reference"))
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_qr_of_dependent_and_ill_conditioned_columns_is_orthonormal():
    matrix = normal(80, 6).astype(np.float32)
    dependent, ill = matrix.copy(), matrix * np.float32(10.0) ** -np.arange(6)
    dependent[:, 3] = dependent[:, 1]
    ill[:, 1:] += ill[:, :1]
    for each in (dependent, ill.astype(np.float32), np.zeros_like(matrix), matrix * np.float32(1e25)):
        q, r = qr(each, implementation="gram")
        np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-5)
        np.testing.assert_allclose(q @ r, each, atol=1e-5 * max(np.abs(each).max(), 1e-30))
    assert np.isnan(qr(np.full((8, 2), np.nan, np.float32), implementation="gram")[1]).any()
    assert [x.shape for x in qr(jnp.zeros((5, 0)))] == [(5, 0), (0, 0)]


def test_rows_of_a_batch_where_one_needs_householder():
    rows = normal(2, 3, 50).astype(np.float32)
    rows[1, 2] = rows[1, 0]
    for run in (orthonormal_rows, jax.vmap(orthonormal_rows)):
        factor, q = run(device_array(rows))
        np.testing.assert_allclose(factor @ q, rows, atol=1e-5)
        np.testing.assert_allclose(q @ np.swapaxes(q, -1, -2), np.stack([np.eye(3)] * 2), atol=1e-5)


@pytest.mark.thin(3)
@pytest.mark.parametrize("downdate", [False, True])
@pytest.mark.parametrize("spec", tagged(FACTORS, "small"), ids=lambda s: s.name)
def test_cholesky_update_and_its_gradient(spec, downdate):
    shape = spec.vector
    n = shape[-1]
    root = normal(*shape, n + 3)
    vector = 0.3 * normal(*shape, seed=1)
    matrix = root @ np.swapaxes(root, -1, -2) + np.eye(n)
    outer = vector[..., :, None] * vector[..., None, :]
    with jax.enable_x64(True):
        factor, vector = device_array(np.linalg.cholesky(matrix)), device_array(vector)
        out = cholesky_update(factor + jnp.triu(jnp.ones_like(factor), 1), vector, downdate=downdate)
        got, want = (
            jax.grad(
                lambda f, v, i=i: jnp.sum(
                    jnp.sin(cholesky_update(f, v, downdate=downdate, implementation=i))
                ),
                (0, 1),
            )(factor, vector)
            for i in ("xla", "reference")
        )
    np.testing.assert_allclose(
        out, np.linalg.cholesky(matrix - outer if downdate else matrix + outer), atol=1e-10
    )
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-9)


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("downdate", [False, True])
def test_cholesky_update_of_a_negative_diagonal_is_the_factor_with_a_positive_one(implementation, downdate):
    factor, vector = np.tril(normal(4, 4)) + 2 * np.eye(4), 0.1 * normal(4, seed=1)
    factor[:, 1] *= -1
    factor[:, 3] *= -1
    outer = np.outer(vector, vector)
    want = np.linalg.cholesky(factor @ factor.T + (-outer if downdate else outer))
    got = cholesky_update(
        device_array(factor), device_array(vector), downdate=downdate, implementation=implementation
    )
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_cholesky_downdate_that_leaves_no_positive_matrix_is_nan():
    for implementation in ("xla", "reference"):
        out = cholesky_update(
            jnp.eye(3), jnp.array([0.1, 2.0, 0.0]), downdate=True, implementation=implementation
        )
        assert np.isnan(np.asarray(out)).any()
    assert cholesky_update(jnp.zeros((0, 0)), jnp.zeros(0)).shape == (0, 0)


def test_float64_in_a_narrow_precision_is_summed_in_float32():
    a, b = normal(20, 300), normal(300, 20, seed=1)
    for precision in ("float16", "bfloat16", "float32"):
        left, right = (np.asarray(device_array(x).astype(precision), np.float64) for x in (a, b))
        bound = 2e-7 * (np.abs(left) @ np.abs(right))
        for implementation in ("xla", "reference"):
            with jax.enable_x64(True):
                got = np.asarray(optimized_gemm(a, b, precision, implementation=implementation))
            assert got.dtype == np.float64
            assert (np.abs(got - left @ right) <= bound).all()


# -- everything


@pytest.mark.slow
def test_inside_shard_map_and_over_explicit_axes():
    code = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    from capibara.ops.linalg import cholesky_update, fast_svd, optimized_gemm, qr
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("x", "y"))
    a = np.random.default_rng(0).normal(size=(4, 24, 5)).astype("float32")

    def all_of(a):
        s = fast_svd(a, 2, False, oversampling=3)
        gram = optimized_gemm(a, a, chunk_size=10, transpose_a=True)
        return s, gram, qr(a)[1], cholesky_update(jnp.tril(gram), a[:, 0])

    def loss(a):
        u, s, vh = fast_svd(a, 2, oversampling=3)
        q, r = qr(a, implementation="gram")
        return jnp.sum(jnp.sin((u * s[..., None, :]) @ vh)) + jnp.sum(jnp.sin(r))

    spec = P(("x", "y"))
    want = jax.jit(lambda a: (all_of(a), jax.grad(loss)(a)))(a)
    for f, expected in ((all_of, want[0]), (jax.grad(loss), want[1])):
        got = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))(a)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected)):
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)

    explicit = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    with jax.set_mesh(explicit):
        laid = jax.device_put(a, jax.sharding.NamedSharding(explicit, P("x")))
        for x, y in zip(jax.jit(all_of)(laid), want[0]):
            assert jax.typeof(x).sharding.spec[0] == "x"
            np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-3)
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": emulated(4),
        "JAX_PLATFORMS": "cpu",
    }
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: optimized_gemm([[1.0]], np.ones((1, 1))), OpTypeError, "a must be an array, got list"),
        (lambda: optimized_gemm(np.ones((2, 3)), np.ones((2, 3))), OpShapeError, "3 columns.*2 rows"),
        (lambda: optimized_gemm(np.ones(3), np.ones((3, 2))), OpShapeError, r"a must be \[..., rows, columns\]"),
        (lambda: optimized_gemm(np.ones((2, 3, 3)), np.ones((3, 3, 3))), OpShapeError, "do not broadcast"),
        (lambda: optimized_gemm(np.ones((2, 2)), np.ones((2, 2)), "bfloat61"), OpValueError, "bfloat16"),
        (lambda: optimized_gemm(np.ones((2, 2)), np.ones((2, 2)), "float64"), OpValueError, "needs float64"),
        (lambda: optimized_gemm(np.ones((2, 2)), np.ones((2, 2)), chunk_size=0), OpValueError, "at least 1"),
        (lambda: optimized_gemm(np.ones((2, 2)), np.ones((2, 2)), use_async="yes"), OpTypeError, "use_async"),
        (lambda: optimized_gemm(np.ones((2, 2), np.int8), np.ones((2, 2))), OpTypeError, "int8 goes with int8"),
        (lambda: optimized_gemm(np.ones((2, 2), int), np.ones((2, 2))), OpTypeError, "a must be float32"),
        (lambda: fast_svd(np.ones((4, 3)), 4), OpValueError, "rank must be at most .* = 3"),
        (lambda: fast_svd(np.ones((4, 3)), 1.5), OpTypeError, "rank must be an int"),
        (lambda: fast_svd(np.ones((4, 3), complex)), OpTypeError, "matrix must be float32"),
        (lambda: fast_svd(np.ones((4, 3)), 1, key=3), OpTypeError, "key must be one key"),
        (lambda: fast_svd(np.ones((4, 3)), 1, implementation="xla"), NoImplementationError, "of at most"),
        (lambda: qr(np.ones(4)), OpShapeError, "matrix must be"),
        (lambda: cholesky_update(np.ones((4, 3)), np.ones(4)), OpShapeError, r"factor must be \[..., n, n\]"),
        (lambda: cholesky_update(np.eye(4), np.ones(3)), OpShapeError, r"vector must have shape \(4,\)"),
    ],
)  # fmt: skip
def test_bad_input(call, error, match):
    with pytest.raises(error, match=match):
        call()


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12, 1e25])
def test_the_error_bound_holds_at_any_scale(scale: float) -> None:
    matrix = (np.random.default_rng(0).normal(size=(60, 50)) * scale).astype(np.float32)
    true = np.linalg.svd(matrix.astype(np.float64) / scale, compute_uv=False)[3]
    bound = float(fast_svd(device_array(matrix), 3, with_error_bound=True)[3]) / scale
    assert true * 0.999 < bound < 3 * true
