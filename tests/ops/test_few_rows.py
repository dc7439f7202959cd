"""Products of a few rows with a large matrix, against NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from instruction_sets import instruction_sets
from other_process import run_apart

from capibara.measure import count_flops
from capibara.native import build
from capibara.native.library import call
from capibara.ops.linalg.few_rows import few_rows, product, takes, thin_product

native = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
SIZES = [(2, 64, 1024), (3, 771, 129), (8, 768, 200), (11, 9, 8200), (16, 300, 517), (5, 0, 7), (4, 3, 1)]
# One row has a kernel of its own: long and short rows of the matrix, several blocks of columns, incomplete pieces.
SIZES += [(1, 1000, 1100), (1, 771, 129), (1, 70, 33000), (1, 2, 16401), (1, 0, 7), (1, 3, 1)]
# Those of a prompt: incomplete tiles, several shares of the inner dimension, more columns than a block has.
SIZES += [(17, 771, 129), (64, 600, 1100), (192, 40, 33)]


def check(rows: int, inner: int, columns: int) -> None:
    random = np.random.default_rng(rows)
    x, w = random.normal(size=(rows, inner)), random.normal(size=(inner, columns))
    run = jax.jit(product, static_argnames="transposed")
    for dtype in (jnp.float32, jnp.bfloat16):
        stored = np.asarray(w, dtype)
        wide = stored.astype(np.float64)
        for transposed in (False, True):
            given = np.ascontiguousarray(stored.T if transposed else stored)
            got = run(x.astype(np.float32), given, transposed=transposed)
            assert got.dtype == jnp.float32
            bound = 2e-6 * (np.abs(x) @ np.abs(wide)) + 1e-12
            assert (np.abs(np.asarray(got, np.float64) - x @ wide) <= bound).all()


@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes: tuple[int, int, int]) -> None:
    check(*sizes)


def check_rows_alone(inner: int, columns: int) -> None:
    """A row's numbers are the same beside other ones."""
    random = np.random.default_rng(0)
    x = jnp.asarray(random.normal(size=(16, inner)), jnp.float32)
    w = jnp.asarray(random.normal(size=(inner, columns)), jnp.float32)
    narrow = w.astype(jnp.bfloat16)
    for transposed, matrix in ((False, w), (True, w.T), (False, narrow), (True, narrow.T)):
        every = np.asarray(product(x, matrix, transposed=transposed))
        for count in (2, 3, 5, 7, 8, 11, 15):
            some = np.asarray(product(x[-count:], matrix, transposed=transposed))
            np.testing.assert_array_equal(some, every[-count:])
            some = np.asarray(product(x[:count], matrix, transposed=transposed))
            np.testing.assert_array_equal(some, every[:count])


# The last ones have incomplete vectors after incomplete blocks of the matrix's rows.
ALONE = [(200, 333), (9, 127), (257, 511)]


@native
@pytest.mark.parametrize(("inner", "columns"), ALONE)
def test_a_row_does_not_depend_on_the_others(inner: int, columns: int) -> None:
    check_rows_alone(inner, columns)


@native
@pytest.mark.parametrize(("rows", "inner", "columns"), [(64, 768, 1100), (17, 300, 517), (192, 1024, 64)])
def test_a_row_of_a_prompt_does_not_depend_on_the_others(rows: int, inner: int, columns: int) -> None:
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, inner)).astype(np.float32)
    w = jnp.asarray(random.normal(size=(inner, columns)), jnp.float32)
    order = random.permutation(rows)
    every, mixed = (np.asarray(product(jnp.asarray(given), w)) for given in (x, x[order]))
    np.testing.assert_array_equal(mixed, every[order])
    alone = np.zeros_like(x)
    alone[5] = x[5]
    np.testing.assert_array_equal(np.asarray(product(jnp.asarray(alone), w))[5], every[5])


@native
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 40])
def test_bfloat16_is_read_as_float32_would_be(rows: int, transposed: bool) -> None:
    # Bit by bit, with an infinity, a NaN, a subnormal number and zeros of both signs.
    random = np.random.default_rng(rows)
    x = jnp.asarray(random.normal(size=(rows, 304)), jnp.float32)
    w = random.normal(size=(304, 517))
    w[3, 5], w[7, 100], w[9, 200], w[11], w[12] = np.inf, np.nan, 1e-39, 0.0, -0.0
    narrow = jnp.asarray(w.T if transposed else w, jnp.bfloat16)
    got, want = (product(x, w, transposed=transposed) for w in (narrow, narrow.astype(jnp.float32)))
    np.testing.assert_array_equal(got, want)
    assert np.isinf(got[:, 5]).all()
    assert np.isnan(got[:, 100]).all()


@native
def test_matrices_of_both_widths_in_one_call() -> None:
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 64)), jnp.float32)
    w = jnp.asarray(np.random.default_rng(1).normal(size=(64, 48)), jnp.float32)
    both = thin_product.bind(x, w, w.astype(jnp.bfloat16), transposed=False)
    for got, matrix in zip(both, (w, w.astype(jnp.bfloat16)), strict=True):
        np.testing.assert_array_equal(got, product(x, matrix))


@native
def test_only_where_it_is_asked_for() -> None:
    x, w = jnp.ones((4, 512)), jnp.ones((512, 512))
    assert not takes(x, w, "float32")
    with few_rows():
        assert takes(x, w, "float32")
        assert takes(x[:1], w, "float32")
        assert takes(jnp.ones((192, 512)), w, "float32")
        assert not takes(jnp.ones((193, 512)), w, "float32")
        assert not takes(jnp.ones((17, 512)), w, "float32", transposed=True)
        assert not takes(x, w[:8, :8], "float32")
        assert takes(x, w.astype("bfloat16"), "float32")
        assert not takes(x, w.astype("float16"), "float32")
        assert not takes(x.astype("bfloat16"), w.astype("bfloat16"), "bfloat16")
    assert not takes(x, w, "float32")
    assert count_flops(product, x, w).total == 2 * 4 * 512 * 512


@pytest.mark.thin(2)
@native
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import json
from capibara import native
from test_few_rows import ALONE, SIZES, check, check_rows_alone
for sizes in SIZES:
    check(*sizes)
for sizes in ALONE:
    check_rows_alone(*sizes)
print("RESULT", json.dumps(native.isa()))
"""
    assert run_apart(program, CAPIBARA_NATIVE_ISA=name, PYTHONPATH=HERE) == name


def test_several_devices_leave_it_to_xla() -> None:
    program = """
import json
import jax, jax.numpy as jnp, numpy as np
from capibara.ops.linalg.few_rows import few_rows, takes
with few_rows():
    print("RESULT", json.dumps(takes(jnp.ones((4, 512)), jnp.ones((512, 512)), "float32")))
"""
    assert run_apart(program, XLA_FLAGS=emulated(2, quick=True)) is False


@native
def test_calls_whose_arrays_do_not_fit_together_are_refused() -> None:
    x, w = np.ones((1, 8), np.float32), np.ones((8, 16), np.float32)
    fits = jax.ShapeDtypeStruct((1, 16), jnp.float32)

    def multiplied(out: list[Any], *arrays: Any, transposed: int = 0) -> Any:
        return jax.block_until_ready(call("capibara_thin_product", out, *arrays, transposed=transposed))

    np.testing.assert_array_equal(
        multiplied([fits, fits], x, w, 2 * w), [np.full((1, 16), 8), np.full((1, 16), 16)]
    )
    # Nothing to sum, and nothing to sum for.
    np.testing.assert_array_equal(multiplied([fits], x[:, :0], w[:0])[0], np.zeros((1, 16)))
    assert multiplied([jax.ShapeDtypeStruct((1, 0), jnp.float32)], x, w[:, :0])[0].shape == (1, 0)
    for out, arrays, transposed in (
        ([fits], (x,), 0),
        ([fits, fits], (x, w), 0),
        ([fits], (x[0], w), 0),
        ([fits], (x, w.astype(np.int32)), 0),
        ([fits], (x, w), 1),
        ([fits], (x[:, :7], w), 0),
        ([fits, fits], (x, w, w[:, :15]), 0),
        ([jax.ShapeDtypeStruct((2, 16), jnp.float32)], (x, w), 0),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="capibara product of few rows: the arrays"):
            multiplied(out, *arrays, transposed=transposed)
