"""Rotary positions against complex numbers in NumPy: values, gradients, transformations, invalid arguments."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_arrays import device_array
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

from capibara.ops import explain
from capibara.ops.errors import OpShapeError, OpTypeError, OpValueError
from capibara.ops.registry import for_platform
from capibara.ops.rotary import rotary

LAYOUTS = ("halves", "pairs")


def oracle(x: np.ndarray, angle: np.ndarray, layout: str, factor: float = 1.0) -> np.ndarray:
    """The first ``2 * angle.shape[-1]`` features of each head, turned in float64."""
    dim = 2 * angle.shape[-1]
    pairs = x[..., :dim].astype(np.float64)
    if layout == "halves":
        pairs = np.moveaxis(pairs.reshape(*x.shape[:-1], 2, dim // 2), -2, -1)
    else:
        pairs = pairs.reshape(*x.shape[:-1], dim // 2, 2)
    turned = factor * (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[..., None, :]
    out = np.stack([turned.real, turned.imag], -2 if layout == "halves" else -1)
    return np.concatenate([out.reshape(*x.shape[:-1], dim), x[..., dim:]], -1)


def angles(positions: np.ndarray, dim: int, theta: float = 10000.0) -> np.ndarray:
    return positions[..., None] * theta ** (-np.arange(0, dim, 2) / dim)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [6, 4])
def test_queries_and_keys_at_once(layout: str, dim: int, implementation: str) -> None:
    random = np.random.default_rng(0)
    query, key = (random.normal(size=(2, 5, heads, 6)).astype(np.float32) for heads in (4, 1))
    positions = random.integers(0, 300, size=(2, 5)).astype(np.int32)
    given: dict[str, Any] = {"dim": dim, "layout": layout, "implementation": implementation}
    found = jax.jit(lambda q, k, p: rotary(q, k, positions=p, **given))(query, key, positions)
    for got, x in zip(found, (query, key), strict=True):
        np.testing.assert_allclose(got, oracle(x, angles(positions, dim), layout), rtol=1e-4, atol=1e-4)
    # One array, positions of all rows, tables.
    angle = angles(np.arange(5), dim)
    tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    for tabled in ({"positions": np.arange(5, dtype=np.int32)}, tables):
        got = rotary(jnp.asarray(query), **jax.tree.map(jnp.asarray, tabled), **given)
        np.testing.assert_allclose(got, oracle(query, angle, layout), rtol=1e-5, atol=1e-5)


def test_programs_for_cpus_alone_compute_each_cosine_once() -> None:
    """XLA would compute them within what turns the heads, for each of these anew."""
    query = np.random.default_rng(6).normal(size=(1, 16, 12, 64)).astype(np.float32)
    positions = np.arange(100, 116, dtype=np.int32)

    def turned(query: jax.Array, positions: jax.Array) -> jax.Array:
        return rotary(query, positions=positions, factor=1.5)

    with for_platform("cpu"):
        compiled = jax.jit(lambda *given: turned(*given)).lower(query, positions).compile()
    computations = (compiled.as_text() or "").split("\n\n")
    holders = [text for text in computations if " cosine(" in text or " sine(" in text]
    assert holders
    assert not any("concatenate(" in text for text in holders)
    found, other = compiled(query, positions), jax.jit(turned)(query, positions)
    np.testing.assert_allclose(found, other, rtol=0, atol=2e-6)
    np.testing.assert_allclose(
        found, oracle(query, angles(positions, 64), "halves", 1.5), rtol=1e-4, atol=1e-4
    )


def test_stretched_positions() -> None:
    random = np.random.default_rng(1)
    x, turns = random.normal(size=(3, 1, 4)).astype(np.float32), [0.7, 0.01]
    got = rotary(jnp.asarray(x), positions=jnp.arange(3), frequencies=turns, factor=1.2)
    np.testing.assert_allclose(
        got, oracle(x, np.arange(3)[:, None] * np.array(turns), "halves", 1.2), rtol=1e-5
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_in_arrays_and_in_tables(layout: str) -> None:
    random = np.random.default_rng(2)
    x, ahead = random.normal(size=(2, 2, 3, 2, 6))
    angle = random.normal(size=(3, 2))
    given = [jnp.asarray(a, jnp.float32) for a in (x, np.cos(angle), np.sin(angle))]

    def loss(implementation: str, *given: Any) -> Any:
        x, cos, sin = given
        out = rotary(x, cos=cos, sin=sin, layout=layout, implementation=implementation)
        return jnp.sum(out * jnp.asarray(ahead, jnp.float32))

    @jax.jit
    def run(*given: Any) -> Any:
        return [jax.grad(lambda *a, n=n: loss(n, *a), (0, 1, 2))(*given) for n in ("xla", "reference")]

    found, other = run(*given)
    # Backwards, by the same angle.
    np.testing.assert_allclose(found[0], oracle(ahead, -angle, layout), rtol=1e-4, atol=1e-5)
    # A loss is linear in each table.
    for place in (1, 2):
        moved = list(given)
        step = jnp.asarray(random.normal(size=angle.shape), jnp.float32)
        moved[place] = moved[place] + step
        slope = float(jnp.sum(found[place] * step))
        assert slope == pytest.approx(float(loss("xla", *moved) - loss("xla", *given)), rel=1e-3, abs=1e-3)
    for got, want in zip(found, other, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_no_activation_is_kept_for_the_gradient() -> None:
    x = jnp.ones((4, 64, 8, 32), jnp.bfloat16)
    _, pull = jax.vjp(lambda x: rotary(x, positions=jnp.arange(64)), x)
    kept = sum(leaf.size for leaf in jax.tree.leaves(pull))
    assert kept <= 4 * 64 * 16  # cosines and sines, each for both halves, not broadcast


@pytest.mark.parametrize("layout", ["halves", "pairs"])
def test_forward_mode_is_the_rotation_of_the_tangent(layout: str) -> None:
    x, tangent = (jax.random.normal(jax.random.key(n), (5, 2, 8)) for n in range(2))
    turn = functools.partial(rotary, positions=jnp.arange(5), layout=layout)
    _, found = jax.jvp(turn, (x,), (tangent,))
    np.testing.assert_allclose(found, turn(tangent), atol=1e-6)


def test_narrow_types_are_turned_in_float32() -> None:
    x = np.random.default_rng(3).normal(size=(1, 2, 8)).astype(np.float32)
    positions = np.array([4099], np.int32)
    for dtype, close in ((jnp.bfloat16, 2e-2), (jnp.float16, 2e-3)):
        got = rotary(device_array(x, dtype), positions=jnp.asarray(positions))
        assert got.dtype == dtype
        want = oracle(x, angles(positions, 8), "halves")
        np.testing.assert_allclose(got.astype(np.float32), want, atol=close * np.abs(want).max())


def test_vmap_and_what_has_no_elements() -> None:
    x = jnp.asarray(np.random.default_rng(4).normal(size=(3, 5, 2, 4)), jnp.float32)
    positions = jnp.arange(15, dtype=jnp.int32).reshape(3, 5)
    got = jax.vmap(lambda x, p: rotary(x, positions=p))(x, positions)
    np.testing.assert_allclose(got, rotary(x, positions=positions), rtol=1e-6)
    assert rotary(x[:, :0], positions=positions[:, :0]).shape == (3, 0, 2, 4)
    np.testing.assert_array_equal(rotary(x, positions=positions, dim=0), x)


def test_what_runs() -> None:
    x = jax.ShapeDtypeStruct((1, 8, 2, 16), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((8,), jnp.int32)
    for platform in ("cpu", "tpu", "cuda"):
        assert explain(rotary, x, positions=positions, platform=platform).chosen == "xla"


def whole_heads(heads: int, features: int, dtype: Any = jnp.float32) -> tuple[jax.Array, ...]:
    """Two rows of heads that fill registers, and tables of all rows or of each."""
    random = np.random.default_rng(5)
    x, ahead = (device_array(random.normal(size=(2, 130, heads, features)), dtype) for _ in range(2))
    angle = angles(np.arange(130) + 3.0, features)
    return x, ahead, jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


@pytest.mark.thin(3)
@pytest.mark.parametrize(("heads", "features"), [(2, 128), (4, 64), (1, 256)])
@pytest.mark.parametrize("by_row", [False, True])
def test_kernel_has_the_values_and_derivatives_of_the_plain_form(
    heads: int, features: int, by_row: bool
) -> None:
    x, ahead, *tables = whole_heads(heads, features)
    if by_row:
        tables = [jnp.stack([table, table[::-1]]) for table in tables]

    def all_of(implementation: str, x: Any, cos: Any, sin: Any) -> Any:
        def turn(x: Any, cos: Any, sin: Any) -> Any:
            return rotary(x, cos=cos, sin=sin, implementation=implementation)

        def slope(x: Any, cos: Any, sin: Any) -> Any:
            return jax.grad(lambda *a: jnp.sum(jnp.sin(turn(*a)) * ahead), (0, 1, 2))(x, cos, sin)

        out, tangent = jax.jvp(turn, (x, cos, sin), (ahead, sin, cos))
        again = jax.grad(lambda x: jnp.sum(jnp.square(slope(x, cos, sin)[0])))(x)
        each = jax.vmap(turn, (2, None, None), 2)(jnp.stack([x, ahead], 2), cos, sin)
        own = jax.vmap(turn, (None, 0, 0))(x, jnp.stack([cos, sin]), jnp.stack([sin, cos]))
        return out, tangent, slope(x, cos, sin), again, each, own

    @jax.jit
    def run(*given: Any) -> Any:
        return [all_of(name, *given) for name in ("pallas_tpu", "xla")]

    found, wanted = run(x, *tables)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4), found, wanted)


def test_kernel_rounds_once() -> None:
    x, _, cos, sin = whole_heads(2, 128, jnp.bfloat16)
    found = rotary(x, cos=cos, sin=sin, implementation="pallas_tpu")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, rotary(x, cos=cos, sin=sin, implementation="xla"))


@pytest.mark.parametrize("platforms", [("cpu", "tpu"), ("tpu", "cuda"), ("tpu",)])
def test_a_program_for_several_platforms_has_one_form(platforms: tuple[str, ...]) -> None:
    x, table = jnp.ones((2, 256, 2, 64)), jnp.ones((256, 32))
    call = jax.jit(lambda x, cos, sin: rotary(x, cos=cos, sin=sin))
    exported = jax.export.export(
        call,
        platforms=platforms,
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("tpu_custom_call")],
    )(x, table, table)
    assert exported.platforms == platforms
    assert ("tpu_custom_call" in exported.mlir_module()) == (platforms == ("tpu",))


def test_heads_without_features_are_explained() -> None:
    found = explain(rotary, jnp.ones((2, 300, 4, 0)), positions=jnp.arange(300), platform="tpu")
    assert "xla" in str(found)


def test_whole_heads_on_tpus_have_the_kernel() -> None:
    positions = jax.ShapeDtypeStruct((512,), jnp.int32)
    x = jax.ShapeDtypeStruct((2, 512, 2, 64), jnp.bfloat16)
    assert explain(rotary, x, positions=positions, platform="tpu").chosen == "pallas_tpu"
    for change in (
        {"x": jax.ShapeDtypeStruct((2, 512, 1, 64), jnp.bfloat16)},
        {"x": jax.ShapeDtypeStruct((2, 512, 2, 96), jnp.bfloat16)},
        {"dim": 32},
        {"layout": "pairs"},
        {"platform": "cpu"},
    ):
        given = {"x": x, "platform": "tpu", **change}
        assert explain(rotary, given.pop("x"), positions=positions, **given).chosen == "xla"


X, PLACES, TABLE = jnp.ones((3, 2, 6)), jnp.arange(3), jnp.ones((3, 3))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (([1.0],), {"positions": PLACES}, OpTypeError, "query must be an array, got list"),
        ((X.astype(int),), {"positions": PLACES}, OpTypeError, "query must be float32"),
        ((X[0],), {"positions": PLACES}, OpShapeError, r"query must be \[\.\.\., length, heads, features\]"),
        ((X, X[:2]), {"positions": PLACES}, OpShapeError, "key must be"),
        ((X,), {}, OpTypeError, "positions must be an array of integers"),
        ((X,), {"positions": PLACES * 1.0}, OpTypeError, "got float32"),
        ((X,), {"positions": PLACES[:2]}, OpShapeError, r"positions must be \(3,\)"),
        ((X,), {"cos": TABLE}, OpValueError, "cos and sin, both"),
        ((X,), {"cos": TABLE, "sin": TABLE, "positions": PLACES}, OpValueError, "without positions"),
        ((X,), {"cos": TABLE[:2], "sin": TABLE}, OpShapeError, r"cos must be \(3, 3\)"),
        ((X,), {"cos": TABLE, "sin": TABLE[:, :2]}, OpShapeError, "sin must be"),
        ((X[..., :5],), {"positions": PLACES}, OpShapeError, "Remedy: dim=4"),
        ((X,), {"positions": PLACES, "dim": 8}, OpValueError, "at most 6"),
        ((X,), {"positions": PLACES, "dim": 3}, OpValueError, "an even number"),
        ((X,), {"positions": PLACES, "dim": 2.0}, OpTypeError, "dim must be an int"),
        ((X,), {"positions": PLACES, "theta": 0}, OpValueError, "theta must be finite and above 0"),
        ((X,), {"positions": PLACES, "factor": "1"}, OpTypeError, "factor must be a Python number"),
        ((X,), {"positions": PLACES, "frequencies": [1.0]}, OpShapeError, "expected dim / 2 = 3"),
        ((X,), {"positions": PLACES, "frequencies": [1, 2, float("nan")]}, OpValueError, "finite numbers"),
        ((X,), {"positions": PLACES, "frequencies": "abc"}, OpTypeError, "frequencies must be a list"),
        ((X,), {"positions": PLACES, "layout": "pair"}, OpValueError, "Did you mean 'pairs'"),
        ((X,), {"positions": PLACES, "implementation": "xlaa"}, OpValueError, "Did you mean 'xla'"),
    ],
)
def test_arguments_that_do_not_fit(
    arguments: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rotary(*arguments, **options)


SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops.rotary import rotary

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
one = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0])
x = jax.ShapeDtypeStruct((4, 2048, 8, 128), jnp.bfloat16, sharding=one)
at = jax.ShapeDtypeStruct((2048,), jnp.int32, sharding=one)
out = {}
for layout in ("halves", "pairs"):
    def gradient(x, at, g, layout=layout):
        return jax.vjp(lambda x: rotary(x, positions=at, layout=layout), x)[1](g)
    def forward(x, at, layout=layout):
        return rotary(x, positions=at, layout=layout)

    for name, f, given in (("forward", forward, (x, at)), ("gradient", gradient, (x, at, x)))[1 if few else 0 :]:
        out[f"{layout} {name}"] = jax.jit(f).lower(*given).compile().memory_analysis().temp_size_in_bytes
print(json.dumps(out))
"""


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("kind", few_or_all("v5e"))
def test_compiled_for_tpus_it_holds_little(kind: str) -> None:
    array = 4 * 2048 * 8 * 128 * 2
    for name, memory in ask(SCRIPT, *kind.split()).items():
        # The kernel has the heads of a position side by side, as a projection writes them. As an argument of a program
        # they are apart, and the array is copied once.
        assert memory < (1.01 * array if "halves" in name else array / 2), name
