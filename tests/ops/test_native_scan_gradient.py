"""The compiled gradient of the selective scan, and recurrences that are larger than the caches."""

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
from instruction_sets import instruction_sets
from jax.sharding import PartitionSpec as P

from capibara import native
from capibara.measure import count_flops
from capibara.ops.scan import linear_recurrence, selective_scan
from capibara.ops.scan.specs import SPECS, ScanSpec, arguments

pytestmark = pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))

# Half of the time these tests take is optimising programs that run once.
FAST = {"xla_backend_optimization_level": 0}
BLOCKS = (
    ScanSpec("more than a block", 2, 70, 4, 3, 2, 5, 64),
    ScanSpec("one more than two blocks", 1, 129, 3, 33, 1, 17, 64),
    ScanSpec("many heads of one group", 1, 65, 20, 9, 1, 40, 64),
)
CHECKED = [s for s in SPECS if "large" not in s.tags] + list(BLOCKS)
EVERY = tuple(range(6))


def _inputs(spec: ScanSpec, seed: int = 0) -> list[jax.Array]:
    arrays, options = arguments(spec, np.random.default_rng(seed))
    return [device_array(v, jnp.float32) for v in (*arrays, options["initial_state"])]


def _loss(way: str, *v: Any) -> Any:
    y, state = selective_scan(*v[:-1], initial_state=v[-1], implementation=way)
    return jnp.sum(jnp.sin(y.astype(jnp.float32))) + jnp.sum(state**2)


def _gradient(way: str, arrays: list[jax.Array], which: tuple[int, ...] = EVERY) -> Any:
    return jax.jit(jax.grad(partial(_loss, way), which), compiler_options=FAST)(*arrays)


def _close(got: Any, want: Any, far: float) -> None:
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        size = float(np.max(np.abs(other))) if np.size(other) else 0.0
        np.testing.assert_allclose(one, other, rtol=0, atol=far * size)


@pytest.mark.parametrize("spec", CHECKED, ids=lambda s: s.name)
def test_gradients_against_float64(spec):
    arrays = _inputs(spec)
    got = _gradient("native", arrays)
    assert all(g.dtype == v.dtype for g, v in zip(got, arrays, strict=True))
    with jax.enable_x64(True):

        def plain(*v: Any) -> Any:
            y, state = selective_scan(*v[:-1], initial_state=v[-1], implementation="reference")
            return jnp.sum(jnp.sin(y)) + jnp.sum(state**2)

        wide = [device_array(np.asarray(v), jnp.float64) for v in arrays]
        want = jax.jit(jax.grad(plain, EVERY), compiler_options=FAST)(*wide)
    _close(got, want, 1e-5)


def test_it_is_the_compiled_loop_that_runs_and_its_arithmetic_is_counted():
    arrays = _inputs(BLOCKS[0])
    gradient = jax.grad(partial(_loss, "auto"), EVERY)
    text = jax.jit(gradient, compiler_options=FAST).lower(*arrays).compile().as_text()
    assert text is not None
    assert '"capibara_selective_scan"' in text
    assert '"capibara_selective_scan_backward"' in text
    assert count_flops(gradient, *arrays).total == 16 * arrays[0].size * arrays[3].shape[-1]


@pytest.mark.parametrize("rate", [-3000.0, -20.0, 0.0, 2.0])
def test_states_that_decay_or_grow_by_any_amount(rate):
    rng = np.random.default_rng(0)
    x, b, c = (device_array(rng.normal(size=(1, 150, 1, 4)), jnp.float32) for _ in range(3))
    dt = device_array(rng.uniform(0, 0.1, (1, 150, 1)), jnp.float32).at[0, 70].set(0.0)
    arrays = [x, dt, device_array([rate]), b, c, jnp.ones((1, 1, 4, 4))]
    got, want = (
        jax.jit(
            jax.grad(lambda *v, way=way: jnp.sum(selective_scan(*v[:-1], implementation=way)[0]), EVERY[:-1]),
            compiler_options=FAST,
        )(*arrays)
        for way in ("native", "reference")
    )
    _close(got, want, 3e-5)


def test_some_arguments_and_some_results_only():
    arrays = _inputs(BLOCKS[0])
    for which in ((1,), (0, 4)):
        _close(_gradient("native", arrays, which), _gradient("reference", arrays, which), 1e-5)
    for result in (0, 1):
        got, want = (
            jax.grad(lambda x, way=way, result=result: jnp.sum(_both(way, x, arrays)[result] ** 2))(arrays[0])
            for way in ("native", "reference")
        )
        _close(got, want, 1e-5)


def _both(way: str, x: Any, arrays: list[jax.Array]) -> Any:
    return selective_scan(x, *arrays[1:5], initial_state=arrays[5], implementation=way)


@pytest.mark.slow
def test_other_derivatives():
    arrays = _inputs(ScanSpec("", 1, 5, 2, 2, 1, 3, 64))

    def second(way: str) -> Any:
        def slope(*v: Any) -> Any:
            return sum(jnp.sum(g**2) for g in jax.grad(partial(_loss, way), EVERY)(*v))

        return jax.jit(jax.grad(slope, EVERY), compiler_options=FAST)(*arrays)

    _close(second("native"), second("reference"), 1e-4)

    def forward_over_reverse(way: str) -> Any:
        gradient = jax.grad(partial(_loss, way), EVERY)
        return jax.jit(lambda *v: jax.jvp(gradient, v, v)[1], compiler_options=FAST)(*arrays)

    _close(forward_over_reverse("native"), forward_over_reverse("reference"), 1e-4)
    got, want = (
        jax.jit(lambda *v, way=way: jax.jvp(partial(_loss, way), v, v), compiler_options=FAST)(*arrays)
        for way in ("native", "reference")
    )
    _close(got, want, 1e-5)


def test_vmap_inside_and_outside():
    arrays = _inputs(BLOCKS[0])
    rates = jnp.stack([arrays[2], 2 * arrays[2], 0 * arrays[2]])
    several = [arrays[0], arrays[1], rates, jnp.stack([arrays[3]] * 3, 2), arrays[4], arrays[5]]
    axes = (None, None, 0, 2, None, None)

    def outside(way: str) -> Any:
        return jax.vmap(jax.grad(partial(_loss, way), EVERY), axes)(*several)

    def inside(way: str) -> Any:
        return jax.grad(lambda *v: jnp.sum(jax.vmap(partial(_loss, way), axes)(*v)), EVERY)(*several)

    for form in (outside, inside):
        got = jax.jit(partial(form, "native"), compiler_options=FAST)
        assert "capibara_selective_scan_backward" in got.lower().as_text()
        _close(got(), jax.jit(partial(form, "reference"), compiler_options=FAST)(), 1e-5)


def test_inside_shard_map():
    arrays = _inputs(BLOCKS[0])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = (P("data"), P("data"), P(), P("data"), P("data"), P("data"))

    def local(*v: Any) -> Any:
        return jax.lax.psum(_loss("native", *v), "data")

    whole = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())
    got = jax.jit(jax.grad(whole, EVERY), compiler_options=FAST)(*arrays)
    _close(got, _gradient("reference", arrays), 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 1, 3, 4])
def test_nan_and_infinity_reach_what_they_reach_step_by_step(place, value):
    arrays = _inputs(ScanSpec("", 2, 70, 2, 3, 2, 1, 64))
    arrays[place] = arrays[place].at[0, 66, 1].set(value)
    for one, other in zip(_gradient("native", arrays), _gradient("reference", arrays), strict=True):
        np.testing.assert_array_equal(np.isfinite(one), np.isfinite(other))


def test_narrow_floats_keep_their_dtype():
    arrays = _inputs(BLOCKS[0])
    narrow = [v.astype(jnp.bfloat16) for v in arrays[:5]] + arrays[5:]
    got = _gradient("native", narrow)
    assert [g.dtype for g in got] == [v.dtype for v in narrow]
    want = _gradient("native", [v.astype(jnp.float32) for v in narrow])
    _close([g.astype(jnp.float32) for g in got], want, 2e-2)


@pytest.mark.parametrize(
    "sizes", [(0, 5, 2, 3, 1, 4), (2, 5, 2, 0, 1, 4), (2, 5, 2, 3, 1, 0), (2, 5, 0, 3, 1, 4)]
)
def test_nothing(sizes):
    arrays = _inputs(ScanSpec("", *sizes, chunk_size=64))
    _close(_gradient("native", arrays), _gradient("reference", arrays), 1e-5)


def test_arrays_that_do_not_fit_together_are_an_error_not_a_crash():
    arrays = _inputs(SPECS[0])
    good = [*arrays, arrays[0], arrays[5]]
    rates = jax.ShapeDtypeStruct((SPECS[0].batch, SPECS[0].heads), jnp.float32)
    out = [jax.ShapeDtypeStruct(v.shape, jnp.float32) for v in arrays]
    out[2] = rates
    for i in range(8):
        bad = [v[:, :1] if k == i and v.ndim > 1 else v[:1] if k == i else v for k, v in enumerate(good)]
        with pytest.raises(Exception, match="capibara scan"):
            jax.block_until_ready(native.call("capibara_selective_scan_backward", out, *bad))


SETS = """
import jax, jax.numpy as jnp, numpy as np
from capibara import native
from capibara.ops.scan import linear_recurrence, selective_scan
rng = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
arrays = [draw(1, 70, 3, 5), jnp.abs(draw(1, 70, 3)), -jnp.abs(draw(3)), draw(1, 70, 1, 19), draw(1, 70, 1, 19)]
def loss(way, *v):
    y, state = selective_scan(*v, implementation=way)
    return jnp.sum(jnp.sin(y)) + jnp.sum(state**2)
got, want = (jax.jit(jax.grad(lambda *v: loss(way, *v), range(5)))(*arrays) for way in ("native", "reference"))
for one, other in zip(got, want):
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(other))))
a, x = jax.random.uniform(jax.random.key(0), (2, 4096, 1024), jnp.float32)
h, _ = linear_recurrence(a, x, implementation="native")
np.testing.assert_allclose(h[1:], a[1:] * h[:-1] + x[1:], rtol=1e-6)
print(native.isa())
"""


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_every_instruction_set_of_this_processor(name):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "CAPIBARA_NATIVE_ISA": name}
    done = subprocess.run(
        [sys.executable, "-c", SETS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == name


@pytest.mark.thin(4)
@pytest.mark.parametrize(("steps", "width"), [(4096, 1024), (4100, 1040), (4099, 1027), (70, 65536)])
@pytest.mark.parametrize("fixed", [False, True])
def test_recurrences_larger_than_the_caches(steps, width, fixed):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((steps, width), dtype=np.float32)
    a = rng.random((1 if fixed else steps, width), dtype=np.float32)
    for reverse in (False, True):
        h, last = (
            np.asarray(v)
            for v in linear_recurrence(
                device_array(a), device_array(x), reverse=reverse, implementation="native"
            )
        )
        # Each row follows from the one before it as the kernel gave it; the first from a state of zero.
        if reverse:
            h, rows, factors = h[::-1], x[::-1], a[::-1]
        else:
            rows, factors = x, a
        np.testing.assert_array_equal(h[0], rows[0])
        np.testing.assert_array_equal(last, h[-1])
        then = factors if fixed else factors[1:]
        np.testing.assert_allclose(h[1:], then * h[:-1] + rows[1:], rtol=1e-5, atol=1e-5)
