"""parallel_scan against jax.lax.scan: what it recognises, values, gradients, memory, infinities, bad input."""

# Wrong types go in on purpose.
# pyright: reportArgumentType=false

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from jax import lax

from capibara.ops import NoImplementationError, OpTypeError, OpValueError, explain, list_ops
from capibara.ops.scan import parallel_scan
from capibara.ops.scan.specs import PARALLEL, parallel_arguments
from capibara.ops.tagged import tagged

STEPS = 7
FAST = {"xla_backend_optimization_level": 0}
rng = np.random.default_rng(0)
A = rng.normal(size=(4, 4)).astype("float32") / 3
B = rng.normal(size=(3, 4)).astype("float32")
x = rng.normal(size=(STEPS, 4)).astype("float32")
ones = np.ones(4, "float32")


def elementwise(c, x):
    new = jnp.where(x > 0, 0.9 * c - x, -c / 2)
    return new, jnp.tanh(new) * c


def document(c, x):
    new = c @ A + x @ B
    return new, new @ B.T


def cascade(c, x):
    i, (h, g) = c
    new = h * x["a"] + x["b"] / (1.0 + i.astype(jnp.float32))
    return (i + 1, (new, jnp.where(i % 3 == 0, g, g * 0.5) - h * h)), (new + g, i)


def from_the_left(c, x):
    return jax.jit(lambda c: A @ c + x[:, None])(c), jnp.sum(c)


def own_matrices(c, x):
    return jnp.einsum("bij,bj->bi", x[:, None] * x[None] * jnp.eye(4)[:, :, None] + A, c), None


def mean_field(c, x):
    return 0.5 * c + jnp.sum(c, -1, keepdims=True) / 8 + x, c.T


def every_axis(c, x):
    return jnp.broadcast_to(jnp.sum(c), (2, 2)) / 4 + 0.3 * c + x[0], c


def mean_added(c, x):
    return c + jnp.mean(c) - x, c  # a scalar meets an array in one primitive


def mean_times(c, x):
    return x * jnp.mean(c), c


def mean_chosen(c, x):
    return 0.5 * jnp.where(x[1] > 0, jnp.sum(c), c) + x, c


def integers(c, x):
    return c * 3 + jnp.int32(1 << 30), c


def handed_on(c, x):
    return (x, c[0]), c[1]


AFFINE = {
    "elementwise": (elementwise, ones, x),
    "document": (document, ones, x[:, :3]),
    "document, batch": (document, np.ones((2, 4), "float32"), np.stack([x, 2 * x], 1)[..., :3]),
    "cascade": (cascade, (0, (ones, ones)), {"a": x, "b": x}),
    "from the left": (from_the_left, np.ones((4, 2), "float32"), x),
    "own matrices": (own_matrices, np.ones((4, 4), "float32"), x),
    "mean field": (mean_field, np.ones((2, 4), "float32"), np.stack([x, 2 * x], 1)),
    "every axis": (every_axis, np.ones((2, 2), "float32"), x),
    "mean added": (mean_added, ones, x),
    "mean times": (mean_times, ones, x),
    "mean chosen": (mean_chosen, np.ones((2, 4), "float32"), np.stack([x, 2 * x], 1)),
    "integers": (integers, np.arange(3, dtype="int32"), x),
    "handed on": (handed_on, (ones, ones), x),
}


def square(c, x):
    return c * c + x, c


def custom(c, x):
    @jax.custom_jvp
    def double(v):
        return 2 * v

    double.defjvp(lambda p, t: (double(p[0]), 5 * t[0]))
    return double(c) + x, c


def rounded(c, x):
    return c.astype(jnp.bfloat16).astype(jnp.float32) + x, c


OTHERS = {
    "tanh": (lambda c, x: (jnp.tanh(c + x), c), ones, x, "'tanh'"),
    "square": (square, ones, x, "multiplied by itself"),
    "near zero": (lambda c, x: (jnp.where(c > 1e30, 0.0, c) + x, c), ones, x, "'gt'"),
    "circle": (lambda c, x: ((c[1] + x, c[0]), c[0]), (ones, ones), x, "in a circle"),
    "rounded": (rounded, ones, x, "rounded to bfloat16"),
    "own gradient": (custom, ones, x, "custom_jvp"),
    "booleans": (lambda c, x: (c ^ (x > 0), c), np.zeros(4, bool), x, "bool"),
    "halved integers": (lambda c, x: (c // 2, c), np.arange(4, dtype="int32"), x, "'"),
    "transposed": (lambda c, x: (c.T + 1, None), np.eye(2, dtype="float32"), x, "takes the place"),
    "inverse": (lambda c, x: (1 / c, c), ones, x, "divided by the carry"),
    "stopped": (lambda c, x: (lax.stop_gradient(c) + x, c), ones, x, "'"),
}


def same(got, want, **tolerance):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype)
        if jnp.issubdtype(w.dtype, jnp.inexact):
            np.testing.assert_allclose(
                g, w, rtol=tolerance.get("rtol", 2e-5), atol=tolerance.get("atol", 2e-5)
            )
        else:
            np.testing.assert_array_equal(g, w)


@pytest.mark.thin(4)
@pytest.mark.parametrize("name", AFFINE)
def test_affine_steps_are_recognised_and_right(name):
    f, init, xs = AFFINE[name]
    assert explain(parallel_scan, f, init, xs, platform="tpu").chosen == "affine"
    assert explain(parallel_scan, f, init, xs, platform="cpu").chosen in ("native", "sequential")

    def both(init, xs):
        found = {}
        for key, scan in {
            "ours": lambda *a: parallel_scan(*a, num_segments=3, implementation="affine"),
            "backwards": lambda *a: parallel_scan(*a, reverse=True, implementation="affine"),
            "lax": lax.scan,
            "lax backwards": lambda *a: lax.scan(*a, reverse=True),
        }.items():
            out, pull = jax.vjp(lambda i, x, scan=scan: scan(f, i, x), init, xs)
            ct = [
                jnp.cos(v) if jnp.issubdtype(v.dtype, jnp.inexact) else np.zeros(v.shape, jax.dtypes.float0)
                for v in jax.tree.leaves(out)
            ]
            grads = [
                g
                for g in jax.tree.leaves(pull(jax.tree.unflatten(jax.tree.structure(out), ct)))
                if g.dtype != jax.dtypes.float0
            ]
            found[key] = out, grads
        return found

    found = jax.jit(both, compiler_options=FAST)(init, xs)
    same(found["ours"][0], found["lax"][0])
    same(found["backwards"][0], found["lax backwards"][0])
    same(found["ours"][1], found["lax"][1], rtol=1e-4, atol=1e-4)


@pytest.mark.thin(3)
@pytest.mark.parametrize("spec", tagged(PARALLEL, "small"), ids=lambda spec: spec.name)
def test_every_implementation_on_every_spec(spec):
    (step, first, xs), options = parallel_arguments(spec, np.random.default_rng(0))
    first, xs = jax.tree.map(lambda v: v.astype("float32"), (first, xs))
    tried = 0
    for name in ("auto", *list_ops()["parallel_scan"].implementations):

        def both(first, xs, name=name):
            scan = partial(parallel_scan, implementation=name, num_segments=2, **options)
            found = []
            for one in (scan, lax.scan):
                out, pull = jax.vjp(lambda h, v, one=one: one(step, h, v), first, xs)
                found.append((out, pull(jax.tree.map(jnp.cos, out))))
            return found

        try:
            (got, grads), (want, wanted) = jax.jit(both, compiler_options=FAST)(first, xs)
        except NoImplementationError:
            continue
        same(got, want)
        same(grads, wanted, rtol=1e-4, atol=1e-4)
        tried += 1
    assert tried >= 4


@pytest.mark.parametrize("name", OTHERS)
def test_other_steps_run_one_by_one_bit_for_bit(name):
    f, init, xs, reason = OTHERS[name]
    found = explain(parallel_scan, f, init, xs, platform="tpu")
    assert found.chosen == "sequential"
    assert reason in found.reasons["affine"]
    with pytest.raises(NoImplementationError, match="affine in its carry"):
        parallel_scan(f, init, xs, implementation="affine")
    got = parallel_scan(f, init, xs, num_segments=3)
    same(got, lax.scan(f, init, xs), rtol=0, atol=0)


@pytest.mark.parametrize(
    "broken", ["capibara.ops.scan.parallel.recognise", "capibara.ops.scan.parallel.solve"]
)
def test_where_the_analysis_fails_the_step_runs_one_by_one(broken, monkeypatch):
    def fails(*args):
        raise ZeroDivisionError("of no use\nmore")

    monkeypatch.setattr(broken, fails)
    found = explain(parallel_scan, elementwise, ones, x, platform="tpu")
    assert found.chosen == "sequential"
    assert "the analysis failed (ZeroDivisionError: of no use)" in found.reasons["affine"]
    same(parallel_scan(elementwise, ones, x), lax.scan(elementwise, ones, x), rtol=0, atol=0)
    got, want = (
        jax.grad(lambda c, scan=scan: jnp.sum(scan(elementwise, c, x)[1]))(ones)
        for scan in (parallel_scan, lax.scan)
    )
    same(got, want)
    reference = parallel_scan(elementwise, ones, x, implementation="reference")
    same(reference, lax.scan(elementwise, ones, x), rtol=0, atol=0)


def test_gradient_of_a_closed_over_parameter_vmap_and_second_order():
    def loss(scan, a, init):
        last, y = scan(lambda h, x: (a * h + x, h * h), init, x)
        return jnp.sum(jnp.sin(y)) + jnp.sum(last)

    for way in ("affine", "sequential"):

        def scan(*a, way=way):
            return parallel_scan(*a, num_segments=2, implementation=way)

        inits = np.stack([ones, 2 * ones])

        def grads(scan, inits):
            g = jax.grad(lambda a, i: loss(scan, a, i), (0, 1))
            second = jax.grad(lambda a: jnp.sum(g(a, ones)[0] * ones))(A[0])
            return (
                jax.vmap(g, (None, 0))(A[0], inits),
                second,
                jax.jvp(lambda a: loss(scan, a, ones), (A[0],), (ones,)),
            )

        got = jax.jit(lambda i, scan=scan: grads(scan, i), compiler_options=FAST)(inits)
        same(got, jax.jit(lambda i: grads(lax.scan, i), compiler_options=FAST)(inits), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("step", [lambda c, x: (jnp.tanh(c + x), None), lambda c, x: (0.9 * c + x * c, None)])
def test_gradients_take_memory_of_a_segment(step):
    """The states of all steps would be 4 MiB; a segment of 32 and 32 carries are an eighth of that."""
    init, xs = jnp.ones(1024), jnp.ones((1024, 1))

    def temporary(way, **options):
        grad = jax.jit(
            jax.grad(lambda i: jnp.sum(parallel_scan(step, i, xs, implementation=way, **options)[0]))
        )
        analysis = grad.lower(init).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    way = explain(parallel_scan, step, init, xs, platform="tpu").chosen
    assert temporary(way, use_checkpointing=False) > 4 << 20
    assert temporary(way, num_segments=32) < 1 << 20


@pytest.mark.parametrize("steps", [1024, 1000])
def test_more_segments_do_not_take_more_memory(steps):
    init, xs = jnp.ones(1024), jnp.ones((steps, 1))

    def temporary(num_segments):
        grad = jax.jit(
            jax.grad(
                lambda i: jnp.sum(
                    parallel_scan(lambda c, x: (jnp.tanh(c + x), None), i, xs, num_segments=num_segments)[0]
                )
            )
        )
        analysis = grad.lower(init).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    default = temporary(None)
    assert default < 1 << 19
    assert temporary(256) <= 1.1 * default


def test_infinities_and_nan_are_those_of_the_loop():
    def step(c, ax):
        c = ax[0] * c + ax[1]
        return c, c

    a, b = np.full((32, 6), 0.5, "float32"), np.ones((32, 6), "float32")
    a[3, 0], b[5, 1], b[6, 2], a[9, 1] = np.inf, np.inf, np.nan, 0.0
    a[:, 3], b[:, 3] = 1e30, 0.0  # the product overflows, the state stays 0
    for init in (np.zeros(6, "float32"), np.full(6, -1.0, "float32")):
        for mine, theirs in zip(
            jax.tree.leaves(parallel_scan(step, init, (a, b), implementation="affine")),
            jax.tree.leaves(lax.scan(step, init, (a, b))),
            strict=True,
        ):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64", "complex64"])
def test_dtypes(dtype):
    with jax.enable_x64(True):
        xs, init = device_array(x, dtype), jnp.ones(4, dtype)
        step = lambda c, x: (c * device_array(0.5, dtype) + x, c)  # noqa: E731
        assert explain(parallel_scan, step, init, xs, platform="tpu").chosen == "affine"
        tolerance = {"bfloat16": 0.05, "float64": 1e-14, "complex64": 1e-6}[dtype]
        got, want = parallel_scan(step, init, xs, implementation="affine"), lax.scan(step, init, xs)
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert g.dtype == w.dtype
            np.testing.assert_allclose(
                np.asarray(g, "complex128"), np.asarray(w, "complex128"), atol=tolerance
            )


def test_no_steps_one_step_no_inputs_and_no_outputs():
    for length in (0, 1):
        same(parallel_scan(document, ones, x[:length, :3]), lax.scan(document, ones, x[:length, :3]))
        got = parallel_scan(lambda c, _: (2 * c, None), 1.0, length=length)
        same(got, lax.scan(lambda c, _: (2 * c, None), 1.0, length=length))
    same(parallel_scan(lambda c, x: (c, x), (), x), lax.scan(lambda c, x: (c, x), (), x))


def test_side_effects_are_left_to_lax():
    seen = []

    def step(c, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x[0], ordered=True)
        return c + x, None

    assert explain(parallel_scan, step, ones, x).chosen == "reference"
    jax.block_until_ready(parallel_scan(step, ones, x))
    jax.effects_barrier()
    np.testing.assert_allclose(seen, x[:, 0])


def test_without_jit():
    with jax.disable_jit():
        same(parallel_scan(document, ones, x[:, :3]), lax.scan(document, ones, x[:, :3]))


def test_bad_input():
    with pytest.raises(OpTypeError, match="f must be a function"):
        parallel_scan(3, ones, x)
    with pytest.raises(OpTypeError, match="num_segments must be an int"):
        parallel_scan(document, ones, x[:, :3], num_segments=2.0)
    with pytest.raises(OpValueError, match="num_segments must be at least 1"):
        parallel_scan(document, ones, x[:, :3], num_segments=0)
    with pytest.raises(OpTypeError, match="use_checkpointing must be True or False"):
        parallel_scan(document, ones, x[:, :3], use_checkpointing=1)
    with pytest.raises(OpValueError, match=r"no implementation 'afine'.*affine"):
        parallel_scan(document, ones, x[:, :3], implementation="afine")
    with pytest.raises(TypeError, match="carry"):
        parallel_scan(lambda c, x: (c[:2], x), ones, x)
