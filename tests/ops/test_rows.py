"""Rows written where they stand, against a loop over them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.ops.rows import write_rows


@pytest.mark.parametrize(
    "where", [[(1, 2)], [(0, 0), (2, 3)], [(-1, 2)], [(3, 0)], [(1, 4), (1, -4), (2, 1)]]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_outside_are_not_written(where: list[tuple[int, int]], dtype: str) -> None:
    before = np.arange(3 * 4 * 2, dtype=np.float32).reshape(3, 4, 2)
    new = -np.arange(1.0, 1 + 2 * len(where), dtype=np.float32).reshape(-1, 2)
    want = before.copy()
    for (i, j), row in zip(where, new, strict=True):
        if 0 <= i < 3 and 0 <= j < 4:
            want[i, j] = row
    i, j = np.array(where, np.int32).T
    got = write_rows(jnp.asarray(before, dtype), (i, j), jnp.asarray(new))
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.astype(jnp.float32), want)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_donated_array_is_not_copied(count: int, dtype: str) -> None:
    def write(array: jax.Array, index: jax.Array, new: jax.Array) -> tuple[jax.Array, jax.Array]:
        array = write_rows(array, (index,), new)
        return array, array[0].sum()

    size = jax.ShapeDtypeStruct((4096, 8), jnp.dtype(dtype))
    index, new = jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((count, 8), jnp.float32)
    memory = jax.jit(write, donate_argnums=0).lower(size, index, new).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == 4096 * 8 * size.dtype.itemsize
    assert memory.temp_size_in_bytes < 4096


def test_an_array_that_is_needed_stays_as_it_is() -> None:
    before = jnp.arange(12.0).reshape(4, 3)
    after = jax.jit(lambda array: (write_rows(array, (jnp.array([1]),), jnp.zeros((1, 3))), array))(before)
    np.testing.assert_array_equal(after[1], np.arange(12.0).reshape(4, 3))
    np.testing.assert_array_equal(after[0][1], 0)
    np.testing.assert_array_equal(before, after[1])


def test_derivatives_and_batches() -> None:
    array, new, where = jnp.arange(12.0).reshape(4, 3), jnp.ones((3, 3)), jnp.array([2, -1, 9])

    @jax.jit
    def loss(array: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.sum(jnp.arange(12.0).reshape(4, 3) * write_rows(array, (where,), new))

    of_array, of_new = jax.grad(loss, (0, 1))(array, new)
    np.testing.assert_array_equal(of_array, [[0, 1, 2], [3, 4, 5], [0, 0, 0], [9, 10, 11]])
    np.testing.assert_array_equal(of_new, [[6, 7, 8], [0, 0, 0], [0, 0, 0]])
    _, change = jax.jvp(lambda *x: write_rows(x[0], (where,), x[1]), (array, new), (10 * array, 5 * new))
    np.testing.assert_array_equal(change, (10 * array).at[2].set(5))
    several = jax.vmap(lambda a, i: write_rows(a, (i,), new), (0, 0))(
        jnp.stack([array, -array]), jnp.array([[0, 1, 2], [3, 9, -1]])
    )
    for got, start, places in zip(several, (array, -array), ([0, 1, 2], [3]), strict=True):
        np.testing.assert_array_equal(got, start.at[jnp.array(places)].set(1))


def test_one_index_for_all_rows() -> None:
    got = write_rows(jnp.zeros((2, 3)), (jnp.int32(1), jnp.array([2, 0, 5])), jnp.array([7.0, 8.0, 9.0]))
    np.testing.assert_array_equal(got, [[0, 0, 0], [8, 0, 7]])


def test_numbers_of_other_widths() -> None:
    # Of four bits XLA packs two into a byte.
    for dtype in ("int4", "int8", "float16", "complex64"):
        got = write_rows(jnp.zeros((8, 6), dtype), (jnp.array([1, 3]),), jnp.ones((2, 6), dtype))
        np.testing.assert_array_equal(got.astype("complex64").sum(1), [0, 6, 0, 6, 0, 0, 0, 0])
    assert write_rows(jnp.zeros((3, 0), "bfloat16"), (jnp.array([1]),), jnp.zeros((1, 0))).shape == (3, 0)
