"""Matrices in panels: how they lie, products with them, and lookups in tables that are multiplied, too."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_sets
from live_equations import live_primitives
from other_process import run_apart

from capibara.measure import count_flops
from capibara.native import build
from capibara.native.library import call
from capibara.ops.linalg.chained import chained
from capibara.ops.linalg.few_rows import few_rows, lookup, product, takes, thin_product
from capibara.ops.linalg.joined import joined
from capibara.ops.linalg.panel_operations import plain, table_rows
from capibara.ops.linalg.panels import PANEL, Panels, fit_panels, in_panels

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
# Rows of decoding and of prompts; incomplete pieces of panels, several shares of the inner dimension, more columns than
# a block has, and a single panel.
SIZES = [
    (1, 64, 1024),
    (2, 771, 144),
    (3, 130, 16),
    (8, 768, 208),
    (11, 9, 8192),
    (16, 300, 528),
    (5, 64, 48),
]
SIZES += [(17, 771, 144), (64, 600, 1104), (200, 40, 48), (401, 300, 272), (1, 1, 64), (4, 65, 64)]


def numbers(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(shape).normal(size=shape).astype(dtype)


def packed(matrix: Any, *, transposed: bool = False) -> jax.Array:
    return jnp.asarray(in_panels(np.asarray(matrix)[None], transposed=transposed)[0])


def weight(matrix: Any, *, transposed: bool = False) -> Panels:
    return Panels(packed(matrix, transposed=transposed), np.shape(matrix), transposed)


def check(rows: int, inner: int, columns: int) -> None:
    x, w = numbers(rows, inner), numbers(inner, columns)
    for dtype in (jnp.float32, jnp.bfloat16):
        stored = np.asarray(w, dtype)
        got = np.asarray(jax.jit(product)(x, packed(stored)))
        wide = stored.astype(np.float64)
        bound = 2e-6 * (np.abs(x).astype(np.float64) @ np.abs(wide)) + 1e-12
        assert (np.abs(got - x.astype(np.float64) @ wide) <= bound).all()
        if rows > 1:  # of one row alone, rows of a matrix are summed in pieces
            np.testing.assert_array_equal(got, product(jnp.asarray(x), jnp.asarray(stored)))
        # A transposed one means the same, however its panels were made.
        turned = packed(np.ascontiguousarray(stored.T), transposed=True)
        np.testing.assert_array_equal(got, product(jnp.asarray(x), turned, transposed=True))


@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes: tuple[int, int, int]) -> None:
    check(*sizes)


def check_rows_alone(inner: int, columns: int) -> None:
    """A row's numbers are the same alone and beside other ones."""
    x, w = jnp.asarray(numbers(16, inner)), numbers(inner, columns)
    for matrix in (packed(w), packed(w.astype(jnp.bfloat16))):
        every = np.asarray(product(x, matrix))
        for count in (1, 2, 3, 5, 7, 8, 11, 15):
            np.testing.assert_array_equal(product(x[-count:], matrix), every[-count:])
            np.testing.assert_array_equal(product(x[:count], matrix), every[:count])


ALONE = [(200, 336), (9, 128), (257, 512)]


@pytest.mark.parametrize(("inner", "columns"), ALONE)
def test_a_row_does_not_depend_on_the_others(inner: int, columns: int) -> None:
    check_rows_alone(inner, columns)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import json
from capibara import native
from test_panels import ALONE, SIZES, check, check_rows_alone
for sizes in SIZES:
    check(*sizes)
for sizes in ALONE:
    check_rows_alone(*sizes)
print("RESULT", json.dumps(native.isa()))
"""
    assert run_apart(program, CAPIBARA_NATIVE_ISA=name, PYTHONPATH=HERE) == name


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 3),
    inner=st.integers(1, 70),
    panels=st.integers(1, 12),
    narrow=st.booleans(),
    transposed=st.booleans(),
)
def test_panels_are_those_of_numpy(
    count: int, inner: int, panels: int, narrow: bool, transposed: bool
) -> None:
    sides = (panels * PANEL, inner) if transposed else (inner, panels * PANEL)
    matrices = numbers(count, *sides, dtype=jnp.bfloat16 if narrow else np.float32)
    got = in_panels(matrices, transposed=transposed)
    if transposed:
        want = matrices.reshape(count, panels, PANEL, inner).swapaxes(2, 3)
    else:
        want = matrices.reshape(count, inner, panels, PANEL).swapaxes(1, 2)
    np.testing.assert_array_equal(got.view(np.uint8), np.ascontiguousarray(want).view(np.uint8))
    assert got.ctypes.data % 64 == 0
    for one, matrix in zip(got, matrices, strict=True):
        back = plain(jnp.asarray(one), transposed=transposed)
        np.testing.assert_array_equal(back, jnp.asarray(matrix))
        np.testing.assert_array_equal(back, Panels(jnp.asarray(one), sides, transposed).matrix())


def test_what_can_lie_in_panels() -> None:
    assert fit_panels(9, 32, jnp.float32)
    assert fit_panels(10, 16, jnp.dtype("bfloat16"))
    assert not fit_panels(9, 16, jnp.bfloat16)  # the second of several would not begin a line of the cache
    assert not fit_panels(9, 17, jnp.float32)
    assert not fit_panels(0, 16, jnp.float32)
    assert not fit_panels(9, 0, jnp.float32)
    assert not fit_panels(9, 16, jnp.float16)
    assert not fit_panels(9, 16, jnp.int8)


def test_a_weight_keeps_its_shape_through_trees() -> None:
    one = weight(numbers(64, 48))
    assert (one.shape, one.dtype, one.size) == ((64, 48), jnp.float32, 64 * 48)
    described = jax.eval_shape(lambda w: w, one)
    assert isinstance(described, Panels)
    assert described.shape == (64, 48)
    assert jax.tree.structure(one) == jax.tree.structure(described)
    # Engines adopt programs by comparing structures.
    heads, turned = Panels(one.panels, (64, 3, 16)), Panels(one.panels, (48, 64), transposed=True)
    assert len({jax.tree.structure(each) for each in (one, heads, turned)}) == 3


def layers(x: Any, w: dict[str, Any], indices: Any) -> list[Any]:
    """As a model has them: weights cast to the dtype of arithmetic, and heads joined."""

    def matrix(name: str) -> Any:
        one = w[name].matrix() if isinstance(w[name], Panels) else w[name]
        return one.astype(jnp.float32)

    with few_rows(panels=True):
        x = x + lookup(matrix("table"), indices)
        queries = product(x, matrix("queries").reshape(96, -1))
        y = product(queries, matrix("out").reshape(-1, 96)) + x
        return [queries, y, product(y, matrix("table"), transposed=True)]


@pytest.mark.thin(3)
@pytest.mark.parametrize("arrange", [joined, chained])
@pytest.mark.parametrize("rows", [1, 8, 40])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_programs_read_panels_as_they_lie(arrange: Any, rows: int, dtype: Any) -> None:
    """Also of three axes, and of a table whose rows are looked up and scored."""
    matrices = {
        name: (0.1 * numbers(*shape)).astype(dtype)
        for name, shape in (("queries", (96, 4, 32)), ("out", (4, 32, 96)), ("table", (1024, 96)))
    }
    sides = {"queries": (96, 128), "out": (128, 96), "table": (1024, 96)}
    panels = {
        name: Panels(packed(one.reshape(sides[name]), transposed=name == "table"), one.shape, name == "table")
        for name, one in matrices.items()
    }
    x, indices = numbers(rows, 96), np.random.default_rng(0).integers(-3, 1030, rows).astype(np.int32)
    want = layers(jnp.asarray(x), jax.tree.map(jnp.asarray, matrices), jnp.asarray(indices))
    got = jax.jit(arrange(layers))(x, panels, indices)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-4)
    assert "capibara_matrix_of_panels" not in live_primitives(arrange(layers), x, panels, indices)
    # Without that, XLA makes the matrices.
    assert "capibara_matrix_of_panels" in live_primitives(layers, x, panels, indices)
    for one, other in zip(jax.jit(layers)(x, panels, indices), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-4)


def test_panels_are_made_a_matrix_for_what_cannot_read_them() -> None:
    x, w = numbers(3, 64), numbers(64, 64)
    one, turned = weight(w), weight(w, transposed=True)

    def every(x: Any, one: Panels, turned: Panels) -> list[Any]:
        return [
            product(x, one.matrix(), transposed=True),
            product(x, turned.matrix()),
            product(x, one.matrix().T),
            product(x, jax.lax.reshape(one.matrix(), (64, 64), dimensions=(1, 0))),
            product(x, one.matrix() * 2),
            one.matrix().sum(0)[None],
        ]

    want = [x @ w.T, x @ w, x @ w.T, x @ w.T, x @ (2 * w), w.sum(0)[None]]
    for got, other in zip(jax.jit(joined(every))(x, one, turned), want, strict=True):
        np.testing.assert_allclose(got, other, rtol=2e-5, atol=2e-5)


def test_matrices_of_both_orders_in_one_call() -> None:
    x, w = jnp.asarray(numbers(3, 64)), jnp.asarray(numbers(64, 48))
    both = thin_product.bind(x, w, packed(w), packed(w.astype(jnp.bfloat16)), transposed=False)
    np.testing.assert_array_equal(both[0], both[1])
    np.testing.assert_array_equal(both[2], product(x, w.astype(jnp.bfloat16)))
    assert count_flops(lambda x, w: product(x, w), x, packed(w)).total == 2 * 3 * 64 * 48


@pytest.mark.parametrize("kind", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32])
def test_indices_of_any_kind(kind: Any) -> None:
    table = jnp.asarray(numbers(272, 16))
    indices = jnp.asarray([0, 1, 17, 127], kind)
    got = table_rows(packed(table, transposed=True), indices)
    np.testing.assert_array_equal(got, jnp.take(table, indices, axis=0, mode="clip"))


def test_rows_of_a_table() -> None:
    for dtype in (jnp.float32, jnp.bfloat16):
        table = jnp.asarray(numbers(64, 24), dtype)
        panels = packed(table, transposed=True)
        indices = jnp.array([[0, 1, 17], [63, 64, -1]], jnp.int32)
        want = jnp.take(table, indices, axis=0, mode="clip")
        for one in (table, panels):
            got = table_rows(one, indices)
            assert got.dtype == dtype
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(jax.vmap(table_rows, (None, 0))(one, indices), want)
        with few_rows(panels=True):
            np.testing.assert_array_equal(lookup(table, indices), want)


def test_products_of_any_number_of_rows_where_there_are_panels() -> None:
    x, w = jnp.ones((500, 512)), jnp.ones((512, 512))
    for transposed in (False, True):
        with few_rows():
            assert not takes(x, w, "float32", transposed=transposed)
        with few_rows(panels=True):
            assert takes(x, w, "float32", transposed=transposed)
    # A table that has no panels is left to XLA.
    table = numbers(33, 48)
    np.testing.assert_allclose(
        product(x[:40, :48], jnp.asarray(table), transposed=True),
        np.ones((40, 48)) @ table.T,
        rtol=1e-5,
        atol=1e-5,
    )


def test_a_mapped_product_is_the_same() -> None:
    x, w = jnp.asarray(numbers(4, 3, 64)), weight(numbers(64, 48))
    got = jax.vmap(lambda x: product(x, w.panels))(x)
    np.testing.assert_allclose(got, x @ w.matrix(), rtol=2e-5, atol=2e-5)
    many = jnp.stack([w.panels, 2 * w.panels])
    every = jax.vmap(lambda panels: Panels(panels, (64, 48)).matrix())(many)
    np.testing.assert_array_equal(every, jnp.stack([w.matrix(), 2 * w.matrix()]))


def test_calls_whose_arrays_do_not_fit_together_are_refused() -> None:
    x, panels = np.ones((1, 8), np.float32), np.ones((2, 8, 16), np.float32)
    fits = jax.ShapeDtypeStruct((1, 32), jnp.float32)
    for target, more in (("capibara_thin_product", {"transposed": 0}), ("capibara_products", {})):

        def multiplied(out: Any, *arrays: Any, target: str = target, more: dict[str, int] = more) -> Any:
            return jax.block_until_ready(call(target, [out], *arrays, **more))

        np.testing.assert_array_equal(multiplied(fits, x, panels)[0], np.full((1, 32), 8))
        empty = jax.ShapeDtypeStruct((1, 0), jnp.float32)
        assert multiplied(empty, x, panels[:0])[0].shape == (1, 0)
        nothing = multiplied(fits, x[:, :0], panels[:, :0])[0]
        np.testing.assert_array_equal(nothing, np.zeros((1, 32)))
        for out, arrays in (
            (fits, (x, panels[:1])),
            (fits, (x[:, :7], panels)),
            (fits, (x, panels.reshape(4, 8, 8))),
            (fits, (x, panels[None])),
            (fits, (x, panels.astype(np.int32))),
            (jax.ShapeDtypeStruct((2, 32), jnp.float32), (x, panels)),
        ):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"capibara product.*the (arrays|matrices)"):
                multiplied(out, *arrays)
