"""Counting arithmetic against closed forms."""

from __future__ import annotations

import math
from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from jax import lax

from capibara.measure import FlopCount, count_flops

S = jax.ShapeDtypeStruct


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return S(shape, jnp.float32)


def test_matrix_product():
    count = count_flops(jnp.matmul, f32(3, 5), f32(5, 7))
    assert count.total == int(count) == float(count) == 2 * 3 * 5 * 7
    assert count.by_primitive == {"dot_general": 210}
    assert count.exact
    assert str(count) == "210 FLOP"


@settings(max_examples=40, deadline=None)
@given(st.tuples(*[st.integers(1, 6)] * 4))
def test_batched_einsum(sizes):
    b, m, k, n = sizes
    count = count_flops(partial(jnp.einsum, "bmk,bkn->bmn"), f32(b, m, k), f32(b, k, n))
    assert count.total == 2 * b * m * k * n


def test_vector_products_and_elementwise_work():
    assert count_flops(jnp.dot, f32(9), f32(9)).total == 18
    assert count_flops(jnp.outer, f32(4), f32(5)).total == 0  # a plain multiplication, not a product
    assert count_flops(lambda x: jnp.sin(x).sum(), f32(9)).total == 0


@pytest.mark.parametrize(
    ("stride", "padding", "groups", "out_side"),
    [(1, "SAME", 1, 8), (2, "SAME", 1, 4), (1, "VALID", 1, 6), (1, "SAME", 2, 8)],
)
def test_convolution(stride, padding, groups, out_side):
    batch, in_features, out_features, kernel = 2, 6, 4, 3
    convolve = partial(
        lax.conv_general_dilated,
        window_strides=(stride, stride),
        padding=padding,
        feature_group_count=groups,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    image = f32(batch, 8, 8, in_features)
    weights = f32(kernel, kernel, in_features // groups, out_features)
    expected = 2 * batch * out_side**2 * out_features * kernel**2 * (in_features // groups)
    assert count_flops(convolve, image, weights).total == expected


def test_convolution_without_features():
    assert count_flops(partial(jnp.convolve, mode="valid"), f32(10), f32(3)).total == 2 * 8 * 3


def test_gradient_of_a_product_costs_three_times_the_forward():
    def loss(w1, w2, x):
        return (x @ w1 @ w2).sum()

    shapes = f32(8, 16), f32(16, 4), f32(32, 8)
    forward = count_flops(loss, *shapes).total
    assert forward == 2 * 32 * 8 * 16 + 2 * 32 * 16 * 4
    # Backward: dw1 and dw2 as dear as their products, and the activation's gradient between them (x's is not
    # asked).
    both = count_flops(jax.value_and_grad(loss, argnums=(0, 1)), *shapes).total
    assert both == forward + 2 * 32 * 8 * 16 + 2 * (2 * 32 * 16 * 4)


def test_remat_counts_the_recomputation():
    def block(x, w):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    def loss(x, w, f):
        return f(x, w).sum()

    x, w = f32(32, 16), f32(16, 16)
    product = 2 * 32 * 16 * 16
    plain = count_flops(jax.grad(partial(loss, f=block), argnums=1), x, w).total
    saved = count_flops(jax.grad(partial(loss, f=jax.checkpoint(block)), argnums=1), x, w).total
    assert plain == product * (2 + 3)
    assert saved > plain
    assert saved <= plain + 2 * product


@pytest.mark.parametrize("length", [1, 5, 64])
def test_scan_multiplies_by_its_length(length):
    def step(carry, w):
        return carry @ w, None

    count = count_flops(lambda c, ws: lax.scan(step, c, ws), f32(3, 4), f32(length, 4, 4))
    assert count.total == length * 2 * 3 * 4 * 4


def test_scan_equals_the_unrolled_loop_in_the_gradient_too():
    def scanned(ws, x):
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0].sum()

    def unrolled(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.sum()

    ws, x = f32(6, 4, 4), f32(3, 4)
    assert count_flops(scanned, ws, x).total == count_flops(unrolled, ws, x).total
    # A scan carries the gradient through its first step as well; the unrolled one may leave that product out.
    one_product = 2 * 3 * 4 * 4
    a, b = (count_flops(jax.grad(f), ws, x).total for f in (scanned, unrolled))
    assert a - b in (0, one_product)


def test_nested_scans_and_fori_loop():
    def inner(c, _):
        return c @ c, None

    def outer(c, _):
        return lax.scan(inner, c, None, length=3)[0], None

    assert count_flops(lambda c: lax.scan(outer, c, None, length=5)[0], f32(4, 4)).total == 15 * 128
    assert count_flops(lambda c: lax.fori_loop(0, 7, lambda i, x: x @ x, c), f32(4, 4)).total == 7 * 128


def test_while_is_unknown_and_says_so():
    count = count_flops(lambda c: lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ x, c), f32(4, 4))
    assert count.total == 0
    assert not count.exact
    assert "while" in count.unknown[0]
    assert "128 FLOP per iteration" in count.unknown[0]
    assert "not counting" in str(count)
    # A loop without products hides nothing.
    assert count_flops(lambda c: lax.while_loop(lambda x: x.sum() < 9, lambda x: x + 1, c), f32(4, 4)).exact


def test_cond_counts_the_dearest_branch_as_an_upper_bound():
    def choose(p, x):
        return lax.cond(p, lambda x: x @ x @ x, lambda x: x @ x, x)

    count = count_flops(choose, S((), jnp.bool_), f32(4, 4))
    assert count.total == 2 * 128
    assert count.upper_bound
    assert str(count).startswith("at most")

    def same(p, x):
        return lax.cond(p, lambda x: x @ x, lambda x: x.T @ x, x)

    equal = count_flops(same, S((), jnp.bool_), f32(4, 4))
    assert (equal.total, equal.exact) == (128, True)


def test_jit_and_custom_rules_are_looked_into():
    @jax.custom_vjp
    def product(x):
        return x @ x

    product.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))

    @jax.custom_jvp
    def other(x):
        return x @ x

    other.defjvp(lambda primals, tangents: (primals[0] @ primals[0], tangents[0] @ primals[0]))

    x = f32(4, 4)
    assert count_flops(jax.jit(jax.jit(lambda x: x @ x)), x).total == 128
    assert count_flops(product, x).total == 128
    assert count_flops(jax.grad(lambda x: product(x).sum()), x).total == 3 * 128
    assert count_flops(other, x).total == 128


def test_vmap_multiplies():
    mapped = jax.vmap(jnp.matmul, in_axes=(0, None))
    assert count_flops(mapped, f32(5, 3, 4), f32(4, 2)).total == 5 * 2 * 3 * 4 * 2


def test_shard_map_counts_every_device():
    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows, whole = jax.sharding.PartitionSpec("a", None), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    assert count_flops(mapped, f32(8, 4), f32(4, 2)).total == 2 * 8 * 4 * 2


def test_shard_map_over_four_devices_of_an_abstract_mesh():
    auto = (jax.sharding.AxisType.Auto,)  # what is not said differs between versions of JAX
    mesh = jax.sharding.AbstractMesh((4,), ("a",), axis_types=auto)
    rows, whole = jax.sharding.PartitionSpec("a", None), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    assert count_flops(mapped, f32(8, 4), f32(4, 2)).total == 2 * 8 * 4 * 2


def test_pallas_kernel_counts_every_grid_point():
    from jax.experimental import pallas as pl

    def kernel(x_ref, w_ref, out_ref):
        out_ref[...] = x_ref[...] @ w_ref[...]

    def multiply(x, w):
        return pl.pallas_call(
            kernel,
            grid=(4,),
            in_specs=[pl.BlockSpec((8, 16), lambda i: (i, 0)), pl.BlockSpec((16, 8), lambda i: (0, 0))],
            out_specs=pl.BlockSpec((8, 8), lambda i: (i, 0)),
            out_shape=f32(32, 8),
            interpret=True,
        )(x, w)

    assert count_flops(multiply, f32(32, 16), f32(16, 8)).total == 2 * 32 * 16 * 8


def test_other_heavy_work_is_named():
    count = count_flops(lambda x: jnp.linalg.svd(x)[1], f32(6, 6))
    assert not count.exact
    assert any("svd" in text for text in count.unknown)
    assert any("fft" in text for text in count_flops(jnp.fft.fft, f32(8)).unknown)


def test_a_transformer_like_step_matches_the_formula():
    batch, length, width, heads, hidden = 2, 8, 16, 4, 32

    def block(x, wq, wk, wv, wo, w1, w2):
        def split(y):
            return y.reshape(batch, length, heads, width // heads)

        q, k, v = split(x @ wq), split(x @ wk), split(x @ wv)
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", scores, v).reshape(x.shape)
        x = x + mixed @ wo
        return x + jax.nn.gelu(x @ w1) @ w2

    square = f32(width, width)
    args = f32(batch, length, width), square, square, square, square, f32(width, hidden), f32(hidden, width)
    tokens = batch * length
    expected = 2 * tokens * (4 * width**2 + 2 * width * hidden) + 2 * 2 * batch * length**2 * width
    assert count_flops(block, *args).total == expected


def test_concrete_arguments_and_keywords():
    x = jnp.ones((2, 3))
    assert count_flops(lambda a, *, b: a @ b["w"], x, b={"w": x.T}).total == 2 * 2 * 3 * 2


def test_errors_of_the_function_come_through():
    with pytest.raises(TypeError):
        count_flops(jnp.matmul, f32(2, 3), f32(2, 3))


def test_flop_count_is_a_plain_value():
    assert FlopCount(3) == FlopCount(3)
    assert math.isclose(float(FlopCount(7)), 7.0)
