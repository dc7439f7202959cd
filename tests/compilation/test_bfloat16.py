"""Products in bfloat16: what is rewritten, what is not, and that the result is that of rounded operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compilation.bfloat16 import Rewritten, with_bfloat16_products

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 16)), jnp.float32)


def products(text: str) -> list[str]:
    """The element types of the operands of each product in a StableHLO text."""
    found = re.findall(
        r"stablehlo\.(?:dot_general|convolution).*?: \(tensor<([^>]*)>, tensor<([^>]*)>\)", text
    )
    return [f"{left.split('x')[-1]} {right.split('x')[-1]}" for left, right in found]


def lowered(function: Callable[..., Any], *args: Any) -> tuple[Any, Rewritten]:
    done = Rewritten()
    return jax.jit(with_bfloat16_products(function, done)).lower(*args), done


def rounded(x: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32)


@jax.custom_vjp
def squared(x: jax.Array) -> jax.Array:
    return x @ x


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (g @ x.T + x.T @ g,))


@pytest.mark.parametrize(
    ("name", "function", "count"),
    [
        ("plain", lambda x: x @ x, 1),
        ("nested jit", lambda x: jax.jit(lambda y: y @ y)(x), 1),
        ("scan", lambda x: jax.lax.scan(lambda c, w: (c @ x, c @ w), x, x[None])[0], 2),
        (
            "while",
            lambda x: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] @ x, c[1] + 1), (x, 0))[0],
            1,
        ),
        ("cond", lambda x: jax.lax.cond(x[0, 0] > 0, lambda y: y @ y, lambda y: y.T @ y, x), 2),
        ("checkpoint", jax.checkpoint(lambda x: x @ x), 1),
        ("custom rule", squared, 1),
        ("gradient", jax.grad(lambda x: squared(x).sum()), 3),
        ("vmap", jax.vmap(lambda row: jnp.dot(row, X)), 1),
        ("relu between", lambda x: jax.nn.relu(x @ x) @ x, 2),
    ],
)
def test_every_product_of_float32_arrays(name: str, function: Callable[..., Any], count: int) -> None:
    program, done = lowered(function, X)
    kinds = products(program.as_text())
    assert set(kinds) == {"bf16 bf16"}, name
    assert done.products == count
    assert done.kept == {}
    result, plain = program.compile()(X), function(X)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), result) == jax.tree.map(
        lambda a: (a.shape, a.dtype), plain
    )
    scale = float(jnp.abs(plain).max())
    error = float(jnp.abs(result - plain).max()) / scale
    # Rounded operands: not the same, and off by no more than their rounding, 2⁻⁸, summed and passed on.
    assert 0 < error < 0.05


def test_the_result_is_that_of_rounded_operands_summed_in_float32() -> None:
    x, w = RNG.normal(size=(64, 300)), RNG.normal(size=(300, 7))
    program, _ = lowered(jnp.matmul, x.astype(np.float32), w.astype(np.float32))
    result = program.compile()(x.astype(np.float32), w.astype(np.float32))
    exact = rounded(x).astype(np.float64) @ rounded(w).astype(np.float64)
    np.testing.assert_allclose(result, exact, rtol=2e-5, atol=2e-5)
    assert np.abs(exact - x @ w).max() > 1e-2  # which tells them apart


def test_a_convolution() -> None:
    x, w = RNG.normal(size=(2, 3, 9, 9)).astype(np.float32), RNG.normal(size=(4, 3, 3, 3)).astype(np.float32)

    def convolve(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (1, 1), "VALID")

    program, done = lowered(convolve, x, w)
    assert (done.products, products(program.as_text())) == (1, ["bf16 bf16"])
    exact = np.zeros((2, 4, 7, 7))
    for i in range(3):
        for j in range(3):
            exact += np.einsum(
                "bchw,oc->bohw", rounded(x)[:, :, i : i + 7, j : j + 7], rounded(w)[:, :, i, j]
            )
    np.testing.assert_allclose(program.compile()(x, w), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "kind"), [("int8", "i8"), ("int32", "i32"), ("float16", "f16"), ("complex64", "complex<f32")]
)
def test_other_dtypes_keep_their_products(dtype: str, kind: str) -> None:
    x = jnp.ones((8, 8), dtype)
    program, done = lowered(lambda x: x @ x, x)
    assert f"{kind}" in program.as_text()
    assert "bf16" not in program.as_text()
    assert done.products == 0
    np.testing.assert_array_equal(program.compile()(x), np.full((8, 8), 8).astype(dtype))


def test_a_chosen_precision_is_kept_and_counted() -> None:
    program, done = lowered(lambda x: jnp.matmul(x, x, precision="highest") + x @ x, X)
    assert sorted(products(program.as_text())) == ["bf16 bf16", "f32 f32"]
    assert done.kept == {"they have a precision of their own": 1}
    assert (
        str(done)
        == "1 products with bfloat16 operands; 1 kept in float32: they have a precision of their own"
    )


def test_products_inside_shard_map_are_counted() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    inner = jax.shard_map(lambda x: x @ X, mesh=mesh, in_specs=spec, out_specs=spec)
    program, done = lowered(lambda x: inner(x) @ x, X)
    assert done.products == 1
    assert done.kept == {"they are inside shard_map": 1}
    assert sorted(products(program.as_text())) == ["bf16 bf16", "f32 f32"]


def test_parameters_and_trees_keep_their_dtypes() -> None:
    def step(state: dict[str, Any], x: Any, *, rate: Any) -> Any:
        grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return {"w": state["w"] - rate * grad, "count": state["count"] + 1}

    state = {"w": X, "count": jnp.int32(0)}
    done = Rewritten()
    result = jax.jit(with_bfloat16_products(step, done))(state, X, rate=0.5)
    assert jax.tree.map(lambda a: a.dtype.name, result) == {"w": "float32", "count": "int32"}
    # A step far below bfloat16's resolution still moves the parameters.
    moved = jax.jit(with_bfloat16_products(step, done))(state, X, rate=1e-5)["w"]
    assert 0 < float(jnp.abs(moved - X).max()) < 1e-3


def test_ragged_products_are_kept_and_counted() -> None:
    done = Rewritten()
    groups = (jnp.ones((4, 3)), jnp.ones((2, 3, 5)), jnp.array([2, 2]))
    result = jax.jit(with_bfloat16_products(jax.lax.ragged_dot, done))(*groups)
    np.testing.assert_array_equal(result, np.full((4, 5), 3.0))
    assert (done.products, done.kept) == (0, {"they are ragged_dot_general": 1})
