"""Sequences of products of a few rows as one call, against NumPy in float64."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from instruction_sets import instruction_sets
from other_process import run_apart
from quantised_oracle import KINDS, quantised_case

from capibara.compose.backends.jax_ops.language import rms_norm
from capibara.measure import count_flops
from capibara.native import build
from capibara.native.library import call
from capibara.ops.linalg import quantised_matmul
from capibara.ops.linalg.chained import chained
from capibara.ops.linalg.few_rows import product
from capibara.ops.linalg.specs import QuantisedSpec

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
EPSILON = 1e-3
# rows, embedding, MLP, queries: long and short rows of matrices, and incomplete vectors.
SIZES = [(1, 256, 1100, 96), (1, 131, 77, 50), (2, 64, 200, 17), (8, 256, 520, 96), (16, 131, 77, 50)]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def weights(embed: int, mlp: int, queries: int) -> dict[str, np.ndarray]:
    shapes = {"out": (embed, embed), "gate": (embed, mlp), "up": (embed, mlp), "down": (mlp, embed)}
    found = {key: numbers(*shape) / shape[0] ** 0.5 for key, shape in shapes.items()}
    found |= {"queries": numbers(embed, queries, seed=1), "tied": numbers(queries, embed, seed=2)}
    return found | {"first": numbers(embed, seed=3), "second": numbers(embed, seed=4)}


def with_numbers(y: Any, matrix: Any, transposed: bool = False) -> Any:
    return product(y, matrix, transposed=transposed)


def layer(attended: Any, x: Any, w: Any, multiply: Any = with_numbers) -> Any:
    """From what attention gives to the next queries, as a decoder's layers are traced: arrays with a batch of one."""

    def times(y: Any, matrix: Any, **options: Any) -> Any:
        return multiply(y.reshape(-1, y.shape[-1]), matrix, **options)[None]

    def norm(y: Any, scale: Any) -> Any:
        return rms_norm(y, scale, epsilon=EPSILON, accumulate="float32")

    x = x + times(attended, w["out"])
    normed = norm(x, w["first"])
    x = x + times(jax.nn.silu(times(normed, w["gate"])) * times(normed, w["up"]), w["down"])
    normed = norm(x, w["second"])
    return x, times(normed, w["queries"]), times(normed, w["tied"], transposed=True)


def layer_in_float64(attended: Any, x: Any, given: dict[str, np.ndarray]) -> Any:
    w = {key: value.astype(np.float64) for key, value in given.items()}

    def norm(y: Any, scale: Any) -> Any:
        return y / np.sqrt(np.mean(y * y, -1, keepdims=True) + EPSILON) * scale

    x = x + attended @ w["out"]
    normed = norm(x, w["first"])
    gate = normed @ w["gate"]
    x = x + (gate / (1 + np.exp(-gate)) * (normed @ w["up"])) @ w["down"]
    normed = norm(x, w["second"])
    return x, normed @ w["queries"], normed @ w["tied"].T


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["inner", "group"])
@dataclass
class Coded:
    """A matrix in codes."""

    arrays: dict[str, Any]
    inner: int
    group: int


def coded(shape: tuple[int, int], kind: str, group: int) -> tuple[Coded, np.ndarray]:
    """A matrix in codes, and its numbers in float64."""
    rows, inner = shape
    spec = QuantisedSpec("", (1,), inner, rows, group)
    _, codes, scales, levels, numbers = quantised_case(kind.removesuffix(" coded"), spec)
    size = numbers.std() * rows**0.5
    table, given = None, (scales / size).astype(np.float32)
    if kind.endswith(" coded"):
        table = (np.random.default_rng(0).normal(size=200) / size).astype(np.float32)
        given = np.random.default_rng(1).integers(0, 200, scales.shape, np.uint8)
    after = given if table is None else table[given]
    numbers = numbers * np.repeat(after.astype(np.float64) / scales, group, 1)[:, :inner]
    arrays = {"codes": codes, "scales": given, "levels": levels, "scale_table": table}
    return Coded(arrays, inner, group), numbers


def with_codes(y: Any, matrix: Coded, transposed: bool = False) -> Any:
    def along(z: Any) -> Any:
        return quantised_matmul(z, **matrix.arrays, group=matrix.group, implementation="native")

    if transposed:
        return along(y)
    return jax.linear_transpose(along, jax.ShapeDtypeStruct((y.shape[0], matrix.inner), jnp.float32))(y)[0]


def calls(function: Callable[..., Any], *args: Any) -> list[tuple[str, int]]:
    """The kernels that the compiled program calls, and how many results each has."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert text is not None
    found = re.findall(r"= (.*?) custom-call\(.*custom_call_target=\"capibara_thin_(\w+)\"", text)
    return sorted((name, results.count("f32[")) for results, name in found)


def check(rows: int, *sizes: int) -> None:
    attended, x, w = numbers(1, rows, sizes[0]), numbers(1, rows, sizes[0], seed=5), weights(*sizes)
    run = jax.jit(chained(layer))
    got = run(attended, x, w)
    for one, want in zip(got, layer_in_float64(attended, x, w), strict=True):
        assert one.shape == want.shape
        np.testing.assert_allclose(one, want, rtol=0, atol=3e-6 * np.abs(want).max())
    # Which thread computes what differs from call to call.
    for _ in range(50):
        for one, again in zip(got, run(attended, x, w), strict=True):
            np.testing.assert_array_equal(one, again)


@pytest.mark.parametrize("sizes", SIZES)
def test_values(sizes: tuple[int, ...]) -> None:
    check(*sizes)


def check_codes(kind: str, group: int, rows: int, *sizes: int) -> None:
    attended, x = numbers(1, rows, sizes[0]), numbers(1, rows, sizes[0], seed=5)
    plain = weights(*sizes)
    w: dict[str, Any] = dict(plain)
    for key, matrix in w.items():
        if matrix.ndim == 2:
            w[key], plain[key] = coded(matrix.shape, kind, group)
    in_codes = partial(layer, multiply=with_codes)
    run = jax.jit(chained(in_codes))
    got = run(attended, x, w)
    for one, want in zip(got, layer_in_float64(attended, x, plain), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=5e-6 * np.abs(want).max())
    # As one by one, except for what lies between the products.
    for one, want in zip(got, jax.jit(in_codes)(attended, x, w), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=5e-6 * np.abs(want).max())
    for _ in range(20):
        for one, again in zip(got, run(attended, x, w), strict=True):
            np.testing.assert_array_equal(one, again)


# Rows, columns of a group, and the sizes as above.
CODES = [
    (1, 64, 256, 1100, 96),
    (1, 32, 131, 77, 50),
    (3, 7, 64, 200, 17),
    (8, 32, 256, 520, 96),
    (5, 48, 131, 300, 50),
]


@pytest.mark.thin(3)
@pytest.mark.parametrize("sizes", CODES)
@pytest.mark.parametrize("kind", [*KINDS, "int8 coded", "table coded"])
def test_matrices_in_codes(kind: str, sizes: tuple[int, ...]) -> None:
    check_codes(kind, sizes[1], sizes[0], *sizes[2:])


@pytest.mark.parametrize("sizes", SIZES)
def test_matrices_of_bfloat16(sizes: tuple[int, ...]) -> None:
    rows, *others = sizes
    attended, x = numbers(1, rows, others[0]), numbers(1, rows, others[0], seed=5)
    stored = {
        key: jnp.asarray(one, jnp.bfloat16 if one.ndim == 2 else None)
        for key, one in weights(*others).items()
    }

    def widened(attended: Any, x: Any, w: Any) -> Any:
        # Matrices of several heads are flat only after they were made float32.
        w = {key: one.reshape(one.shape[0], 1, -1) if one.ndim == 2 else one for key, one in w.items()}
        w = {key: one.astype(jnp.float32) for key, one in w.items()}
        w = {key: one.reshape(one.shape[0], -1) if one.ndim == 3 else one for key, one in w.items()}
        return layer(attended, x, w)

    got = jax.jit(chained(widened))(attended, x, stored)
    plain = {key: np.asarray(one, np.float64) for key, one in stored.items()}
    for one, want in zip(got, layer_in_float64(attended, x, plain), strict=True):
        np.testing.assert_allclose(one, want, rtol=0, atol=3e-6 * np.abs(want).max())
    assert calls(chained(widened), attended, x, stored) == [("chain", 3)]
    text = jax.jit(chained(widened)).lower(attended, x, stored).compile().as_text()
    assert text is not None
    assert "convert(" not in text  # each is read as it is stored


@pytest.mark.parametrize("rows", [1, 8])
def test_a_layer_with_codes_is_one_call(rows: int) -> None:
    sizes = 256, 520, 96
    w: dict[str, Any] = weights(*sizes)
    every = sum(matrix.size for matrix in w.values() if matrix.ndim == 2)
    mixed = w | {key: coded(w[key].shape, "int4", 32)[0] for key in w if w[key].ndim == 2 and key != "down"}

    def multiply(y: Any, matrix: Any, **options: Any) -> Any:
        return (with_codes if isinstance(matrix, Coded) else with_numbers)(y, matrix, **options)

    mix = partial(layer, multiply=multiply)
    given = numbers(1, rows, 256), numbers(1, rows, 256, seed=5), mixed
    assert calls(chained(mix), *given) == [("chain", 3)]
    assert calls(mix, *given) == [("product", 1)]
    assert count_flops(chained(mix), *given).total == 2 * rows * every == count_flops(mix, *given).total
    for got, want in zip(jax.jit(chained(mix))(*given), jax.jit(mix)(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=5e-6 * np.abs(want).max())


def check_rows_alone_with_codes(kind: str, group: int) -> None:
    """From two rows on; a single one is summed in another order."""
    w: dict[str, Any] = weights(131, 300, 50)
    w |= {key: coded(w[key].shape, kind, group)[0] for key in w if w[key].ndim == 2}
    attended, x = numbers(1, 8, 131), numbers(1, 8, 131, seed=5)
    run = jax.jit(chained(partial(layer, multiply=with_codes)))
    every = run(attended, x, w)
    for count in range(2, 8):
        for rows in (slice(0, count), slice(8 - count, 8)):
            for some, one in zip(run(attended[:, rows], x[:, rows], w), every, strict=True):
                np.testing.assert_array_equal(some, one[:, rows])


@pytest.mark.parametrize("group", [16, 32, 64, 7])
@pytest.mark.parametrize("kind", [*KINDS, "table coded"])
def test_a_row_times_codes_does_not_depend_on_the_others(kind: str, group: int) -> None:
    check_rows_alone_with_codes(kind, group)


def test_codes_that_are_used_twice_and_results_that_others_use() -> None:
    (w, plain), x = coded((256, 256), "int8", 64), numbers(3, 256)

    def uses(x: Any, w: Any) -> Any:
        y = with_codes(x, w)
        return x + with_codes(y, w), jnp.cos(y)

    y = x.astype(np.float64) @ plain
    assert calls(chained(uses), x, w) == [("chain", 2)]
    for got, want in zip(jax.jit(chained(uses))(x, w), (x + y @ plain, np.cos(y)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("part", ["scales", "levels"])
def test_parts_of_codes_that_a_product_makes(part: str) -> None:
    """They are there before the chain that reads them."""
    (w, _), x, made = coded((64, 128), "table", 32), numbers(4, 64), numbers(64, 64, seed=1)

    def uses(x: Any, w: Coded) -> Any:
        first = with_codes(x, w)
        changed = w.arrays[part] * (1 + with_numbers(x[:1], made)[0, :1] / 8)
        second = Coded(w.arrays | {part: changed}, w.inner, w.group)
        return first + with_codes(x, second), with_codes(x + 1, second)

    for got, want in zip(jax.jit(chained(uses))(x, w), jax.jit(uses)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("shape", "group"), [((1, 128), 1), ((128, 128), 128)], ids=["row", "column"])
@pytest.mark.parametrize("first", [False, True])
def test_scales_of_codes_that_are_a_norms_too(shape: tuple[int, int], group: int, first: bool) -> None:
    (w, _), x = coded(shape, "int8", group), numbers(4, 128)

    def uses(x: Any, w: Coded) -> Any:
        y = with_codes(x[:, : shape[0]], w) if first else product(x, jnp.eye(128) * 2 + 0 * x[0, 0])
        normed = rms_norm(y, None, epsilon=EPSILON, accumulate="float32") * w.arrays["scales"].reshape(-1)
        return with_codes(normed, w, transposed=True)

    for got, want in zip(jax.jit(chained(uses))(x, w), jax.jit(uses)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * float(jnp.abs(want).max()))


def test_many_rows_times_codes_are_left_alone() -> None:
    """The chain's kernels make numbers of the codes for each few rows."""
    w, x = coded((256, 512), "int8", 64)[0], numbers(9, 256)

    def two(x: Any, w: Any) -> Any:
        return with_codes(x, w) + with_codes(x + 1, w)

    assert calls(chained(two), x, w) == []
    assert calls(chained(two), x[:8], w) == [("chain", 1)]


@pytest.mark.parametrize("rows", [1, 5])
def test_a_layer_is_one_call(rows: int) -> None:
    sizes = 256, 520, 96
    given = numbers(1, rows, 256), numbers(1, rows, 256, seed=5), weights(*sizes)
    assert calls(chained(layer), *given) == [("chain", 3)]
    assert calls(layer, *given) == [("product", 1)] * 6
    every = sum(matrix.size for matrix in given[2].values() if matrix.ndim == 2)
    assert count_flops(chained(layer), *given).total == 2 * rows * every == count_flops(layer, *given).total


def check_rows_alone() -> None:
    """A row's numbers are the same beside other ones."""
    w = weights(131, 77, 50)
    attended, x = numbers(1, 16, 131), numbers(1, 16, 131, seed=5)
    run = jax.jit(chained(layer))
    every = run(attended, x, w)
    for count in (2, 3, 7, 8, 13):
        for rows in (slice(0, count), slice(16 - count, 16)):
            for some, one in zip(run(attended[:, rows], x[:, rows], w), every, strict=True):
                np.testing.assert_array_equal(some, one[:, rows])


def test_a_row_does_not_depend_on_the_others() -> None:
    check_rows_alone()


def test_what_waits_for_others_is_another_call() -> None:
    """As with attention: what is between is left to XLA, and comes before what needs it."""
    x, w = numbers(3, 256), weights(256, 520, 96)

    def two(x: Any, w: Any) -> Any:
        first = x + product(x, w["out"])
        between = jnp.cos(product(first, w["gate"]))[:, :256]
        return first + product(between, w["out"]), first

    assert calls(chained(two), x, w) == [("chain", 1), ("chain", 2)]
    want = x.astype(np.float64) + x.astype(np.float64) @ w["out"]
    between = np.cos(want @ w["gate"])[:, :256]
    for got, wanted in zip(jax.jit(chained(two))(x, w), (want + between @ w["out"], want), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "activation",
    [jax.nn.gelu, jnp.square, lambda x: x * jnp.tanh(x)],
    ids=["gelu", "square", "other"],
)
def test_other_activations_are_left_to_xla(activation: Any) -> None:
    x, w = numbers(4, 256), weights(256, 520, 96)

    def mlp(x: Any, w: Any) -> Any:
        return product(activation(product(x, w["gate"])) * product(x, w["up"]), w["down"])

    for got, want in zip(jax.jit(chained(mlp))(x, w), jax.jit(mlp)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
    assert calls(chained(mlp), x, w) == [("chain", 2), ("product", 1)]


def test_what_is_used_elsewhere_is_there() -> None:
    """Inner results of a norm, or of a gate, that something else needs."""
    x, w = numbers(4, 256), weights(256, 520, 96)

    def uses(x: Any, w: Any) -> Any:
        y = product(x, w["out"])
        squares = jnp.square(y)
        normed = y * jax.lax.rsqrt(jnp.mean(squares, -1, keepdims=True) + EPSILON) * w["first"]
        gate = jax.nn.silu(product(normed, w["gate"]))
        return product(gate * product(normed, w["up"]), w["down"]), squares, gate

    for got, want in zip(jax.jit(chained(uses))(x, w), jax.jit(uses)(x, w), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


def test_scales_of_rows_are_not_those_of_columns() -> None:
    x, w, scales = numbers(16, 16), numbers(16, 16, seed=1), numbers(16)

    def normed(x: Any, w: Any, scales: Any) -> Any:
        y = product(x, w)
        return product(rms_norm(y, None, epsilon=EPSILON, accumulate="float32") * scales[:, None], w)

    got, want = jax.jit(chained(normed))(x, w, scales), jax.jit(normed)(x, w, scales)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4)


def test_gates_far_from_zero() -> None:
    """As ``jax.nn.silu`` has them, infinities and NaN included."""
    values = [0.0, -0.0, 1e-30, 3.5, -3.5, 87.0, -87.0, 90.0, -90.0, 1e30, -1e30, np.inf, -np.inf, np.nan]
    # More than a vector of any instruction set, and an incomplete one.
    gates = np.array([values * 3, values[::-1] * 3], np.float32)
    others, out = np.full_like(gates, 2.0), jax.ShapeDtypeStruct(gates.shape, jnp.float32)
    (got,) = call(
        "capibara_thin_chain", [out], gates, others, rows=2, ops=(2, 0, 1, 0), matrices=(), outputs=(2,)
    )
    np.testing.assert_allclose(got, 2 * jax.nn.silu(gates), rtol=1e-6, atol=1e-36)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import json
from capibara import native
from test_chained import CODES, KINDS, SIZES
from test_chained import check, check_codes, check_rows_alone, check_rows_alone_with_codes
for sizes in SIZES:
    check(*sizes)
for rows, group, *sizes in CODES:
    for kind in KINDS:
        check_codes(kind, group, rows, *sizes)
check_rows_alone()
for kind in KINDS:
    check_rows_alone_with_codes(kind, 32)
print("RESULT", json.dumps(native.isa()))
"""
    assert run_apart(program, CAPIBARA_NATIVE_ISA=name, PYTHONPATH=HERE) == name


def test_calls_whose_arrays_do_not_fit_together_are_refused() -> None:
    x, w, scale = np.ones((2, 8), np.float32), np.ones((8, 16), np.float32), np.ones(8, np.float32)
    fits = jax.ShapeDtypeStruct((2, 16), jnp.float32)

    def run(
        arrays: tuple[Any, ...],
        ops: tuple[int, ...],
        outputs: tuple[int, ...],
        out: Any = fits,
        rows: int = 2,
        matrices: tuple[int, ...] = (),
    ) -> Any:
        attributes: dict[str, Any] = {"rows": rows, "ops": ops, "matrices": matrices, "outputs": outputs}
        return jax.block_until_ready(call("capibara_thin_chain", [out] * len(outputs), *arrays, **attributes))

    product_of = (0, 0, 1, 0)
    for matrix_of in (w, w[None]):
        (good,) = run((x, matrix_of), product_of, (2,))
        np.testing.assert_array_equal(good, np.full((2, 16), 8.0))
    wrong: list[tuple[Any, ...]] = [
        ((x, w), product_of[:3], (2,)),
        ((x, w), (7, 0, 1, 0), (2,)),
        ((x, w), (0, 0, 9, 0), (2,)),
        ((x, w), (0, 2, 1, 0), (2,)),
        ((x, w), (0, 0, 1, 1), (2,)),
        ((x, w), (1, 0, 1, 0), (2,)),
        ((x, w), product_of, (3,)),
        ((x, w), product_of, (0,)),
        ((x, w), product_of, (2, 2)),
        ((x, w), product_of, (2,), jax.ShapeDtypeStruct((2, 15), jnp.float32)),
        ((x, w), product_of, (2,), fits, 3),
        ((x, w, scale), (*product_of, 3, 3, 2, 0), (4,)),
        ((x, w.astype(np.int32)), product_of, (2,)),
        # Matrices in panels: of other columns than 16, other rows, with a fourth axis, and in place of rows.
        ((x, w[None, :, :8]), product_of, (2,)),
        ((x, w[None, :7]), product_of, (2,)),
        ((x, w[None, None]), product_of, (2,)),
        ((x, w[None]), (0, 1, 1, 0), (2,)),
        ((x, w[None]), (1, 0, 1, 0), (2,)),
    ]
    codes, scales = np.ones((8, 16), np.int8), np.ones((8, 2), np.float32)
    nothing = np.zeros(0, np.float32)
    matrix, of_codes = (2, 3, 3, 16, 8, 1), (4, 0, 1, 0)
    arrays = x, codes, scales, nothing
    (good,) = run(arrays, of_codes, (4,), matrices=matrix)
    np.testing.assert_array_equal(good, np.full((2, 16), 8.0))
    many, wide = np.ones((9, 8), np.float32), jax.ShapeDtypeStruct((9, 16), jnp.float32)
    wrong += [
        (arrays, of_codes, (4,), fits, 2, matrix[:5]),
        (arrays, (4, 0, 1, 1), (4,), fits, 2, matrix),
        (arrays, (4, 0, 1, -1), (4,), fits, 2, matrix),
        (arrays, of_codes, (4,), fits, 2, ()),
        (arrays, of_codes, (4,), fits, 2, (9, *matrix[1:])),
        (arrays, of_codes, (4,), fits, 2, (-1, *matrix[1:])),
        (arrays, (4, 1, 1, 0), (4,), fits, 2, matrix),
        ((x, codes, scales, nothing), (3, 0, 1, 0), (4,), fits, 2, matrix),
        (arrays, of_codes, (4,), fits, 2, (*matrix[:3], 17, 8, 1)),
        (arrays, of_codes, (4,), fits, 2, (*matrix[:3], -16, 8, 1)),
        (arrays, of_codes, (4,), fits, 2, (*matrix[:3], 16, 0, 1)),
        (arrays, of_codes, (4,), fits, 2, (*matrix[:3], 16, 4, 1)),
        (arrays, of_codes, (4,), fits, 2, (*matrix[:5], 0)),
        (arrays, (4, 0, 2, 0), (4,), fits, 2, matrix),
        (arrays, (*of_codes, 4, 0, 4, 0), (5,), fits, 2, matrix),
        ((x, codes, scales.astype(np.int32), nothing), of_codes, (4,), fits, 2, matrix),
        ((x, codes, scales, scale), of_codes, (4,), fits, 2, matrix),
        ((many, codes, scales, nothing), of_codes, (4,), wide, 9, matrix),
    ]
    for given in wrong:
        with pytest.raises(Exception, match="capibara chain of few rows"):
            run(*given)
