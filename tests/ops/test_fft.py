"""radix_optimized_fft against NumPy in float64: values, gradients, transformations, errors, what runs and why."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import decimal
import math
import re
from decimal import Decimal
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.ops import NoImplementationError, OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.fft import plan, radix_optimized_fft
from capibara.ops.fft.specs import SPECS, FFTSpec
from capibara.ops.tagged import tagged

# Which arguments have no effect is for test_arguments_without_effect.py.
pytestmark = pytest.mark.filterwarnings("ignore::capibara.ops.OpWarning")

FAST: Any = {"xla_backend_optimization_level": 0}
NAMES = ("matmul", "xla", "reference")
BOUND = {"bfloat16": 6e-3, "float32": 1e-6, "float64": 1e-15}


def oracle(x, inverse=False, real=False, **options):
    """NumPy's transform of the same arguments."""
    functions = (np.fft.fftn, np.fft.ifftn), (np.fft.rfftn, np.fft.irfftn)
    axis, length = options.get("axis", -1), options.get("length")
    axes = (axis,) if isinstance(axis, int) else axis
    sizes = (length,) if isinstance(length, int) else length
    if sizes is None:
        sizes = [x.shape[a] for a in axes]
        if real and inverse:
            sizes[-1] = 2 * (sizes[-1] - 1)
    return functions[real][inverse](x, s=sizes, axes=axes, norm=options.get("norm", "backward"))


def draw(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def distance(got, want):
    """The error, relative to the whole."""
    scale = np.linalg.norm(np.asarray(want).ravel())
    got = np.asarray(got, want.dtype)
    assert got.shape == want.shape
    return np.linalg.norm((got - want).ravel()) / (scale or 1)


def stages(spec, factors=None):
    """How many products follow one another, a convolution counting as six."""
    sizes = spec.options.get("length", [spec.shape[a] for a in spec.axes])
    factors = spec.options.get("radix_factors", factors)
    found = [plan.radices(n, factors) for n in ([sizes] if isinstance(sizes, int) else sizes)]
    return max(1, sum(6 if each is None else len(each) for each in found))


def calls(spec):
    """The signal, and ``inverse`` and ``real``, of each kind of transform."""
    x = draw(spec.shape)
    sizes = spec.options.get("length", [spec.shape[a] for a in spec.axes])
    last = sizes if isinstance(sizes, int) else sizes[-1]
    half = list(spec.shape)
    half[spec.axes[-1]] = last // 2 + 1
    length = {"length": tuple(sizes) if not isinstance(sizes, int) else sizes}
    return [
        (x, {}),
        (x, {"inverse": True}),
        (x.real, {}),
        (x.real, {"real": True}),
        (draw(half), {"real": True, "inverse": True, **length}),
    ]


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", tagged(SPECS, "small"), ids=lambda s: s.name)
def test_values_are_numpy_s(spec):
    given = calls(spec)

    def every(*signals):
        return [
            [
                radix_optimized_fft(x, implementation=name, **{**spec.options, **kind})
                for x, (_, kind) in zip(signals, given, strict=True)
            ]
            for name in NAMES
        ]

    with jax.enable_x64(True):
        found = jax.jit(every, compiler_options=FAST)(*(x for x, _ in given))
    for row in found:
        for got, (x, kind) in zip(row, given, strict=True):
            options = {**spec.options, **kind}
            options.pop("radix_factors", None)
            want = oracle(x, **options)
            assert got.dtype == want.dtype
            assert distance(got, want) < 1e-15 * stages(spec) + 2e-15


@pytest.mark.parametrize("name", ["matmul", "xla"])
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("spec", [SPECS[0], SPECS[5], SPECS[7]], ids=lambda s: s.name)
def test_errors_stay_within_the_documented_bounds(spec, precision, name):
    x = draw(spec.shape)
    pair = [device_array(part, precision) for part in (x.real, x.imag)]
    exact = np.asarray(pair[0], np.float64) + 1j * np.asarray(pair[1], np.float64)
    run = jax.jit(
        partial(radix_optimized_fft, implementation=name, precision=precision), compiler_options=FAST
    )
    re, im = run(tuple(pair))
    assert re.dtype == im.dtype == precision
    got = np.asarray(re, np.float64) + 1j * np.asarray(im, np.float64)
    error = distance(got, np.fft.fft(exact))
    assert error < BOUND[precision] * stages(spec)
    whole = run(device_array(exact, jnp.complex64))
    assert whole.dtype == jnp.complex64
    error = distance(whole, np.fft.fft(exact))
    assert error < BOUND[precision if name == "matmul" else "float32"] * stages(spec)
    if name == "matmul" and precision == "bfloat16":
        assert error > 1e-4  # it does round


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int8", "bool"])
def test_real_dtypes(dtype):
    x = np.asarray(draw((2, 12)).real * 3)
    x = device_array(x, dtype) if dtype not in ("int8", "bool") else x.astype(dtype)
    got = radix_optimized_fft(x, real=True)
    assert got.dtype == jnp.complex64
    assert distance(got, np.fft.rfft(np.asarray(x, np.float64))) < 2e-6
    back = radix_optimized_fft(got, real=True, inverse=True)
    assert back.dtype == jnp.float32
    np.testing.assert_allclose(back, np.asarray(x, np.float32), atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.lists(st.integers(2, 64), min_size=1, max_size=4))
def test_plans_cover_the_length(n, factors):
    free = plan.radices(n)
    assert free is None or (math.prod(free) == n and max(free, default=1) <= plan.MOST)
    chosen = plan.radices(n, tuple(factors))
    padded = plan.padded_length(n, tuple(factors))
    assert padded >= 2 * n - 1
    pieces = plan.radices(padded, tuple(factors))
    assert pieces is not None
    for each, length in ((chosen, n), (pieces, padded)):
        assert each is None or (math.prod(each) == length and set(each) <= set(factors))
    assert plan.radices(math.prod(factors), tuple(factors)) == tuple(factors)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 1 << 29), st.integers(0, 1 << 29))
def test_roots_of_unity_are_exact_to_the_last_bits(n, index):
    index %= n
    c, s = plan.roots(np.int64(index), n)
    # With 50 digits of pi, so that its rounding plays no part.
    with decimal.localcontext(decimal.Context(prec=50)):
        pi = Decimal("3.14159265358979323846264338327950288419716939937510")
        angle = 2 * pi * index / n
        quarter = int(angle / (pi / 2))
        rest = float(angle - quarter * (pi / 2))
    want = [(math.cos, math.sin), (lambda a: -math.sin(a), math.cos)][quarter % 2]
    sign = -1 if quarter % 4 > 1 else 1
    np.testing.assert_allclose([c, s], [sign * want[0](rest), sign * want[1](rest)], atol=5e-16)
    single = plan.roots(jnp.int32(index), n, jnp, jnp.float32)
    np.testing.assert_allclose(single, [c, s], atol=1.2e-7)


def test_radices_decide_the_products():
    def products(factors, n=64):
        f = partial(radix_optimized_fft, radix_factors=factors, implementation="matmul")
        jaxpr = jax.make_jaxpr(f)(jnp.ones((2, n), jnp.complex64))
        return [v for v in str(jaxpr).split() if v.startswith("dot_general")]

    assert len(products([2, 4, 8])) == 3
    assert len(products([8])) == len(products([64, 2], 128)) == 2
    assert len(products([64])) == len(products(None)) == 1
    assert len(products([2, 4, 8], 63)) == 6  # 128 = 8 · 8 · 2, there and back


def test_long_transforms_have_no_large_tables():
    n = 1 << 18
    f = partial(radix_optimized_fft, implementation="matmul")
    program = jax.jit(f).lower(jax.ShapeDtypeStruct((n,), jnp.complex64)).as_text()
    assert len(program) < 3e6
    x = draw(n).astype(np.complex64)
    assert distance(f(x), np.fft.fft(x.astype(complex))) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [8, 135, 31])
def test_what_is_not_finite_spreads_as_in_numpy(name, bad, n):
    x = draw((2, n)).astype(np.complex64)
    x[0, 3] = bad
    for real in (False, True):
        y = x.real if real else x
        f = partial(radix_optimized_fft, implementation=name, radix_factors=(2, 3, 5, 9), real=real)
        with np.errstate(all="ignore"):
            want = (np.fft.rfft if real else np.fft.fft)(y)
        got = np.asarray(jax.jit(f, compiler_options=FAST)(y))
        np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
        assert distance(got[1], want[1]) < 6e-6


@pytest.mark.thin(3)
@pytest.mark.parametrize("options", [{}, {"real": True}, {"axis": (0, 1)}], ids=str)
def test_gradients_in_both_modes_and_vmap(options):
    x = draw((3, 7)).real if options.get("real") else draw((3, 7))
    xs = np.stack([x, 2 * x, x - 1])

    def every(name, x, xs):
        def f(x):
            return radix_optimized_fft(x, (2, 4, 7), implementation=name, **options)

        def loss(x):
            y = f(x)
            return jnp.sum(jnp.sin(y.real) * y.imag)

        def bent(x):
            return jnp.sum(jnp.abs(jax.grad(loss)(x)) ** 2)

        return (
            jax.grad(loss)(x),
            jax.jvp(loss, (x,), (jnp.cos(x),))[1],
            jax.grad(bent)(x),
            jax.jvp(jax.grad(loss), (x,), (jnp.sin(x),))[1],
            jax.vmap(f)(xs),
            jax.vmap(jax.grad(loss), 1, 1)(xs) if "axis" not in options else jax.vmap(jax.grad(loss))(xs),
        )

    with jax.enable_x64(True):
        run = jax.jit(lambda x, xs: [every(n, x, xs) for n in ("auto", *NAMES)], compiler_options=FAST)
        auto, got, xla, want = run(x, xs)
        numeric = []
        for k in ((0, 2), (2, 5)):
            step = np.zeros(x.shape)
            step[k] = 1e-6

            def value(x):
                y = oracle(x, **options)
                return np.sum(np.sin(y.real) * y.imag)

            numeric.append((value(x + step) - value(x - step)) / 2e-6)
    for row in (auto, got, xla):
        for a, b in zip(row, want, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11 * np.abs(b).max())
    np.testing.assert_allclose([want[0][0, 2].real, want[0][2, 5].real], numeric, rtol=1e-6, atol=1e-6)


def test_gradients_in_bfloat16():
    pair = tuple(device_array(part, jnp.bfloat16) for part in (draw((2, 32)).real, draw((2, 32)).imag))
    weight = draw((2, 32))

    def loss(pair, name):
        re, im = radix_optimized_fft(pair, implementation=name)
        return jnp.sum(re.astype(jnp.float32) * weight.real + im.astype(jnp.float32) * weight.imag)

    grads = jax.jit(jax.grad(partial(loss, name="matmul")), compiler_options=FAST)(pair)
    assert grads[0].dtype == jnp.bfloat16
    # Of the sum of Re(conj(w) F x) the gradient is the transpose: n times the inverse of w.
    want = np.fft.ifft(weight, norm="forward")
    got = np.asarray(grads[0], np.float64) + 1j * np.asarray(grads[1], np.float64)
    assert distance(got, want) < 1e-2


def test_explain_is_what_is_lowered():
    def lowered(platform, x, **options):
        f = jax.jit(partial(radix_optimized_fft, **options))
        return f.trace(x).lower(lowering_platforms=(platform,)).as_text()

    for spec in tagged(SPECS, "large")[:3]:
        for x in (jax.ShapeDtypeStruct(spec.shape, t) for t in (jnp.complex64, jnp.bfloat16)):
            for platform in ("cpu", "cuda", "tpu"):
                answer = explain(radix_optimized_fft, x, platform=platform)
                program = lowered(platform, x)
                assert ("stablehlo.fft" in program) == (answer.chosen == "xla")
                assert ("dot_general" in program) == (answer.chosen == "matmul")
                assert answer.chosen == ("matmul" if platform == "tpu" else "xla")
                if platform == "cpu":
                    assert "was not measured to be faster here" in answer.reasons["matmul"]


def test_lengths_past_what_is_counted_are_left_to_xla():
    x = jax.ShapeDtypeStruct(((1 << 28) + 2,), jnp.complex64)
    answer = explain(radix_optimized_fft, x, platform="tpu")
    assert answer.chosen == "xla"
    assert "up to 268435456" in answer.reasons["matmul"]
    with pytest.raises(NoImplementationError, match="up to 268435456"):
        jax.eval_shape(partial(radix_optimized_fft, implementation="matmul"), x)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"signal": [1.0]}, OpTypeError, "pair"),
        ({"signal": 3.0}, OpTypeError, "signal must be an array or a pair"),
        ({"signal": np.array(1.0)}, OpShapeError, "at least one dimension"),
        ({"signal": np.array(["a"])}, OpTypeError, "must hold numbers"),
        ({"signal": (np.ones(3), np.ones(4))}, OpShapeError, "one shape"),
        ({"signal": (np.ones(3), np.ones(3, np.float16))}, OpTypeError, "one floating-point dtype"),
        ({"signal": np.ones((2, 0))}, OpShapeError, "at least one number"),
        ({"signal": np.ones((2, 1)), "real": True, "inverse": True}, OpShapeError, "say length=1"),
        ({"signal": np.ones(3, complex), "real": True}, OpTypeError, "real=True needs a signal of real"),
        ({"radix_factors": [1, 2]}, OpValueError, "at least 2"),
        ({"radix_factors": [2000]}, OpValueError, "at most 1024"),
        ({"radix_factors": "248"}, OpTypeError, "radix_factors must be"),
        ({"radix_factors": []}, OpValueError, "radix_factors must be"),
        ({"use_parallel": 1}, OpTypeError, "use_parallel must be True or False"),
        ({"precision": "bfloat17"}, OpValueError, "Did you mean 'bfloat16'"),
        ({"precision": object()}, OpTypeError, "precision must be"),
        ({"precision": "float64"}, OpValueError, "signal of 64 bits"),
        ({"axis": 2}, OpShapeError, "dimensions of signal"),
        ({"axis": (0, -2)}, OpValueError, "each dimension once"),
        ({"axis": ()}, OpValueError, "at least one dimension"),
        ({"axis": 1.0}, OpTypeError, "axis must be an integer"),
        ({"length": 0}, OpShapeError, "at least one number"),
        ({"length": (3, 4)}, OpValueError, "for each of the 1 axes"),
        ({"inverse": "yes"}, OpTypeError, "inverse must be"),
        ({"norm": "orthogonal"}, OpValueError, "Did you mean 'ortho'"),
        ({"axis_name": "data"}, OpValueError, "for use_parallel=True"),
        ({"split_axis": 0}, OpValueError, "for use_parallel=True"),
        ({"use_parallel": True, "axis_name": 3}, OpTypeError, "axis_name must be"),
        ({"implementation": "matmull"}, OpValueError, "Did you mean 'matmul'"),
    ],
)
def test_bad_input(change, error, match):
    call = {"signal": np.ones((2, 8), np.float32), **change}
    with pytest.raises(error, match=match):
        radix_optimized_fft(**call)


def instructions(function, *arrays):
    """What a compiled program does, without the names of where it comes from."""
    text = str(jax.jit(function).lower(*arrays).compile().as_text())
    entry = text[text.index("ENTRY") :]
    return re.findall(r"= (\S+ [a-z-]+)\(.*?\)(?:, (fft_type=\w+, fft_length=\{[0-9,]+\}))?", entry)


@pytest.mark.parametrize("spec", tagged(SPECS, "large"), ids=lambda s: s.name)
def test_auto_on_cpus_is_the_program_of_jax_numpy_fft(spec):
    """So it is as fast."""
    for plain, dtype, options in (
        (jnp.fft.fftn, jnp.complex64, {}),
        (jnp.fft.ifftn, jnp.complex64, {"inverse": True}),
        (jnp.fft.rfftn, jnp.float32, {"real": True}),
    ):
        x = jax.ShapeDtypeStruct(spec.shape, dtype)
        ours = instructions(partial(radix_optimized_fft, **spec.options, **options), x)
        assert ours == instructions(partial(plain, axes=spec.axes), x)
        assert sum(bool(kind) for _, kind in ours) == 1


def test_specs_are_as_they_say():
    assert isinstance(SPECS[0], FFTSpec)
    assert {tag for spec in SPECS for tag in spec.tags} == {"small", "large", "odd"}
