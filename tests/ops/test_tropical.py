"""Tropical operations against NumPy's definition: values, infinities, ties, gradients, bad input."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from instruction_sets import instruction_sets
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tropical_oracle import PATTERNS, oracle, signed

from capibara import native
from capibara.ops import OpShapeError, OpTypeError, OpValueError, explain, tropical
from capibara.ops.tropical.specs import SPECS

IMPLEMENTATIONS = (
    pytest.param(
        "native", marks=pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
    ),
    "xla",
    "reference",
)
CHECKED = [spec for spec in SPECS if "large" not in spec.tags]


def draw(spec, seed=0, wild=0.0, dtype="float32"):
    rng = np.random.default_rng(seed)
    out = []
    for shape in (spec.a, spec.b):
        x = rng.integers(-8, 8, size=shape).astype(dtype)  # small integers: many ties, exact in every dtype
        x[rng.random(shape) < wild] = -np.inf
        x[rng.random(shape) < wild] = np.inf
        x[rng.random(shape) < wild / 8] = np.nan
        out.append(x)
    return out


def run(implementation, spec, a, b, **options):
    return tropical.matmul(a, b, implementation=implementation, **options)


@pytest.mark.thin(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("wild", [pytest.param(0.0, marks=pytest.mark.slow), 0.2])
@pytest.mark.parametrize("spec", CHECKED, ids=lambda s: s.name)
def test_values_and_indices_are_the_definition_s(spec, wild, implementation):
    a, b = draw(spec, wild=wild)
    for semiring in ("max_plus", "min_plus"):
        value, index = oracle(a, b, semiring)
        np.testing.assert_array_equal(run(implementation, spec, a, b, semiring=semiring), value)
        got, at = run(implementation, spec, a, b, semiring=semiring, return_argmax=True)
        np.testing.assert_array_equal(got, value)
        np.testing.assert_array_equal(at, index)
        assert at.dtype == jnp.int32


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_other_dtypes(dtype, implementation):
    spec = SPECS[1]
    with jax.enable_x64(True):
        a, b = draw(spec, wild=0.1, dtype="float64")
        got, at = run(
            implementation, spec, device_array(a, dtype), device_array(b, dtype), return_argmax=True
        )
        assert got.dtype == dtype
        value, index = oracle(a, b)
        np.testing.assert_array_equal(np.asarray(got, "float64"), value)
        np.testing.assert_array_equal(at, index)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_go_to_the_lowest_index(implementation):
    spec = SPECS[1]
    a, b = draw(spec)
    a[0] = -np.inf
    grad = np.random.default_rng(1).normal(size=(7, 19)).astype("float32")
    f = jax.jit(lambda a, b: tropical.matmul(a, b, implementation=implementation))
    _, pull = jax.vjp(f, a, b)
    grad_a, grad_b = pull(grad)
    _, index = oracle(a, b)
    want_a, want_b = np.zeros_like(a), np.zeros_like(b)
    for i in range(7):
        for j in range(19):
            if index[i, j] >= 0:
                want_a[i, index[i, j]] += grad[i, j]
                want_b[index[i, j], j] += grad[i, j]
    np.testing.assert_allclose(grad_a, want_a, atol=1e-5)
    np.testing.assert_allclose(grad_b, want_b, atol=1e-5)
    _, tangent = jax.jvp(f, (a, b), (np.ones_like(a), np.ones_like(b)))
    np.testing.assert_array_equal(tangent, np.where(index < 0, 0, 2))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap(implementation):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 5, 4)).astype("float32"), rng.normal(size=(4, 9)).astype("float32")
    a[1, 2, 3], b[3, 0] = np.inf, -np.inf
    got = jax.vmap(lambda x: tropical.matmul(x, b, implementation=implementation))(a)
    np.testing.assert_array_equal(got, oracle(a, b[None])[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("columns", [2, 16])
def test_vmap_over_nothing(implementation, columns):
    a, b = np.zeros((0, 5, 4), "float32"), np.zeros((0, 4, columns), "float32")
    run = jax.jit(jax.vmap(lambda a, b: tropical.matmul(a, b, implementation=implementation)))
    assert run(a, b).shape == (0, 5, columns)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_among_finite_numbers(implementation):
    a, b = draw(SPECS[2])
    a[3, 200], b[77, 5] = np.nan, np.nan
    np.testing.assert_array_equal(tropical.matmul(a, b, implementation=implementation), oracle(a, b)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[:1])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_signs_decide_how_the_kernel_compares_and_not_what_it_finds(pattern, implementation):
    a, b = signed(pattern)
    value, index = oracle(a, b)
    np.testing.assert_array_equal(tropical.matmul(a, b, implementation=implementation), value)
    got, at = tropical.matmul(a, b, implementation=implementation, return_argmax=True)
    np.testing.assert_array_equal(got, value)
    np.testing.assert_array_equal(at, index)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("float64", marks=pytest.mark.slow)])
def test_few_columns_with_ties_and_what_is_not_finite(dtype, implementation):
    """One column to eight, and depths that fill vectors, leave some over, or fill none."""
    rng = np.random.default_rng(5)
    with jax.enable_x64(dtype == "float64"):
        # Only the compiled kernel has forms of its own for each number of columns.
        sizes = ((1, 2, 7, 8), (1, 31, 64, 333)) if implementation == "native" else ((1, 7), (1, 64))
        for columns, depth in itertools.product(*sizes):
            a = rng.integers(-3, 3, (9, depth)).astype(dtype)  # small integers: many ties
            b = rng.integers(-3, 3, (depth, columns)).astype(dtype)
            a[1], a[2, depth // 2], a[3, -1], a[4, 0] = -np.inf, np.inf, np.nan, -0.0
            b[-1, -1] = -np.inf
            value, index = oracle(a, b)
            got, at = tropical.matmul(a, b, implementation=implementation, return_argmax=True)
            np.testing.assert_array_equal(got, value)
            np.testing.assert_array_equal(at, index)
            np.testing.assert_array_equal(tropical.matmul(a, b, implementation=implementation), value)


SETS = """
import numpy as np
from capibara import native
from capibara.ops import tropical
rng = np.random.default_rng(0)
for sign in (lambda x: x, abs, lambda x: -abs(x)):
    for dtype, columns in (("float32", 41), ("bfloat16", 41), ("float32", 3)):
        a, b = (sign(rng.integers(-9, 9, size)).astype("float32") for size in ((37, 300), (300, columns)))
        b[:, 33:] -= 99
        terms = a[:, :, None] + b[None]
        value, index = tropical.matmul(
            a.astype(dtype), b.astype(dtype), return_argmax=True, implementation="native"
        )
        assert (np.asarray(value, "float32") == terms.max(1)).all()
        assert (np.asarray(index) == terms.argmax(1)).all()
        alone = tropical.matmul(a.astype(dtype), b.astype(dtype), implementation="native")
        assert (np.asarray(alone, "float32") == terms.max(1)).all()
print(native.isa())
"""


@pytest.mark.thin(2)
@pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_of_this_processor(name):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CAPIBARA_NATIVE_ISA": name}
    done = subprocess.run(
        [sys.executable, "-c", SETS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name


def test_matvec():
    a, b = draw(SPECS[4], wild=0.2)
    np.testing.assert_array_equal(tropical.matvec(a, b[:, 0]), oracle(a, b)[0][:, 0])


@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
def test_relaxation_is_log_sum_exp(semiring):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 7)), rng.normal(size=(7, 9))
    a[0], a[1, 2], b[3, 4] = -np.inf, -np.inf, -np.inf
    if semiring == "min_plus":
        a, b = -a, -b
    sign = 1 if semiring == "max_plus" else -1

    def plain(a, b):
        terms = sign * (a[:, :, None] + b[None])
        return sign * 0.3 * jax.nn.logsumexp(terms / 0.3, axis=1)

    with jax.enable_x64(True):
        a, b = device_array(a), device_array(b)
        soft = lambda a, b: tropical.matmul(a, b, semiring=semiring, temperature=0.3)  # noqa: E731
        np.testing.assert_allclose(soft(a, b), plain(a, b), rtol=1e-12)
        weight = device_array(rng.normal(size=(4, 9)))
        got = jax.grad(lambda a, b: jnp.sum(weight * soft(a, b)[1:]), (0, 1))(a, b)
        want = jax.grad(lambda a, b: jnp.sum(weight * plain(a, b)), (0, 1))(a[1:], b)
        np.testing.assert_allclose(got[0][1:], want[0], atol=1e-12)
        np.testing.assert_array_equal(got[0][0], 0)
        np.testing.assert_allclose(got[1], want[1], atol=1e-12)


def test_no_array_of_all_terms():
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)

    def soft(a, b):
        return tropical.matmul(a, b, temperature=0.5, implementation="xla").sum()

    for f in (
        lambda a, b: tropical.matmul(a, b, implementation="xla"),
        lambda a, b: tropical.matmul(a, b, implementation="xla", return_argmax=True),
        jax.grad(lambda a, b: tropical.matmul(a, b, implementation="xla").sum(), (0, 1)),
        jax.grad(soft, (0, 1)),
    ):
        memory = jax.jit(f).lower(shape, shape).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < 128**3  # all terms would be four times that


def test_shortest_paths_are_floyd_and_warshall_s():
    rng = np.random.default_rng(0)
    d = np.where(rng.random((11, 11)) < 0.3, rng.integers(1, 20, (11, 11)), np.inf).astype("float32")
    want = d.copy()
    np.fill_diagonal(want, 0)
    for k in range(11):
        want = np.minimum(want, want[:, k : k + 1] + want[k])
    np.testing.assert_array_equal(tropical.shortest_paths(d), want)
    np.testing.assert_array_equal(tropical.closure(-d), -want)
    slopes = jax.grad(lambda d: jnp.where(jnp.isfinite(want), tropical.shortest_paths(d), 0).sum())(d)
    assert slopes.sum() > 0
    # A path is as long as its edges: the gradient counts how often each is used.
    np.testing.assert_allclose(
        np.where(np.isinf(d), 0, d * slopes).sum(), want[np.isfinite(want)].sum(), rtol=1e-6
    )


def test_cycles_without_end_are_infinite_and_cycles_of_nothing_are_not():
    d = np.full((4, 4), np.inf, "float32")
    d[0, 1], d[1, 0], d[1, 2] = 1, -2, 5
    got = tropical.shortest_paths(d)
    assert np.isneginf(got[:2, :3]).all()
    assert np.isposinf(got[3, :3]).all()
    assert got[2, 2] == 0 == got[3, 3]
    heights = np.random.default_rng(0).normal(size=9).astype("float32") / 3
    assert np.isfinite(tropical.closure(heights[:, None] - heights)).all()


@pytest.mark.thin(3)
@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
@pytest.mark.parametrize("padding", ["VALID", "SAME"])
@pytest.mark.parametrize("strides", [1, 2])
def test_convolutions_and_pooling(padding, strides, semiring):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 6, 9)).astype("float32")
    kernel = rng.normal(size=(4, 3, 2, 3)).astype("float32")
    zero = -np.inf if semiring == "max_plus" else np.inf
    best = np.max if semiring == "max_plus" else np.min
    lengths = [-(-n // strides) if padding == "SAME" else (n - k) // strides + 1 for n, k in ((6, 2), (9, 3))]
    lacks = [max((m - 1) * strides + k - n, 0) for m, n, k in zip(lengths, (6, 9), (2, 3), strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *((n // 2, n - n // 2) for n in lacks)], constant_values=zero)
    want = np.empty((2, 4, *lengths), "float32")
    pooled = np.empty((2, 3, *lengths), "float32")
    for i in range(lengths[0]):
        for j in range(lengths[1]):
            part = padded[:, :, i * strides : i * strides + 2, j * strides : j * strides + 3]
            want[:, :, i, j] = best(part[:, None] + kernel, axis=(2, 3, 4))
            pooled[:, :, i, j] = best(part, axis=(2, 3))
    options = {"strides": strides, "padding": padding, "semiring": semiring}
    np.testing.assert_array_equal(tropical.conv2d(x, kernel, **options), want)
    np.testing.assert_array_equal(tropical.pool(x, (2, 3), **options), pooled)
    line = tropical.conv1d(x[:, :, 0], kernel[:, :, 0], **options)
    flat = tropical.conv2d(x[:, :, :1], kernel[:, :, :1], **options)
    np.testing.assert_array_equal(line, flat[:, :, 0])


@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
def test_scan_is_the_recurrence(semiring):
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-5, 5, (2, 13)).astype("float32") for _ in range(2))
    a[0, 4], b[0, 3], b[1, 2], a[1, 3] = -np.inf, np.inf, np.inf, -np.inf
    zero, best = (-np.inf, np.maximum) if semiring == "max_plus" else (np.inf, np.minimum)
    for reverse in (False, True):
        want, h = np.empty_like(b), np.full(2, zero, "float32")
        for t in range(13)[:: -1 if reverse else 1]:
            with np.errstate(invalid="ignore"):
                moved = a[:, t] + h
            h = best(np.where(np.isnan(moved), zero, moved), b[:, t])
            want[:, t] = h
        for axis in (1, -1):
            got = tropical.scan(a, b, axis=axis, semiring=semiring, reverse=reverse)
            np.testing.assert_array_equal(got, want)
    assert tropical.scan(a[:, :0], b[:, :0], axis=1).shape == (2, 0)


def test_polynomials():
    coefficients = np.array([0.0, 1.0, -np.inf, -3.0], "float32")
    x = np.array([-2.0, -0.5, 0.0, 3.0, -np.inf, np.inf, np.nan], "float32")
    want = [0.0, 0.5, 1.0, 6.0, 0.0, np.inf, np.nan]
    np.testing.assert_array_equal(tropical.polyval(coefficients, x), want)
    slopes = jax.vmap(jax.grad(tropical.polyval, 1), (None, 0))(coefficients, x[:5])
    np.testing.assert_array_equal(slopes, [0, 1, 1, 3, 0])


@pytest.mark.parametrize(
    ("call", "specs", "shapes"),
    [
        (lambda a, b: tropical.matmul(a, b, temperature=0.5), ("y", ("x", "y")), ((2, 3), (3, 4))),
        (tropical.matmul, (("x", "y"), None), ((0, 5, 6), (6, 1))),
        (tropical.matmul, ("x", "y"), ((4, 0), (0, 2))),
        (lambda a, b: tropical.matmul(a, b, temperature=0.5), ("x", "y"), ((4, 0), (0, 2))),
        (tropical.matvec, ("x", "y"), ((0, 4, 6), (0, 6))),
        (tropical.polyval, ("x", "y"), ((3,), (0,))),
        (tropical.polyval, ("x", "y"), ((70,), (0,))),
    ],
)
def test_inside_shard_map_operands_may_vary_over_different_axes_and_hold_nothing(call, specs, shapes):
    mesh = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    random = np.random.default_rng(0)
    arrays = [random.normal(size=shape).astype("float32") for shape in shapes]
    mapped = jax.shard_map(
        lambda *x: call(*x)[None], mesh=mesh, in_specs=tuple(map(P, specs)), out_specs=P(("x", "y"))
    )

    def value_and_gradients(function, *x):
        return function(*x), jax.grad(lambda *x: jnp.sum(function(*x)), (0, 1))(*x)

    got, want = (
        jax.tree.leaves(jax.jit(functools.partial(value_and_gradients, f))(*arrays))
        for f in (lambda *x: mapped(*x)[0], call)
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_bad_input_says_what_is_wrong():
    a = np.ones((2, 3), "float32")
    with pytest.raises(OpShapeError, match=r"3 columns and b \(2, 3\) 2 rows"):
        tropical.matmul(a, a)
    with pytest.raises(OpTypeError, match="integers have no infinity"):
        tropical.matmul(a.astype(int), a.T)
    with pytest.raises(OpValueError, match="max_plus"):
        tropical.matmul(a, a.T, semiring="max-plus")
    with pytest.raises(OpValueError, match="temperature"):
        tropical.matmul(a, a.T, temperature=-1.0)
    with pytest.raises(OpValueError, match="temperature must be 0 or at least"):
        tropical.matmul(a, a.T, temperature=1e-40)
    with pytest.raises(OpShapeError, match="square"):
        tropical.closure(a)
    with pytest.raises(OpShapeError, match="one shape"):
        tropical.scan(a, a[:1])
    with pytest.raises(OpValueError, match="padding"):
        tropical.pool(a[None], 2, padding="same")
    with pytest.raises(OpShapeError, match="out_channels"):
        tropical.conv1d(a[None], a[:, :, None])


def test_explain_is_what_is_compiled():
    a = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    for platform in ("cpu", "cuda", "tpu"):
        program = jax.jit(tropical.matmul).trace(a, a).lower(lowering_platforms=(platform,)).as_text()
        chosen = explain(tropical.matmul, a, a, platform=platform).chosen
        assert ("capibara_max_plus" in program) == (chosen == "native")
        assert chosen == ("native" if platform == "cpu" and native.problem() is None else "xla")
