"""winograd_conv2d against the definition in NumPy: values, gradients, transformations, what runs and why."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from emulation import emulated

from capibara.measure import count_flops
from capibara.ops import NoImplementationError, OpShapeError, OpTypeError, OpValueError, OpWarning, explain
from capibara.ops.conv import winograd_conv2d, winograd_forms
from capibara.ops.conv.problem import prepare
from capibara.ops.conv.specs import SPECS, ConvSpec
from capibara.ops.tagged import tagged

FAST: Any = {"xla_backend_optimization_level": 0}
NAMES = ("winograd", "xla", "reference")


def oracle(x, w, strides: Any = (1, 1), padding: Any = "SAME", tile_size=None):
    """The sum over taps, one output after the other."""
    strides = (strides, strides) if isinstance(strides, int) else strides
    taps = w.shape[:2]
    if padding == "SAME":
        lacks = [
            max((-(-n // s) - 1) * s + k - n, 0) for n, k, s in zip(x.shape[1:3], taps, strides, strict=True)
        ]
        padding = [(n // 2, n - n // 2) for n in lacks]
    elif padding == "VALID":
        padding = [(0, 0), (0, 0)]
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    out = [(n - k) // s + 1 for n, k, s in zip(x.shape[1:3], taps, strides, strict=True)]
    y = np.zeros((len(x), *out, w.shape[3]), np.result_type(x, w))
    for i in range(out[0]):
        for j in range(out[1]):
            at = i * strides[0], j * strides[1]
            y[:, i, j] = np.einsum("bhwc,hwco->bo", x[:, at[0] : at[0] + taps[0], at[1] : at[1] + taps[1]], w)
    return y


def draw(spec, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=spec.inputs), rng.normal(size=spec.filters)


def names(spec):
    return [name for name in NAMES if name != "winograd" or spec.applies]


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", tagged(SPECS, "small"), ids=lambda s: s.name)
def test_values_and_gradients_are_the_definition_s(spec):
    x, w = draw(spec)
    want = oracle(x, w, **spec.options)
    weight = np.random.default_rng(1).normal(size=want.shape)

    def every(x, w):
        found = []
        for name in names(spec):
            y, pull = jax.vjp(partial(winograd_conv2d, implementation=name, **spec.options), x, w)
            found.append((y, *pull(device_array(weight))))
        return found

    with jax.enable_x64(True):
        found = jax.jit(every, compiler_options=FAST)(x, w)
    # A convolution is linear in either operand: a gradient is exact where the operand's change is.
    dx, dw = draw(spec, seed=2)
    slopes = [np.vdot(weight, oracle(dx, w, **spec.options)), np.vdot(weight, oracle(x, dw, **spec.options))]
    for y, grad_x, grad_w in found:
        assert y.dtype == np.float64
        np.testing.assert_allclose(y, want, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose([np.vdot(dx, grad_x), np.vdot(dw, grad_w)], slopes, rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(grad_x, found[-1][1], rtol=1e-10, atol=1e-11)
        np.testing.assert_allclose(grad_w, found[-1][2], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("dtype", "tile", "tolerance"), [("float32", 4, 3e-5), ("bfloat16", 4, 3e-2), ("float16", 2, 4e-3)]
)
def test_narrow_types_sum_wide(dtype, tile, tolerance):
    x, w = (device_array(v, dtype) for v in draw(ConvSpec("", 1, 9, 9, 32, 4)))
    want = oracle(np.asarray(x, np.float64), np.asarray(w, np.float64))
    run = partial(winograd_conv2d, tile_size=tile, implementation="winograd")
    got = jax.jit(run, compiler_options=FAST)(x, w)
    assert got.dtype == dtype
    # Relative to the whole, whose terms have a variance of 9 · 32.
    assert np.abs(np.asarray(got, np.float64) - want).max() < tolerance * np.sqrt(9 * 32)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_nan_infinities_and_overflow_stay_where_the_definition_has_them(bad):
    x, w = (v.astype(np.float32) for v in draw(SPECS[0]))
    x[0, 3, 4, 1] = bad
    run = jax.jit(partial(winograd_conv2d, implementation="winograd"), compiler_options=FAST)
    with np.errstate(all="ignore"):
        want = oracle(x, w)
    assert np.isfinite(want[1]).all()
    assert not np.isfinite(want[0]).all()
    np.testing.assert_allclose(run(x, w), want, rtol=1e-3, atol=1e-3)


def test_vmap():
    spec = SPECS[0]
    x, w = (v.astype(np.float32) for v in draw(spec))
    xs, ws = np.stack([x, -2 * x, x + 1]), np.stack([w, w + 1, -w])

    def every(x, w, xs, ws):
        def both(name):
            f = partial(winograd_conv2d, implementation=name)
            pulled = jax.vmap(jax.grad(lambda x, w: jnp.sum(f(x, w) ** 2), (0, 1)), (0, None))(xs, w)
            return jax.vmap(f, (None, 0))(x, ws), jax.vmap(jax.vmap(f, (0, None)), (None, 0))(xs, ws), pulled

        return [both(name) for name in ("winograd", "xla")]

    got, want = jax.jit(every, compiler_options=FAST)(x, w, xs, ws)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())


def test_second_gradients():
    spec = SPECS[3]
    x, w = (v.astype(np.float32) for v in draw(spec))

    def every(x, w):
        def bent(name):
            f = partial(winograd_conv2d, implementation=name, **spec.options)
            inner = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
            return jax.grad(lambda x, w: sum(jnp.sum(g**2) for g in inner(x, w)), (0, 1))(x, w)

        return [bent(name) for name in ("winograd", "xla")]

    got, want = jax.jit(every, compiler_options=FAST)(x, w)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())


def test_gradients_of_what_is_not_finite():
    x, w = (v.astype(np.float32) for v in draw(SPECS[0]))
    grad = np.ones((2, 8, 8, 4), np.float32)
    grad[0, 3, 4, 1], x[1, 6, 6, 0] = np.inf, np.nan

    def both(x, w, grad):
        return [
            jax.vjp(partial(winograd_conv2d, implementation=name), x, w)[1](grad)
            for name in ("winograd", "xla")
        ]

    got, want = jax.jit(both, compiler_options=FAST)(x, w, grad)
    for a, b in zip(got, want, strict=True):
        assert not np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_vmap_over_images_is_one_larger_batch():
    xs, w = (
        jax.ShapeDtypeStruct((5, 2, 8, 8, 3), jnp.float32),
        jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float32),
    )
    f = jax.vmap(lambda x, w: winograd_conv2d(x, w, implementation="winograd"), (0, None))
    program = jax.jit(f).lower(xs, w).as_text()
    # 16 products of (5 · 2 images of 4 · 4 tiles) × 3 by 3 × 4, and the plain convolution in a branch of its own.
    assert program.count("(tensor<160x3xf32>, tensor<3x4xf32>)") == 16
    assert "stablehlo.case" in program


def test_fewer_multiplications():
    x, w = jax.ShapeDtypeStruct((4, 16, 16, 8), jnp.float32), jax.ShapeDtypeStruct((3, 3, 8, 8), jnp.float32)
    plain = 2 * 9 * 4 * 16 * 16 * 8 * 8
    for m in (2, 4):
        problem, _ = prepare(x, w, tile_size=m, implementation="winograd")
        count = count_flops(lambda x, w, p=problem: winograd_forms._products(p, x, w), x, w)
        assert count.total == plain * (m + 2) ** 2 // (9 * m * m)


@pytest.mark.parametrize("sizes", [(0, 8, 8, 3, 4), (2, 8, 8, 0, 4), (2, 8, 8, 3, 0), (2, 0, 8, 3, 4)])
def test_empty(sizes):
    n, h, width, c, o = sizes
    for name in ("auto", "winograd", "reference"):
        f = lambda x, w, i=name: winograd_conv2d(x, w, implementation=i)  # noqa: E731
        y = f(jnp.ones((n, h, width, c)), jnp.ones((3, 3, c, o)))
        assert y.shape == (n, h, width, o)
        assert not np.any(y)
    y = winograd_conv2d(jnp.ones((2, 2, 8, 3)), jnp.ones((3, 3, 3, 4)), padding="VALID")
    assert y.shape == (2, 0, 6, 4)


def shapes(spec):
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in (spec.inputs, spec.filters)]


@pytest.mark.parametrize("spec", tagged(SPECS, "large"), ids=lambda s: s.name)
def test_explain_is_what_is_lowered(spec):
    def lowered(platform):
        f = jax.jit(lambda x, w: winograd_conv2d(x, w, **spec.options))
        return f.trace(*shapes(spec)).lower(lowering_platforms=(platform,)).as_text()

    for platform in ("cpu", "cuda", "tpu"):
        answer = explain(winograd_conv2d, *shapes(spec), platform=platform, **spec.options)
        assert ("dot_general" in lowered(platform)) == (answer.chosen == "winograd")
        if platform != "cpu":
            assert answer.chosen == "xla"
            assert "is for cpu" in answer.reasons["winograd"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("56, strides of 2", "strides of 1, not 2 and 2"),
        ("224, first layer", "3 × 3 taps, not 7 × 7"),
        ("32, 16 channels", "million multiplications"),
    ],
)
def test_explain_gives_the_reason(name, reason):
    spec = next(s for s in SPECS if s.name == name)
    answer = explain(winograd_conv2d, *shapes(spec), platform="cpu", **spec.options)
    assert answer.chosen == "xla"
    assert reason in answer.reasons["winograd"]
    if not spec.applies:
        with pytest.raises(NoImplementationError, match=reason):
            jax.eval_shape(
                lambda x, w: winograd_conv2d(x, w, implementation="winograd", **spec.options), *shapes(spec)
            )


def test_wide_layers_run_winograd_on_cpus():
    spec = next(s for s in SPECS if s.name == "56, 256 channels")
    assert explain(winograd_conv2d, *shapes(spec), platform="cpu").chosen == "winograd"
    narrow = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 2048, 2048, 8), (3, 3, 8, 8))]
    answer = explain(winograd_conv2d, *narrow, platform="cpu")
    assert answer.chosen == "xla"
    assert "times XLA's convolution" in answer.reasons["winograd"]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"inputs": np.zeros((2, 8, 8))}, OpShapeError, "inputs must be .batch, height"),
        ({"inputs": np.zeros((2, 8, 8, 3), int)}, OpTypeError, "inputs must be floating point"),
        ({"filters": [[1.0]]}, OpTypeError, "filters must be an array"),
        ({"filters": np.zeros((3, 3, 2, 4))}, OpShapeError, "3 channels and filters"),
        ({"filters": np.zeros((0, 3, 3, 4))}, OpShapeError, "no taps"),
        ({"strides": 0}, OpValueError, "strides must be 2 integers"),
        ({"strides": "1"}, OpTypeError, "strides must be an integer"),
        ({"strides": (1, 1, 1)}, OpValueError, "strides must be 2"),
        ({"padding": "same"}, OpValueError, "Did you mean 'SAME'"),
        ({"padding": 1}, OpTypeError, "padding must be"),
        ({"padding": ((1, 1), (1, -1))}, OpValueError, "at least 0"),
        ({"tile_size": 3}, OpValueError, r"F\(2,3\) or F\(4,3\)"),
        ({"tile_size": True}, OpTypeError, "tile_size"),
        ({"precision": "best"}, OpValueError, "precision must be"),
        ({"precision": 1}, OpTypeError, "precision must be"),
        ({"implementation": "winogard"}, OpValueError, "Did you mean 'winograd'"),
    ],
)
def test_bad_input(change, error, match):
    call = {"inputs": np.zeros((2, 8, 8, 3)), "filters": np.zeros((3, 3, 3, 4)), **change}
    with pytest.raises(error, match=match):
        winograd_conv2d(**call)


MESH = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from capibara.ops.conv import winograd_conv2d
rng = np.random.default_rng(0)
x, w = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((8, 6, 6, 2), (3, 3, 2, 3)))
f = lambda x, w: winograd_conv2d(x, w, implementation="winograd")
want = winograd_conv2d(x, w, implementation="reference")
loss = lambda g: jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(g(x, w))), (0, 1)))
slopes = loss(lambda x, w: winograd_conv2d(x, w, implementation="reference"))(x, w)
mesh = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
split = jax.shard_map(f, mesh=mesh, in_specs=(P("y"), P()), out_specs=P("y"))
np.testing.assert_allclose(jax.jit(split)(x, w), want, atol=1e-4)
for a, b in zip(loss(split)(x, w), slopes):
    np.testing.assert_allclose(a, b, atol=1e-4)
mesh = jax.make_mesh((4, 8), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(mesh):
    y = f(jax.device_put(x, NamedSharding(mesh, P("y"))), jax.device_put(w, NamedSharding(mesh, P())))
    assert jax.typeof(y).sharding.spec[0] == "y", jax.typeof(y)
    np.testing.assert_allclose(y, want, atol=1e-4)
"""


@pytest.mark.slow
def test_inside_shard_map_and_on_explicit_meshes():
    environment = {
        **os.environ,
        "XLA_FLAGS": emulated(32, quick=True),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", MESH], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_documented_call():
    from capibara.jax.tpu_v4.backend import TpuV4ConvOps

    input_tensor, conv_filters = (v.astype(np.float32) for v in draw(SPECS[0]))
    conv_ops = TpuV4ConvOps()
    with pytest.warns(
        OpWarning, match=r"tile_size=\(4, 4\) has no effect.*Remedy: implementation='winograd'"
    ):
        conv_output = conv_ops.winograd_conv2d(
            inputs=input_tensor,
            filters=conv_filters,
            strides=(1, 1),
            padding="SAME",
            tile_size=(4, 4),
        )
    np.testing.assert_allclose(conv_output, oracle(input_tensor, conv_filters), rtol=1e-4, atol=1e-4)
