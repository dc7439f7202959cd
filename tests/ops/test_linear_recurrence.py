"""Linear recurrences, semiring scans, spiking neurons, and the documented class: against NumPy's loops."""

# NumPy arrays and wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import capibara.jax as cjax
from capibara.ops import OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.scan import lif, linear_recurrence, matrix_linear_recurrence, semiring_scan

FAST = {"xla_backend_optimization_level": 0}
rng = np.random.default_rng(0)


def loop(a, x, first, reverse=False, times=np.multiply):
    h, out = first, np.zeros_like(x)
    steps = range(len(x))
    for t in reversed(steps) if reverse else steps:
        h = times(a[t], h) + x[t]
        out[t] = h
    return out, h


@settings(max_examples=6, deadline=None)
@given(
    steps=st.integers(1, 20),
    segments=st.sampled_from([None, 1, 3, 8, 64]),
    reverse=st.booleans(),
    fixed=st.booleans(),
    seed=st.integers(0, 9),
)
def test_elementwise(steps, segments, reverse, fixed, seed):
    random = np.random.default_rng(seed)
    x, first = (
        random.normal(size=(steps, 2, 3)).astype("float32"),
        random.normal(size=(2, 3)).astype("float32"),
    )
    a = random.normal(size=(1, 2, 1) if fixed else (steps, 2, 3)).astype("float32")
    got = linear_recurrence(a, x, initial_state=first, reverse=reverse, num_segments=segments)
    want = loop(np.broadcast_to(a, x.shape).astype("float64"), x.astype("float64"), first, reverse)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(3, 3), (11, 1, 3, 3), (1, 2, 3, 3), (11, 2, 3, 3)])
def test_matrices(shape):
    a = rng.normal(size=shape).astype("float32") / 2
    x, first = rng.normal(size=(11, 2, 3)).astype("float32"), rng.normal(size=(2, 3)).astype("float32")
    full = np.broadcast_to(a, (11, 2, 3, 3))
    for reverse in (False, True):
        got = matrix_linear_recurrence(a, x, initial_state=first, reverse=reverse, num_segments=4)
        want = loop(full, x, first, reverse, lambda m, h: np.einsum("bij,bj->bi", m, h))
        for g, w in zip(got, want, strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("matrix", [False, True])
def test_gradients_of_first_and_second_order_are_the_reference_s(matrix):
    function = matrix_linear_recurrence if matrix else linear_recurrence
    a = rng.normal(size=(6, 3, 3) if matrix else (6, 3))
    x, first = rng.normal(size=(6, 3)), rng.normal(size=3)
    way = rng.normal(size=a.shape)

    def everything(a, x, first):
        found = []
        for options in ({"num_segments": 2}, {"implementation": "reference"}):

            def loss(a, x, first, options=options):
                h, last = function(a, x, initial_state=first, reverse=True, **options)
                return jnp.sum(jnp.sin(h)) + jnp.sum(last**2)

            grad = jax.grad(loss, (0, 1, 2))
            forward = jax.jvp(loss, (a, x, first), (way, x, first))[1]
            second = jax.grad(lambda a, grad=grad: jnp.vdot(grad(a, x, first)[0], way))(a)
            found.append((grad(a, x, first), forward, second))
        return found

    with jax.enable_x64(True):
        got, want = jax.jit(everything, compiler_options=FAST)(*(device_array(v) for v in (a, x, first)))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-10)


def test_integers_wrap_as_the_loop_does_and_vmap():
    x = rng.integers(-(1 << 30), 1 << 30, size=(40, 3), dtype=np.int32)
    a = rng.integers(-9, 9, size=(2, 40, 3), dtype=np.int32)
    got = jax.vmap(lambda a: linear_recurrence(a, x, num_segments=5))(a)
    with np.errstate(over="ignore"):
        for i in range(2):
            want = loop(a[i], x, np.zeros(3, np.int32))
            np.testing.assert_array_equal(got[0][i], want[0])
            np.testing.assert_array_equal(got[1][i], want[1])


def test_empty_and_explained():
    h, last = linear_recurrence(np.zeros((0, 3), "float32"), np.zeros((0, 3), "float32"))
    assert h.shape == (0, 3)
    np.testing.assert_array_equal(last, np.zeros(3))
    for a, x in (
        ((2, 2), (0, 3, 2)),
        ((1, 1, 2, 2), (0, 3, 2)),
        ((0, 3, 2, 2), (0, 3, 2)),
        ((0, 0), (4, 3, 0)),
    ):
        for implementation in ("auto", "xla", "reference"):
            first = np.full(x[1:], 2.0, "float32")
            a_, x_ = np.zeros(a, "float32"), np.zeros(x, "float32")
            h, last = matrix_linear_recurrence(a_, x_, initial_state=first, implementation=implementation)
            assert h.shape == x
            np.testing.assert_array_equal(last, first)
    x = jax.ShapeDtypeStruct((8, 3), "float32")
    for platform in ("tpu", "cuda"):
        assert explain(linear_recurrence, x, x, platform=platform).chosen == "xla"
    assert explain(linear_recurrence, x, x, platform="cpu").chosen in ("native", "xla")


def test_narrow_floats_are_summed_in_float32():
    x, a = np.full((512, 1), 1.0), np.full((1, 1), 1.0)
    h, last = linear_recurrence(device_array(a, "bfloat16"), device_array(x, "bfloat16"))
    assert h.dtype == last.dtype == jnp.bfloat16
    assert float(last[0]) == 512  # added in bfloat16 it stops at 256


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_a", [False, True])
@pytest.mark.parametrize("semiring", ["sum_product", "max_plus", "min_plus", "log_sum_exp"])
def test_semirings(semiring, with_a, reverse):
    b = rng.normal(size=(2, 9)).astype("float32")
    one = 1.0 if semiring == "sum_product" else 0.0
    a = rng.normal(size=b.shape).astype("float32") if with_a else None
    plus = {
        "sum_product": np.add,
        "max_plus": np.maximum,
        "min_plus": np.minimum,
        "log_sum_exp": np.logaddexp,
    }
    times = np.multiply if semiring == "sum_product" else np.add
    h, want = np.full(2, {"sum_product": 0.0, "min_plus": np.inf}.get(semiring, -np.inf)), np.zeros_like(b)
    for t in reversed(range(9)) if reverse else range(9):
        h = plus[semiring](times(one if a is None else a[:, t], h), b[:, t])
        want[:, t] = h
    got = semiring_scan(b, a, semiring=semiring, axis=-1, reverse=reverse)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def neurons(inputs, decay, threshold, reset):
    v, spikes = np.zeros(inputs.shape[1:]), np.zeros_like(inputs)
    for t, current in enumerate(inputs):
        v = decay * v + current
        spikes[t] = v >= threshold
        v = v - spikes[t] * threshold if reset == "subtract" else v * (1 - spikes[t])
    return spikes, v


@pytest.mark.parametrize("reset", ["subtract", "zero"])
def test_spiking_neurons(reset):
    inputs = rng.uniform(0, 0.8, size=(30, 5))
    decay = rng.uniform(0.5, 1, size=5)
    with jax.enable_x64(True):
        spikes, last = lif(device_array(inputs), decay=decay, threshold=1.1, reset=reset, num_segments=4)
    want = neurons(inputs, decay, 1.1, reset)
    np.testing.assert_array_equal(spikes, want[0])
    assert 0 < want[0].sum() < want[0].size
    np.testing.assert_allclose(last, want[1], rtol=1e-12)


@pytest.mark.parametrize(
    ("surrogate", "rate"),
    [
        ("fast_sigmoid", lambda u: 3 / (1 + abs(3 * u)) ** 2),
        ("sigmoid", lambda u: 3 * np.exp(-3 * u) / (1 + np.exp(-3 * u)) ** 2),
        ("arctan", lambda u: 3 / (1 + (np.pi * 3 * u) ** 2)),
    ],
)
def test_surrogate_gradients(surrogate, rate):
    """Two steps by hand: the second spike depends on the first input through the decay and the reset."""
    inputs = np.array([0.9, 0.4], "float32")
    grad = jax.grad(lambda i: lif(i, decay=0.5, threshold=1.0, surrogate=surrogate, slope=3.0)[0][1])(inputs)
    first, second = 0.9 - 1, 0.45 + 0.4 - 1
    want = [rate(second) * 0.5 * (1 - rate(first)), rate(second)]
    np.testing.assert_allclose(grad, want, rtol=1e-4)


def test_the_documented_class():
    from capibara.jax.tpu_v4.backend import TpuV4ScanOps
    from capibara.jax.tpu_v4.kernels import TpuV4ScanOps as Same

    assert Same is TpuV4ScanOps
    scan_ops = TpuV4ScanOps()
    transition_matrix = rng.normal(size=(4, 4)).astype("float32") / 4
    input_matrix = rng.normal(size=(3, 4)).astype("float32")
    output_matrix = rng.normal(size=(4, 2)).astype("float32")
    initial_state, input_sequence = np.zeros(4, "float32"), rng.normal(size=(512, 3)).astype("float32")

    def ssm_step(carry, x):
        new_carry = carry @ transition_matrix + x @ input_matrix
        output = new_carry @ output_matrix
        return new_carry, output

    final_carry, outputs = scan_ops.parallel_scan(
        f=ssm_step, init=initial_state, xs=input_sequence, num_segments=256, use_checkpointing=True
    )
    assert (
        explain(scan_ops.parallel_scan, ssm_step, initial_state, input_sequence, platform="tpu").chosen
        == "affine"
    )
    want = lax.scan(ssm_step, initial_state, input_sequence)
    np.testing.assert_allclose(final_carry, want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs, want[1], rtol=1e-4, atol=1e-5)
    positional = scan_ops.parallel_scan(ssm_step, initial_state, input_sequence, num_segments=256)
    np.testing.assert_allclose(positional[1], want[1], rtol=1e-4, atol=1e-5)
    info = cjax.get_backend_info()
    assert info["capabilities"]["parallel_scan"] is True
    assert info["implementations"]["parallel_scan"]["chosen"] != "reference"


def test_bad_input():
    x = np.zeros((4, 3), "float32")
    with pytest.raises(OpShapeError, match=r"a must have shape \(4, 3\)"):
        linear_recurrence(np.zeros((4, 2), "float32"), x)
    with pytest.raises(OpShapeError, match=r"a must have shape \[3, 3\]"):
        matrix_linear_recurrence(np.zeros((4, 3), "float32"), x)
    with pytest.raises(OpShapeError, match="initial_state must have shape"):
        linear_recurrence(x, x, initial_state=x)
    with pytest.raises(OpTypeError, match="a is float64 and x is float32"):
        linear_recurrence(np.zeros((4, 3)), x)
    with pytest.raises(OpTypeError, match="x must be numbers, got bool"):
        linear_recurrence(x > 0, x > 0)
    with pytest.raises(OpTypeError, match="reverse must be"):
        linear_recurrence(x, x, reverse=1)
    with pytest.raises(OpValueError, match="num_segments must be at least 1"):
        linear_recurrence(x, x, num_segments=0)
    with pytest.raises(OpValueError, match=r"semiring must be one of.*max_plus"):
        semiring_scan(x, semiring="max_plu")
    with pytest.raises(OpTypeError, match="must be floating for log_sum_exp"):
        semiring_scan(np.zeros(3, "int32"), semiring="log_sum_exp")
    with pytest.raises(OpValueError, match="axis 2"):
        semiring_scan(x, axis=2)
    with pytest.raises(OpValueError, match="reset must be one of"):
        lif(x, reset="none")
    with pytest.raises(OpShapeError, match="decay must broadcast"):
        lif(x, decay=np.ones(2, "float32"))
    with pytest.raises(OpValueError, match="slope must be finite and above 0"):
        lif(x, slope=0)
    with pytest.raises(OpTypeError, match="inputs must be an array of floating point"):
        lif(np.zeros((4, 3), "int32"))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_inside_shard_map_coefficients_may_vary_where_the_steps_do_not(implementation):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    a, x = rng.normal(size=(1, 4, 3)).astype("float32"), rng.normal(size=(4, 3)).astype("float32")

    def run(a, x):
        return linear_recurrence(a[0], x, implementation=implementation)[0][None]

    mapped = jax.shard_map(run, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    want, _ = loop(a[0], x, np.zeros(3, "float32"))
    np.testing.assert_allclose(jax.jit(mapped)(a, x)[0], want, rtol=1e-5, atol=1e-6)
