"""selective_scan: against the recurrence in NumPy, its gradients, decoding, numerics, bad input."""

# NumPy arrays go in where the signatures say jax.Array, and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.ops import OpShapeError, OpTypeError, OpValueError
from capibara.ops.scan import selective_scan
from capibara.ops.scan.specs import SPECS, ScanSpec

# Half of the time these tests take is optimising programs that run once.
FAST = {"xla_backend_optimization_level": 0}
CHECKED = [spec for spec in SPECS if "large" not in spec.tags]


def make(spec: ScanSpec, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(size=shape) for name, shape in spec.shapes().items()}
    arrays["dt"] = np.log1p(np.exp(arrays["dt"]))
    arrays["a"] = -np.exp(arrays["a"])
    return arrays


def oracle(x, dt, a, b, c, initial_state, starts=None):
    group = x.shape[2] // b.shape[2]
    h, ys = initial_state.astype(np.float64), []
    for t in range(x.shape[1]):
        b_t, c_t = np.repeat(b[:, t], group, 1), np.repeat(c[:, t], group, 1)
        decay = np.exp(dt[:, t] * a)[..., None, None]
        if starts is not None:
            h = np.where(starts[:, t, None, None, None], 0, h)
        h = decay * h + np.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], b_t)
        ys.append(np.einsum("bhpn,bhn->bhp", h, c_t))
    return np.stack(ys, 1), h


def run(arrays, implementation="auto", chunk_size=4):
    names = ("x", "dt", "a", "b", "c")
    return selective_scan(
        *(arrays[n] for n in names),
        initial_state=arrays.get("initial_state"),
        starts=arrays.get("starts"),
        chunk_size=chunk_size,
        implementation=implementation,
    )


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", CHECKED, ids=lambda s: s.name)
def test_value_and_gradient(spec):
    arrays = make(spec)

    def everything(a):
        found = {}
        for name in ("xla", "reference"):
            out, pull = jax.vjp(lambda a, name=name: run(a, name, spec.chunk_size), a)
            found[name] = out, pull(jax.tree.map(lambda v: jnp.cos(v), out))[0]
        return found

    with jax.enable_x64(True):
        found = jax.jit(everything, compiler_options=FAST)(
            {name: device_array(v) for name, v in arrays.items()}
        )
    want = oracle(**arrays)
    for name, ((y, state), gradient) in found.items():
        np.testing.assert_allclose(y, want[0], rtol=1e-10, atol=1e-11, err_msg=name)
        np.testing.assert_allclose(state, want[1], rtol=1e-10, atol=1e-11, err_msg=name)
        for key in arrays:
            np.testing.assert_allclose(
                gradient[key], found["reference"][1][key], rtol=1e-8, atol=1e-9, err_msg=f"{name} {key}"
            )


def test_gradient_against_finite_differences_of_numpy():
    arrays = make(CHECKED[1], seed=2)
    rng = np.random.default_rng(3)
    direction = {name: rng.normal(size=v.shape) for name, v in arrays.items()}
    weight = [rng.normal(size=o.shape) for o in oracle(**arrays)]

    def value(step):
        out = oracle(**{name: v + step * direction[name] for name, v in arrays.items()})
        return sum(np.vdot(w, o) for w, o in zip(weight, out, strict=True))

    want = (value(1e-6) - value(-1e-6)) / 2e-6

    def loss(a):
        y, state = run(a, "xla")
        return jnp.vdot(weight[0], y) + jnp.vdot(weight[1], state)

    with jax.enable_x64(True):
        gradient = jax.jit(jax.grad(loss))({name: device_array(v) for name, v in arrays.items()})
    got = sum(np.vdot(gradient[name], direction[name]) for name in arrays)
    assert got == pytest.approx(want, rel=1e-6)


@settings(max_examples=5, deadline=None)
@given(
    length=st.integers(1, 23),
    chunk=st.integers(1, 9),
    groups=st.integers(1, 2),
    per_group=st.integers(1, 3),
    seed=st.integers(0, 100),
)
def test_any_length_in_float32(length, chunk, groups, per_group, seed):
    spec = ScanSpec("", 2, length, groups * per_group, 3, groups, 2, chunk)
    arrays = {name: v.astype(np.float32) for name, v in make(spec, seed).items()}
    y, state = jax.jit(run, static_argnums=(1, 2), compiler_options=FAST)(arrays, "xla", chunk)
    want = oracle(**arrays)
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state, want[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("length", "chunk"), [(13, 4), (1, 4)])
def test_sequences_that_share_a_row_do_not_see_one_another(length, chunk):
    arrays = make(ScanSpec("", 2, length, 4, 3, 2, 2, chunk))
    rng = np.random.default_rng(length)

    def everything(a, starts, weight):
        found = {}
        for name in ("xla", "reference"):
            out, pull = jax.vjp(lambda a, name=name: run({**a, "starts": starts}, name, chunk), a)
            found[name] = out, pull(weight)[0]
        return found

    with jax.enable_x64(True):
        compiled = jax.jit(everything, compiler_options=FAST)
        for share in (0.0, 0.2, 0.2, 0.2, 0.5, 0.5, 1.0):
            starts = rng.random((2, length)) < share
            want = oracle(**arrays, starts=starts)
            weight = tuple(device_array(rng.normal(size=w.shape)) for w in want)
            found = compiled({n: device_array(v) for n, v in arrays.items()}, starts, weight)
            for name, ((y, state), gradient) in found.items():
                np.testing.assert_allclose(y, want[0], rtol=1e-9, atol=1e-10, err_msg=name)
                np.testing.assert_allclose(state, want[1], rtol=1e-9, atol=1e-10, err_msg=name)
                for key in arrays:
                    expected = found["reference"][1][key]
                    np.testing.assert_allclose(gradient[key], expected, rtol=1e-8, atol=1e-9, err_msg=key)


def test_pieces_join_and_steps_continue():
    spec = ScanSpec("", 2, 11, 4, 3, 2, 5, 4)
    arrays = make(spec)
    want = oracle(**arrays)
    state, ys = arrays.pop("initial_state"), []
    step = jax.jit(lambda a: run(a))
    with jax.enable_x64(True):
        for low, high in ((0, 6), (6, 9), (9, 10), (10, 11)):
            piece = {n: device_array(v if n == "a" else v[:, low:high]) for n, v in arrays.items()}
            y, state = step({**piece, "initial_state": device_array(state)})
            ys.append(y)
    np.testing.assert_allclose(np.concatenate(ys, 1), want[0], rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(state, want[1], rtol=1e-9, atol=1e-10)


def test_one_position_has_no_loop():
    arrays = make(ScanSpec("", 1, 1, 2, 3, 1, 4, 64))
    assert "while" not in str(jax.make_jaxpr(run)({n: device_array(v) for n, v in arrays.items()})).replace(
        "scan", "while"
    )


def test_strong_decay_over_a_long_chunk_neither_overflows_nor_loses_its_gradient():
    spec = ScanSpec("", 1, 200, 1, 2, 1, 3, 128)
    arrays = make(spec)
    arrays["dt"] = np.full_like(arrays["dt"], 3.0)
    arrays["a"] = np.array([-8.0])
    narrow = {name: device_array(v, jnp.float32) for name, v in arrays.items()}
    y, state = jax.jit(lambda a: run(a, "xla", 128))(narrow)
    want = oracle(**arrays)
    np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(state, want[1], rtol=1e-4, atol=1e-4)
    gradient = jax.jit(jax.grad(lambda a: jnp.sum(run(a, "xla", 128)[0])))(narrow)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradient))


def test_a_step_that_forgets_everything_costs_no_digits_of_the_later_ones():
    arrays = make(ScanSpec("", 1, 20, 2, 2, 1, 3, 20))
    arrays["dt"][:, 3], arrays["dt"][:, 9:12] = 1e7, 1e36
    arrays["x"][:, [3, 9, 10, 11]] *= 1e-36
    arrays["a"] = np.array([-0.5, -300.0])
    narrow = {name: device_array(v, jnp.float32) for name, v in arrays.items()}
    want = oracle(**arrays)
    for name in ("xla", "reference"):
        y, state = run(narrow, name, 20 if name == "xla" else None)
        np.testing.assert_allclose(y, want[0], rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(state, want[1], rtol=1e-4, atol=1e-4, err_msg=name)


def test_zero_step_keeps_the_state():
    arrays = make(ScanSpec("", 1, 5, 2, 3, 1, 4, 4))
    arrays["dt"] = np.zeros_like(arrays["dt"])
    _, state = run({n: device_array(v, jnp.float32) for n, v in arrays.items()})
    np.testing.assert_array_equal(state, arrays["initial_state"].astype(np.float32))


def test_without_an_initial_state_it_is_zero_and_float32():
    arrays = {n: device_array(v, jnp.bfloat16) for n, v in make(CHECKED[0]).items()}
    del arrays["initial_state"]
    y, state = run(arrays)
    assert (y.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    wide = {n: np.asarray(v, np.float64) for n, v in arrays.items()}
    want = oracle(**wide, initial_state=np.zeros(CHECKED[0].shapes()["initial_state"]))
    np.testing.assert_allclose(state, want[1], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.asarray(y, np.float64), want[0], rtol=2e-2, atol=2e-2)


def test_vmap():
    arrays = {n: device_array(v, jnp.float32) for n, v in make(CHECKED[1]).items()}
    double = {n: jnp.stack([v, 0.5 * v]) for n, v in arrays.items()}
    got = jax.jit(jax.vmap(run))(double)
    want = jax.jit(run)({n: v[1] for n, v in double.items()})
    np.testing.assert_allclose(got[0][1], want[0], rtol=1e-4, atol=1e-5)


def test_no_positions():
    arrays = make(ScanSpec("", 2, 0, 2, 3, 1, 4, 4))
    y, state = run({n: device_array(v, jnp.float32) for n, v in arrays.items()})
    assert y.shape == (2, 0, 2, 3)
    np.testing.assert_array_equal(state, arrays["initial_state"].astype(np.float32))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"x": np.zeros((2, 3, 4))}, OpShapeError, "x must have 4 axes"),
        ({"x": "no"}, OpTypeError, "x must be an array"),
        ({"dt": np.zeros((2, 12, 3))}, OpShapeError, r"dt must have shape \(2, 12, 4\)"),
        ({"a": np.zeros(4, np.int32)}, OpTypeError, "a must be floating point"),
        ({"c": np.zeros((2, 12, 1, 5))}, OpShapeError, "c must have shape"),
        ({"initial_state": np.zeros((2, 4, 5, 3))}, OpShapeError, "initial_state must have shape"),
        ({"starts": np.zeros((2, 11), bool)}, OpShapeError, r"starts must have shape \(2, 12\)"),
        ({"starts": np.zeros((2, 12), int)}, OpTypeError, "starts must be a boolean array, got int64"),
        ({"starts": True}, OpTypeError, "starts must be a boolean array, got bool"),
        ({"b": np.zeros((2, 12, 3, 5)), "c": np.zeros((2, 12, 3, 5))}, OpShapeError, "3 groups"),
    ],
)
def test_bad_arrays(change, error, match):
    with pytest.raises(error, match=match):
        run({**make(CHECKED[0]), **change})


def test_bad_options():
    arrays = make(CHECKED[0])
    with pytest.raises(OpValueError, match="chunk_size must be at least 1"):
        run(arrays, chunk_size=0)
    with pytest.raises(OpTypeError, match="chunk_size must be an int"):
        run(arrays, chunk_size=2.0)
    with pytest.raises(OpValueError, match="no implementation 'cpu'"):
        run(arrays, "cpu")
