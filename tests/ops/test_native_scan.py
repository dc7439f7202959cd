"""The compiled scans: recurrences and the selective scan against the step-by-step forms."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from capibara import native
from capibara.native import build
from capibara.ops import NoImplementationError, explain
from capibara.ops.scan import linear_recurrence, parallel_scan, selective_scan
from capibara.ops.scan.specs import SPECS, arguments

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)


def _recurrence(a: np.ndarray, x: np.ndarray, first: np.ndarray, reverse: bool) -> np.ndarray:
    """From the definition, in float64."""
    h, state = np.zeros(x.shape), first.astype(np.float64)
    a = np.broadcast_to(a, x.shape)
    for t in range(len(x))[:: -1 if reverse else 1]:
        h[t] = state = a[t] * state + x[t]
    return h


@settings(max_examples=20, deadline=None)
@given(
    steps=st.integers(1, 40),
    width=st.integers(1, 70),
    fixed=st.booleans(),
    narrow=st.booleans(),
    reverse=st.booleans(),
)
def test_a_recurrence_of_any_sizes(steps, width, fixed, narrow, reverse):
    rng = np.random.default_rng(steps + 100 * width)
    x = rng.normal(size=(steps, width, 2)).astype("float32")
    a = rng.uniform(-1, 1, (1 if fixed else steps, 1 if narrow else width, 2)).astype("float32")
    first = rng.normal(size=(width, 2)).astype("float32")
    arrays = [device_array(v) for v in (a, x, first)]
    h, last = linear_recurrence(
        *arrays[:2], initial_state=arrays[2], reverse=reverse, implementation="native"
    )
    want = _recurrence(a, x, first, reverse)
    np.testing.assert_allclose(h, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(last, want[0 if reverse else -1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("reverse", [False, True])
def test_derivatives_of_a_recurrence(reverse):
    rng = np.random.default_rng(0)
    a, x = (device_array(v, jnp.float32) for v in rng.uniform(0.5, 1, (2, 13, 5)))
    first = jnp.ones(5)

    def loss(way: str, a: Any, x: Any, first: Any) -> Any:
        h, last = linear_recurrence(a, x, initial_state=first, reverse=reverse, implementation=way)
        return jnp.sum(jnp.sin(h)) + jnp.sum(last**2)

    mine, theirs = (partial(loss, way) for way in ("native", "reference"))
    for transform in (
        jax.grad,
        jax.jacfwd,
        lambda f, i: jax.grad(lambda *v: jnp.sum(jax.grad(f, i)(*v)[0] ** 2), i),
    ):
        for one, other in zip(
            jax.tree.leaves(jax.jit(transform(mine, (0, 1, 2)))(a, x, first)),
            jax.tree.leaves(jax.jit(transform(theirs, (0, 1, 2)))(a, x, first)),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_recurrence_under_vmap():
    rng = np.random.default_rng(0)
    a, x = (device_array(v, jnp.float32) for v in rng.uniform(0.5, 1, (2, 3, 13, 5)))
    run = partial(linear_recurrence, implementation="native")
    got = jax.vmap(run, (None, 1), 1)(a[0], jnp.moveaxis(x, 0, 1))[0]
    for i in range(3):
        np.testing.assert_allclose(got[:, i], run(a[0], x[i])[0], rtol=1e-6, atol=1e-6)


def test_infinities_and_nan_are_those_of_the_loop():
    a = device_array([[2.0, 0.0, 1.0]] * 4)
    x = device_array([[1e38, jnp.inf, jnp.nan]] + [[1e38, 1.0, 1.0]] * 3)
    got, want = (linear_recurrence(a, x, implementation=way)[0] for way in ("native", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_what_the_recurrence_does_not_take_runs_otherwise_and_says_why():
    x = jnp.ones((9, 3))
    assert explain(linear_recurrence, x, x, platform="cpu").chosen == "native"
    found = explain(linear_recurrence, x, x, num_segments=3, platform="cpu")
    assert found.chosen == "xla"
    assert "num_segments" in found.reasons["native"]
    half = x.astype(jnp.bfloat16)
    assert "float32" in explain(linear_recurrence, half, half, platform="cpu").reasons["native"]
    with pytest.raises(NoImplementationError, match="float32"):
        linear_recurrence(half, half, implementation="native")


def _step(h: Any, ax: Any) -> Any:
    h = jnp.exp(-(ax[0] ** 2)) * h + ax[1]
    return h, (jnp.tanh(h), ax[0])


def test_a_selection_clears_an_infinite_carry_unless_native_is_asked_for():
    def step(h: Any, ax: Any) -> Any:
        reset, x = ax
        g = 0.5 * jnp.where(reset, x, 2 * h + x)  # the selection inside of what else is done
        return g + x, g

    reset = device_array([False, False, True, False])
    calm = (reset, device_array([1.0, 2.0, 3.0, 4.0]))
    wild = (reset, device_array([1.0, jnp.inf, 3.0, 4.0]))
    want = lax.scan(step, jnp.float32(1), wild)[1]
    assert np.isfinite(want[2:]).all()
    np.testing.assert_array_equal(parallel_scan(step, jnp.float32(1), wild)[1], want)
    found = explain(parallel_scan, step, jnp.float32(1), wild, platform="cpu")
    assert found.chosen == "sequential"
    assert "product with 0" in found.reasons["native"]
    got = parallel_scan(step, jnp.float32(1), calm, implementation="native")[1]
    np.testing.assert_allclose(got, lax.scan(step, jnp.float32(1), calm)[1], rtol=1e-6)

    def between(h: Any, ax: Any) -> Any:  # both are of the carry: nothing is cleared
        return jnp.where(ax[0], 0.5 * h, h + ax[1]), h

    assert explain(parallel_scan, between, jnp.float32(1), calm, platform="cpu").chosen == "native"


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("num_segments", [None, 3])
def test_an_affine_scan(reverse, num_segments):
    rng = np.random.default_rng(0)
    xs = tuple(device_array(v, jnp.float32) for v in rng.normal(size=(2, 17, 4, 3)))
    init = jnp.ones((4, 3))
    assert explain(parallel_scan, _step, init, xs, platform="cpu").chosen == "native"
    options: dict[str, Any] = {"reverse": reverse}

    def loss(scan: Any, init: Any, xs: Any) -> Any:
        last, ys = scan(_step, init, xs, **options)
        return jnp.sum(last) + sum(jnp.sum(jnp.sin(y)) for y in ys)

    mine = partial(parallel_scan, num_segments=num_segments, implementation="native")
    for one, other in zip(
        jax.tree.leaves(jax.jit(partial(mine, _step, **options))(init, xs)),
        jax.tree.leaves(lax.scan(_step, init, xs, **options)),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
    got = jax.jit(jax.grad(partial(loss, mine), (0, 1)))(init, xs)
    want = jax.jit(jax.grad(partial(loss, lax.scan), (0, 1)))(init, xs)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", [s for s in SPECS if "large" not in s.tags], ids=lambda s: s.name)
def test_a_selective_scan(spec):
    arrays, options = arguments(spec, np.random.default_rng(0))
    narrow = [device_array(v, jnp.float32) for v in (*arrays, options["initial_state"])]

    def run(way: str, *v: Any) -> Any:
        return selective_scan(*v[:-1], initial_state=v[-1], implementation=way)

    got = jax.jit(partial(run, "native"))(*narrow)
    with jax.enable_x64(True):
        want = run("reference", *(device_array(np.asarray(v), "float64") for v in narrow))
    for one, other in zip(got, want, strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    # Derivatives are the chunked form's, of both modes.
    loss = lambda way, *v: jnp.sum(jnp.sin(run(way, *v)[0])) + jnp.sum(run(way, *v)[1] ** 2)  # noqa: E731
    for transform in (jax.grad, jax.jacfwd):
        for one, other in zip(
            jax.jit(transform(partial(loss, "native"), range(6)))(*narrow),
            jax.jit(transform(partial(loss, "reference"), range(6)))(*narrow),
            strict=True,
        ):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rate", [-3000.0, -700.0, -20.0, 0.0, 2.0])
def test_a_state_that_decays_or_grows_by_any_amount(rate):
    rng = np.random.default_rng(0)
    x, b, c = (device_array(rng.normal(size=(1, 150, 1, 4)), jnp.float32) for _ in range(3))
    dt = device_array(rng.uniform(0, 0.1, (1, 150, 1)), jnp.float32).at[0, 70].set(0.0)
    got, want = (
        selective_scan(x, dt, device_array([rate]), b, c, implementation=way)
        for way in ("native", "reference")
    )
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5 * float(jnp.max(jnp.abs(other))))


def test_a_selective_scan_under_vmap_and_in_bfloat16():
    arrays, _ = arguments(SPECS[0], np.random.default_rng(0))
    x, dt, a, b, c = (device_array(v, jnp.float32) for v in arrays)
    rates = jnp.stack([a, 2 * a])
    run = partial(selective_scan, implementation="native")
    got = jax.jit(jax.vmap(lambda a: run(x, dt, a, b, c)[0]))(rates)
    for i in range(2):
        np.testing.assert_allclose(got[i], run(x, dt, rates[i], b, c)[0], rtol=1e-6, atol=1e-6)
    y, state = run(x.astype(jnp.bfloat16), dt, a, b, c)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    rounded, _ = run(x.astype(jnp.bfloat16).astype(jnp.float32), dt, a, b, c)
    np.testing.assert_allclose(y.astype(jnp.float32), rounded, rtol=2**-8)


def test_arrays_that_do_not_fit_together_are_an_error_not_a_crash():
    x, out = (
        jnp.ones((4, 3)),
        [jax.ShapeDtypeStruct((4, 3), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)],
    )
    for arrays in ((x[:2], x, x[0]), (x, x, x), (x[:, :2], x, x[0]), (x, x[:0], x[0])):
        with pytest.raises(Exception, match="capibara scan"):
            jax.block_until_ready(native.call("capibara_recurrence", out, *arrays, reverse=0, late=0))
    arrays, options = arguments(SPECS[0], np.random.default_rng(0))
    good = [device_array(v, jnp.float32) for v in (*arrays, options["initial_state"])]
    out = [jax.ShapeDtypeStruct(good[i].shape, jnp.float32) for i in (0, 5)]
    for i in range(6):
        bad = [v[:, :1] if k == i and v.ndim > 1 else v[:1] if k == i else v for k, v in enumerate(good)]
        with pytest.raises(Exception, match="capibara scan"):
            jax.block_until_ready(native.call("capibara_selective_scan", out, *bad))
