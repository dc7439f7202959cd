"""What layers consist of, in the form for training on CPUs: against NumPy, and its gradients against plain JAX."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_sets
from other_process import run_apart

from capibara.measure import count_flops
from capibara.native import build
from capibara.native.library import call
from capibara.ops import layers
from capibara.ops.rotary import rotary

native = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

# Rows, inner and columns of each matrix: incomplete tiles, several parts of rows, columns past a block's, sums that
# each thread has rows of, several shares of the depth, empty ones.
PRODUCTS = [
    (70, 33, (50,)),
    (2100, 40, (65, 7)),
    (1500, 513, (96, 31, 200)),
    (3, 700, (1100,)),
    (4096, 17, (2100,)),
    (64, 600, (300, 40)),
    (190, 1024, (513,)),
    (1025, 512, (1030, 5)),
    (2, 1, (1,)),
    (0, 5, (3,)),
    (4, 0, (3, 2)),
    (5, 3, (0, 2)),
]


def numbers(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def close(got: Any, want: Any, size: Any) -> None:
    """Within what sums in float32 may differ by, relative to the sums of sizes."""
    bound = 4e-6 * np.asarray(size, np.float64) + 1e-12
    assert (np.abs(np.asarray(got, np.float64) - np.asarray(want, np.float64)) <= bound).all()


def check_products(rows: int, inner: int, columns: tuple[int, ...]) -> None:
    x = numbers(0, rows, inner)
    matrices = [numbers(1 + i, inner, n) for i, n in enumerate(columns)]
    slopes = tuple(numbers(9 + i, rows, n) for i, n in enumerate(columns))
    out, pull = jax.vjp(jax.jit(layers.products), x, *matrices)
    of_x, *of_matrices = pull(slopes)
    wide, slope = np.asarray(x, np.float64), [np.asarray(s, np.float64) for s in slopes]
    each = [np.asarray(m, np.float64) for m in matrices]
    for got, m in zip(out, each, strict=True):
        close(got, wide @ m, np.abs(wide) @ np.abs(m))
    want = sum((s @ m.T for s, m in zip(slope, each, strict=True)), np.zeros(wide.shape))
    size = sum((np.abs(s) @ np.abs(m.T) for s, m in zip(slope, each, strict=True)), np.zeros(wide.shape))
    close(of_x, want, size)
    for got, s in zip(of_matrices, slope, strict=True):
        close(got, wide.T @ s, np.abs(wide.T) @ np.abs(s))
    # Transposed: the same numbers the other way round.
    out, pull = jax.vjp(jax.jit(layers.product_transposed), x, matrices[0].T)
    close(out, wide @ each[0], np.abs(wide) @ np.abs(each[0]))
    of_x, of_matrix = pull(slopes[0])
    close(of_x, slope[0] @ each[0].T, np.abs(slope[0]) @ np.abs(each[0].T))
    close(of_matrix, slope[0].T @ wide, np.abs(slope[0].T) @ np.abs(wide))


def check_like(function: Callable[..., Any], plain: Callable[..., Any], *arrays: jax.Array) -> None:
    """Values and gradients are those of the plain form in float64."""
    with jax.enable_x64(True):
        exact = [np.asarray(x, np.float64) for x in arrays]
        want, pull = jax.vjp(plain, *exact)
        slope = np.asarray(numbers(5, *want.shape), np.float64)
        of_each = pull(slope)
    got, pull = jax.vjp(jax.jit(function), *arrays)
    np.testing.assert_allclose(got, want, rtol=3e-6, atol=3e-6)
    for one, other in zip(pull(jnp.asarray(slope, jnp.float32)), of_each, strict=True):
        # Slopes of what many rows have in common are sums over them.
        scale = max(float(np.max(np.abs(other), initial=1.0)), arrays[0].size ** 0.5)
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=5e-6 * scale)


def plain_norm(x: Any, scale: Any, epsilon: float, offset: float) -> Any:
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * (scale + offset)


NORMS = [(1, 1), (3, 7), (700, 256), (5, 1000), (2, 3, 65), (40000, 2), (2, 50000)]


def check_norm(*shape: int) -> None:
    for epsilon, offset in ((1e-5, 0.0), (1e-2, 1.0)):

        def norm(x: Any, scale: Any, epsilon: float = epsilon, offset: float = offset) -> Any:
            return layers.rms_norm(x, scale, epsilon, offset)

        def plain(x: Any, scale: Any, epsilon: float = epsilon, offset: float = offset) -> Any:
            return plain_norm(x, scale, epsilon, offset)

        check_like(norm, plain, numbers(0, *shape), numbers(1, shape[-1]))


GATES = [(1,), (17,), (3, 5, 7), (70000,)]


def check_gate(*shape: int) -> None:
    check_like(
        layers.gated,
        lambda gate, up: gate / (1 + jnp.exp(-gate)) * up,
        numbers(0, *shape),
        numbers(1, *shape),
    )


# The array, the table's shape before the pairs, pairs.
ROTATIONS = [
    ((5, 2, 8), (5,), 4),
    ((3, 40, 4, 70), (3, 40), 33),
    ((2, 3, 30, 1, 66), (30,), 32),
    ((1, 1, 3), (1,), 1),
]


def check_rotation(shape: tuple[int, ...], lead: tuple[int, ...], pairs: int) -> None:
    tables = numbers(1, *lead, pairs), numbers(2, *lead, pairs)
    check_like(layers.rotate, lambda x, cos, sin: rotary(x, cos=cos, sin=sin), numbers(0, *shape), *tables)


@pytest.mark.thin(3)
@native
@pytest.mark.parametrize("sizes", PRODUCTS)
def test_products(sizes: tuple[int, int, tuple[int, ...]]) -> None:
    check_products(*sizes)


@native
@settings(max_examples=25)
@given(st.integers(1, 1300), st.integers(1, 530), st.lists(st.integers(1, 90), min_size=1, max_size=4))
def test_products_of_any_sizes(rows: int, inner: int, columns: list[int]) -> None:
    check_products(rows, inner, tuple(columns))


@pytest.mark.thin(3)
@native
@pytest.mark.parametrize("shape", NORMS)
def test_norms(shape: tuple[int, ...]) -> None:
    check_norm(*shape)


@native
@pytest.mark.parametrize("shape", GATES)
def test_gates(shape: tuple[int, ...]) -> None:
    check_gate(*shape)


@native
@pytest.mark.parametrize(("shape", "lead", "pairs"), ROTATIONS)
def test_rotations(shape: tuple[int, ...], lead: tuple[int, ...], pairs: int) -> None:
    check_rotation(shape, lead, pairs)


@pytest.mark.thin(2)
@native
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import json
from capibara import native
from test_layers import GATES, NORMS, PRODUCTS, ROTATIONS, check_gate, check_norm, check_products, check_rotation
for sizes in PRODUCTS:
    check_products(*sizes)
for shape in NORMS:
    check_norm(*shape)
for shape in GATES:
    check_gate(*shape)
for case in ROTATIONS:
    check_rotation(*case)
print("RESULT", json.dumps(native.isa()))
"""
    assert run_apart(program, CAPIBARA_NATIVE_ISA=name, PYTHONPATH=HERE) == name


@native
def test_gates_far_from_zero_and_not_finite() -> None:
    gate = jnp.asarray([-200.0, -90.0, 90.0, 200.0, jnp.nan, -jnp.inf, jnp.inf, 3e38] * 5, jnp.float32)
    up = jnp.ones_like(gate)
    got, pull = jax.vjp(jax.jit(layers.gated), gate, up)
    assert np.isnan(got[4])
    np.testing.assert_allclose(got[:4], [0, 0, 90, 200], atol=1e-30)
    of_gate, of_up = pull(up)
    np.testing.assert_allclose(of_gate[:4], [0, 0, 1, 1], atol=1e-30)
    np.testing.assert_allclose(of_up[:4], [0, 0, 90, 200], atol=1e-30)
    assert np.isnan(of_gate[4])


@native
def test_gradients_of_tables_only_where_they_are_asked_for() -> None:
    x, cos, sin = numbers(0, 30, 2, 8), numbers(1, 30, 4), numbers(2, 30, 4)

    def loss(x: jax.Array, cos: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(layers.rotate(x, cos, sin)))

    def plain(x: jax.Array, cos: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(rotary(x, cos=cos, sin=sin)))

    for argument in (0, 1):
        got, want = (jax.jit(jax.grad(f, argument))(x, cos) for f in (loss, plain))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@native
def test_under_vmap_each_is_computed_by_itself() -> None:
    x, scale, m = numbers(0, 3, 40, 16), numbers(1, 3, 16), numbers(2, 3, 16, 20)

    def each(x: jax.Array, scale: jax.Array, m: jax.Array) -> jax.Array:
        normed = layers.rms_norm(x, scale, 1e-5, 0.0)
        return layers.gated(layers.products(normed, m)[0], layers.products(x, m)[0])

    def plain(x: jax.Array, scale: jax.Array, m: jax.Array) -> jax.Array:
        return jax.nn.silu(plain_norm(x, scale, 1e-5, 0.0) @ m) * (x @ m)

    got, want = (jax.vmap(jax.grad(lambda *a, f=f: jnp.sum(f(*a) ** 2)))(x, scale, m) for f in (each, plain))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.max(jnp.abs(want))))


def layer(x: jax.Array, scale: jax.Array, m: jax.Array, table: jax.Array) -> jax.Array:
    """A value of all operations, in the form for training where that is taken, and else in plain JAX."""
    takes = layers.takes_rms_norm(x, scale, "float32")
    y: Any = layers.rms_norm(x, scale, 1e-5, 0.0) if takes else plain_norm(x, scale, 1e-5, 0.0)
    a, b = (
        layers.products(y, m, m * m) if layers.takes_products(y, (m, m), "float32") else (y @ m, y @ (m * m))
    )
    gate = layers.gated(y, x) if layers.takes_gated(y, x) else jax.nn.silu(y) * x
    heads = gate.reshape(len(x), 2, -1)
    takes = layers.takes_rotate(heads, table, table)
    turned = layers.rotate(heads, table, table) if takes else rotary(heads, cos=table, sin=table)
    return sum((jnp.sum(jnp.sin(each)) for each in (a, b, turned)), start=jnp.zeros((), jnp.float32))


def of_a_layer() -> tuple[jax.Array, ...]:
    return numbers(0, 512, 128), numbers(1, 128), numbers(2, 128, 24) / 10, numbers(3, 512, 32)


def check_in_training(gradients: Callable[[], Any]) -> None:
    """What is computed inside of ``training_kernels`` is what is computed outside."""
    want = jax.tree.leaves(gradients())
    with layers.training_kernels():
        got = jax.tree.leaves(gradients())
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(other))))


@native
@pytest.mark.parametrize("wide", [False, True])
def test_second_derivatives(wide: bool) -> None:
    arrays = of_a_layer()

    def length(*arrays: jax.Array) -> jax.Array:
        return sum(
            (jnp.sum(g**2) for g in jax.grad(layer, (0, 1, 2))(*arrays)), start=jnp.zeros((), jnp.float32)
        )

    with jax.enable_x64(wide):
        check_in_training(lambda: jax.jit(jax.grad(length, (0, 1)))(*arrays))


@native
@pytest.mark.parametrize("outside", [False, True])
def test_inside_shard_map(outside: bool) -> None:
    arrays, spec = of_a_layer(), jax.P
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    where = (spec("data"), spec(), spec(), spec("data"))

    def each(*arrays: jax.Array) -> Any:
        return jax.lax.psum(layer(*arrays), "data") if outside else jax.grad(layer, (0, 1, 2, 3))(*arrays)

    mapped = jax.shard_map(each, mesh=mesh, in_specs=where, out_specs=spec() if outside else where)
    check_in_training(lambda: jax.jit(jax.grad(mapped, (0, 1, 2, 3)) if outside else mapped)(*arrays))


@native
@pytest.mark.parametrize("sharded", [0, 2])
def test_on_a_mesh_with_explicit_axes(sharded: int) -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        specs = [jax.P("data") if i == sharded else jax.P() for i in range(4)]
        arrays = [jax.device_put(x, s) for x, s in zip(of_a_layer(), specs, strict=True)]
        check_in_training(lambda: jax.jit(jax.grad(layer, (0, 1, 2, 3)))(*arrays))


def asked(function: Callable[..., Any], *arrays: Any) -> bool:
    """What a function of arrays says while it is traced."""
    said = []
    jax.eval_shape(lambda *arrays: said.append(function(*arrays)), *arrays)
    return said[0]


@native
def test_only_in_training_of_large_float32() -> None:
    x, w, scale = jnp.ones((512, 256)), jnp.ones((256, 32)), jnp.ones(256)
    table = jnp.ones((512, 16))
    heads = x.reshape(512, 8, 32)

    def product(x: Any, w: Any) -> bool:
        return layers.takes_products(x, (w,), "float32")

    calls: list[tuple[Callable[..., Any], tuple[jax.Array, ...]]] = [
        (product, (x, w)),
        (lambda x, scale: layers.takes_rms_norm(x, scale, "float32"), (x, scale)),
        (layers.takes_gated, (x, x)),
        (layers.takes_rotate, (heads, table, table)),
    ]
    for function, arrays in calls:
        assert not asked(function, *arrays)
        with layers.training_kernels():
            assert asked(function, *arrays)
            assert not function(*arrays)  # outside of a trace
            assert not asked(function, *(each.astype("bfloat16") for each in arrays))
            assert not asked(function, arrays[0][:100], *arrays[1:])
        assert not asked(function, *arrays)
    with layers.training_kernels():
        assert not asked(lambda x, w: layers.takes_products(x, (w,), "float64"), x, w)
        assert not asked(lambda x, s: layers.takes_rms_norm(x, s[:1], "float32"), x, scale)
        assert not asked(layers.takes_gated, x, x[:, :1])
        assert not asked(layers.takes_rotate, heads, table[:100], table[:100])


@native
@pytest.mark.parametrize("kept", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_what_was_traced_for_training_is_not_used_elsewhere(kept: Callable[..., Any]) -> None:
    x = jnp.ones((512, 256))

    @kept
    def gate(x: jax.Array) -> jax.Array:
        return layers.gated(x, x) if layers.takes_gated(x, x) else jax.nn.silu(x) * x

    def derived(x: jax.Array) -> jax.Array:
        return jax.jvp(gate, (x,), (x,))[1]

    with layers.training_kernels():
        in_training = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(gate(x))))(x)
        with pytest.raises(TypeError, match="custom_vjp"):
            jax.jit(derived)(x)
    assert "capibara_on_one_device" in str(in_training)
    for _ in range(2):
        np.testing.assert_allclose(jax.jit(derived)(x)[0, 0], 1.6587291, rtol=1e-5)
    assert "capibara_on_one_device" not in str(jax.make_jaxpr(jax.grad(lambda x: jnp.sum(gate(x))))(x))


def test_several_devices_leave_it_to_xla() -> None:
    program = """
import json
import jax, jax.numpy as jnp
from capibara.ops import layers
said = []
with layers.training_kernels():
    jax.eval_shape(lambda x: said.append(layers.takes_gated(x, x)), jnp.ones((512, 512)))
print("RESULT", json.dumps(said[0]))
"""
    assert run_apart(program, XLA_FLAGS=emulated(2, quick=True)) is False


@native
def test_operations_are_counted() -> None:
    x, a, b = jnp.ones((40, 30)), jnp.ones((30, 20)), jnp.ones((30, 10))
    once = 2 * 40 * 30 * (20 + 10)
    assert count_flops(layers.products, x, a, b).total == once

    def loss(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return sum((jnp.sum(out) for out in layers.products(x, a, b)), start=jnp.zeros(()))

    assert count_flops(jax.grad(loss, (0, 1, 2)), x, a, b).total == 3 * once


@native
@pytest.mark.parametrize(
    ("target", "out", "arrays", "options"),
    [
        ("capibara_products", [(4, 6)], [(4, 5), (4, 6)], {}),
        ("capibara_products", [(4, 6)], [(4, 5), (5, 6), (5, 6)], {}),
        ("capibara_products", [(4, 7)], [(4, 5), (5, 6)], {}),
        ("capibara_products", [(4, 6)], [(4, 5, 1), (5, 6)], {}),
        ("capibara_products_of_rows", [(4, 5)], [(4, 6), (6, 5)], {}),
        ("capibara_products_of_rows", [(4, 5)], [(4, 6), (5, 6), (5, 6)], {}),
        ("capibara_products_of_rows", [(4, 5)], [], {}),
        ("capibara_products_of_matrices", [(5, 6)], [(4, 5), (3, 6)], {}),
        ("capibara_products_of_matrices", [(5, 6)], [(4, 5), (4, 6), (4, 6)], {}),
        ("capibara_rms_norm", [(4, 6), (4,)], [(4, 6), (5,)], {"epsilon": 1e-5, "offset": 0.0}),
        ("capibara_rms_norm", [(4, 6), (3,)], [(4, 6), (6,)], {"epsilon": 1e-5, "offset": 0.0}),
        ("capibara_rms_norm_backward", [(4, 6), (6,)], [(4, 6), (6,), (4,), (4, 5)], {"offset": 0.0}),
        ("capibara_gated", [(4, 6)], [(4, 6), (6, 4)], {}),
        ("capibara_gated_backward", [(4, 6), (4, 5)], [(4, 6)] * 3, {}),
        ("capibara_turned", [(4, 1, 6)], [(4, 1, 6), (4, 4), (4, 4)], {"sign": 1.0}),
        ("capibara_turned", [(4, 1, 6)], [(4, 1, 6), (3, 2), (3, 2)], {"sign": 1.0}),
        ("capibara_turned", [(4, 1, 6)], [(4, 1, 6), (4, 2), (4, 3)], {"sign": 1.0}),
    ],
)
def test_calls_whose_arrays_do_not_fit_together_are_refused(
    target: str, out: list[tuple[int, ...]], arrays: list[tuple[int, ...]], options: dict[str, float]
) -> None:
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in out]
    ones = [np.ones(shape, np.float32) for shape in arrays]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"capibara (products|pass over rows): the"):
        jax.block_until_ready(call(target, results, *ones, **options))
