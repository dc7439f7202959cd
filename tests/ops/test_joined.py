"""Products of the same rows that become one call: the same numbers, wherever the matrices come from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.measure import count_flops
from capibara.native import build
from capibara.native.levels import NF4
from capibara.ops.linalg import quantised_matmul
from capibara.ops.linalg.few_rows import product
from capibara.ops.linalg.joined import joined
from capibara.ops.linalg.quantised import dequantise_matrix, quantise_matrix

native = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
WIDTHS = (130, 48, 64)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def calls(function: Callable[..., Any], *args: Any) -> list[int]:
    """How many results each call of a kernel in the compiled program has."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    found = re.findall(r"= (.*?) custom-call\(.*custom_call_target=\"capibara_(?:thin|codes)_product", text)
    return sorted(each.count("f32[") for each in found)


def same_as_apart(function: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    """The results of the joined function, which are those of the function to the last bit."""
    got, want = jax.jit(joined(function))(*args), jax.jit(function)(*args)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    return [np.asarray(one, np.float64) for one in got]


def coded(width: int, inner: int, kind: str, seed: int = 0) -> tuple[Any, Any]:
    return quantise_matrix(numbers(width, inner, seed=seed), kind=kind, group=32)


def levels(kind: str) -> Any:
    return None if kind == "int8" else jnp.asarray(NF4, jnp.float32)


@native
@pytest.mark.parametrize("rows", [1, 5, 16])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_numbers(rows: int, transposed: bool) -> None:
    x, matrices = numbers(1, rows, 96), [numbers(96, width) for width in WIDTHS]
    given = [np.ascontiguousarray(w.T) if transposed else w for w in matrices]

    def every(x: Any, weights: Any) -> Any:
        # Each sees the rows through a reshape of its own, as the layers of a model do.
        return [product(x.reshape(rows, 96), w, transposed=transposed) for w in weights]

    for got, w in zip(same_as_apart(every, x, given), matrices, strict=True):
        bound = 2e-6 * (np.abs(x[0].astype(np.float64)) @ np.abs(w))
        assert (np.abs(got - x[0].astype(np.float64) @ w) <= bound).all()
    assert calls(every, x, given) == [1, 1, 1]
    assert calls(joined(every), x, given) == [3]
    assert count_flops(joined(every), x, given).total == 2 * rows * 96 * sum(WIDTHS)


@native
@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("rows", [1, 3])
def test_matrices_of_codes(kind: str, rows: int) -> None:
    x, matrices = numbers(rows, 96), [coded(width, 96, kind) for width in WIDTHS]

    def every(x: Any, matrices: Any) -> Any:
        return [
            quantised_matmul(x, codes, scales, levels(kind), group=32, implementation="native")
            for codes, scales in matrices
        ]

    for got, matrix in zip(same_as_apart(every, x, matrices), matrices, strict=True):
        w = np.asarray(dequantise_matrix(*matrix, levels(kind), inner=96, group=32), np.float64)
        assert (np.abs(got - x @ w.T) <= 2e-6 * (np.abs(x) @ np.abs(w.T))).all()
    assert calls(joined(every), x, matrices) == [3]
    assert count_flops(joined(every), x, matrices).total == 2 * rows * 96 * sum(WIDTHS)


@native
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_matrices_of_codes_across(kind: str) -> None:
    x, matrices = numbers(2, 700), [coded(700, width, kind) for width in WIDTHS]

    def every(x: Any, matrices: Any) -> Any:
        def one(width: int, codes: Any, scales: Any) -> Any:
            def along(y: Any) -> Any:
                return quantised_matmul(y, codes, scales, levels(kind), group=32, implementation="native")

            return jax.linear_transpose(along, jax.ShapeDtypeStruct((2, width), jnp.float32))(x)[0]

        return [one(width, *matrix) for width, matrix in zip(WIDTHS, matrices, strict=True)]

    for width, got, matrix in zip(WIDTHS, same_as_apart(every, x, matrices), matrices, strict=True):
        w = np.asarray(dequantise_matrix(*matrix, levels(kind), inner=width, group=32), np.float64)
        assert (np.abs(got - x @ w) <= 2e-6 * (np.abs(x) @ np.abs(w))).all()
    assert calls(joined(every), x, matrices) == [3]


@native
def test_matrices_of_codes_under_transformations() -> None:
    x, matrices = numbers(2, 3, 96), [coded(width, 96, "int8") for width in WIDTHS]
    whole = [np.asarray(dequantise_matrix(*one, None, inner=96, group=32), np.float64) for one in matrices]

    def every(x: Any, scales: Any) -> Any:
        return [
            quantised_matmul(x, codes, one, group=32, implementation="native")
            for (codes, _), one in zip(matrices, scales, strict=True)
        ]

    def squares(x: Any, scales: Any) -> Any:
        return sum(jnp.sum(one**2) for one in joined(every)(x, scales))

    scales = [one for _, one in matrices]
    for got, w in zip(jax.vmap(joined(every), (0, None))(x, scales), whole, strict=True):
        np.testing.assert_allclose(got, x @ w.T, rtol=1e-4, atol=1e-3)
    # Of each element another matrix, the vectors and one matrix those of all elements.
    doubled = [jnp.stack([scales[0], 2 * scales[0]]), *scales[1:]]
    mapped = jax.vmap(joined(every), (None, [0, None, None]))(x[0], doubled)
    for factor, n in ((1, 0), (2, 1)):
        np.testing.assert_allclose(mapped[0][n], factor * x[0] @ whole[0].T, rtol=1e-4, atol=1e-3)
        np.testing.assert_allclose(mapped[1][n], x[0] @ whole[1].T, rtol=1e-4, atol=1e-3)
    want = sum(2 * x[0] @ w.T @ w for w in whole)
    np.testing.assert_allclose(jax.grad(squares)(x[0], scales), want, rtol=1e-4, atol=1e-2)
    _, changes = jax.jvp(joined(every), (x[0], scales), (x[1], scales))
    for got, w in zip(changes, whole, strict=True):
        np.testing.assert_allclose(got, (x[0] + x[1]) @ w.T, rtol=1e-4, atol=1e-3)
    across = jax.linear_transpose(
        lambda x: joined(every)(x, scales), jax.ShapeDtypeStruct((3, 96), jnp.float32)
    )
    cts = [numbers(3, width) for width in WIDTHS]
    (got,) = across(cts)
    want = sum(ct @ w for ct, w in zip(cts, whole, strict=True))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@native
def test_many_vectors_take_their_products_one_by_one() -> None:
    x, matrices = numbers(9, 96), [coded(width, 96, "int8") for width in WIDTHS]

    def every(x: Any, matrices: Any) -> Any:
        return [
            quantised_matmul(x, codes, scales, group=32, implementation="native")
            for codes, scales in matrices
        ]

    same_as_apart(every, x, matrices)
    assert calls(joined(every), x, matrices) == [1, 1, 1]


@native
def test_what_waits_for_another_product_is_not_joined_with_it() -> None:
    x, square, wide = numbers(4, 64), numbers(64, 64), numbers(64, 96)

    def both(x: Any, square: Any, wide: Any) -> Any:
        first = product(x, square)
        return [product(x, square * first[0]), product(first, wide), product(x, wide * 2), first]

    got = same_as_apart(both, x, square, wide)
    first = x.astype(np.float64) @ square
    np.testing.assert_allclose(got[0], x.astype(np.float64) @ (square * first[0]), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got[1], first @ wide, rtol=1e-4, atol=1e-3)
    assert calls(joined(both), x, square, wide) == [1, 1, 2]


@native
def test_through_calls_and_beside_other_operations() -> None:
    x, matrices = numbers(1, 96), [numbers(96, width) for width in WIDTHS]

    @jax.jit
    def inner(x: Any, w: Any) -> Any:
        return jnp.tanh(product(x, w))

    def every(given: Any) -> Any:
        x = given["x"] + 1
        found = [inner(x, w) * n for n, w in enumerate(given["matrices"], 1)]
        return [*found, jax.lax.fori_loop(0, 3, lambda _, y: y * 2, found[0]), x]

    given = {"x": x, "matrices": matrices}
    got = same_as_apart(every, given)
    np.testing.assert_allclose(got[1], 2 * np.tanh((x + 1) @ matrices[1]), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[3], 8 * got[0], rtol=1e-6)
    assert calls(joined(every), given) == [3]


@native
def test_operations_keep_the_names_that_profiles_know_them_by() -> None:
    x, matrices = numbers(1, 96), [numbers(96, width) for width in WIDTHS]

    @jax.jit
    def inner(y: Any, w: Any) -> Any:
        with jax.named_scope("product"):
            return jnp.tanh(product(y, w))

    def every(x: Any, matrices: Any) -> Any:
        with jax.named_scope("first"):
            found = [inner(x, w) for w in matrices[:2]]
        return [*found, jnp.sin(product(x, matrices[2])), jax.jit(jnp.cos)(x)]

    def outside(function: Any) -> Any:
        def run(*args: Any) -> Any:
            with jax.named_scope("outside"):
                return function(*args)

        return run

    def names(function: Any) -> set[str]:
        text = jax.jit(outside(function)).lower(x, matrices).compile().as_text()
        assert text is not None
        return set(re.findall(r'op_name="jit\(run\)/([^"]*)"', text))

    assert calls(joined(every), x, matrices) == [3]
    found = names(joined(every))
    assert "outside/first/jit(inner)/product/tanh" in found
    # The call of all products has the name of the first of them.
    assert names(every) - found == {"outside/ffi_call"}
    assert found <= names(every)


def test_without_products() -> None:
    got = joined(lambda x, y: {"sum": x + y["z"], "x": x, "three": 3.0})(jnp.ones(2), {"z": jnp.ones(2)})
    np.testing.assert_array_equal(got["sum"], [2, 2])
    np.testing.assert_array_equal(got["x"], [1, 1])
    assert float(got["three"]) == 3.0


@native
@pytest.mark.parametrize("rows", [1, 40])
def test_bfloat16_that_others_read_too_is_made_float32_for_them(rows: int) -> None:
    x = numbers(rows, 96)
    matrices = [jnp.asarray(numbers(96, width), jnp.bfloat16) for width in WIDTHS]

    def run(x: Any, matrices: Any) -> Any:
        wide = [matrix.astype(jnp.float32) for matrix in matrices]
        return *(product(x, matrix) for matrix in wide), wide[0].max(), wide[1][3]

    found = jax.jit(joined(run))(x, matrices), jax.jit(run)(x, matrices)
    for got, want in zip(*found, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, want)
