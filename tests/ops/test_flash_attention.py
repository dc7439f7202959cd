"""flash_attention: every implementation against NumPy in float64, gradients, transformations, bad input."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from device_arrays import device_array
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.ops import NoImplementationError, OpShapeError, OpTypeError, OpValueError, explain
from capibara.ops.attention import cpu as cpu_module
from capibara.ops.attention import flash_attention
from capibara.ops.attention import tiling as tiling_module
from capibara.ops.attention.problem import prepare
from capibara.ops.attention.specs import SPECS, AttentionSpec
from capibara.ops.attention.tiling import cut_group, cut_tiles

IMPLEMENTATIONS = ("cpu", "xla", "reference")
# Compiling is what takes the time in these tests, and half of it is optimising code that runs once.
FAST: Any = {"xla_backend_optimization_level": 0}
CHECKED = tuple(spec for spec in SPECS if "large" not in spec.tags)


def run(arrays: dict[str, Any], options: dict[str, Any], implementation: str) -> jax.Array:
    arrays = {name: device_array(x) for name, x in arrays.items()}
    return flash_attention(**arrays, **options, implementation=implementation)


@pytest.mark.thin(9)
@pytest.mark.parametrize("spec", CHECKED, ids=lambda s: s.name)
def test_value_is_the_definition_and_gradient_that_of_the_reference(spec):
    arrays, options = make(spec)

    def value_and_gradient(implementation: str, a: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        out, pull = jax.vjp(lambda a: run(a, options, implementation), a)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    everything = jax.jit(
        lambda a: {name: value_and_gradient(name, a) for name in IMPLEMENTATIONS}, compiler_options=FAST
    )
    with jax.enable_x64(True):
        found = everything({name: device_array(x) for name, x in arrays.items()})
        want = oracle(arrays, options)
        for implementation, (out, gradient) in found.items():
            np.testing.assert_allclose(out, want, rtol=1e-10, atol=1e-12, err_msg=implementation)
            for name in arrays:
                assert gradient[name].dtype == jnp.float64
                np.testing.assert_allclose(
                    gradient[name],
                    found["reference"][1][name],
                    rtol=1e-9,
                    atol=1e-11,
                    err_msg=f"{implementation} {name}",
                )


def test_float32_is_as_near_as_float32_can_be():
    arrays, options = make(AttentionSpec("", 2, 4, 40, 16, 2, options={"use_causal_mask": True}))
    narrow = {name: device_array(x, jnp.float32) for name, x in arrays.items()}
    for implementation, out in jax.jit(lambda a: {n: run(a, options, n) for n in IMPLEMENTATIONS})(
        narrow
    ).items():
        np.testing.assert_allclose(out, oracle(arrays, options), rtol=1e-5, atol=1e-5, err_msg=implementation)


def test_gradient_against_finite_differences_of_numpy():
    spec = AttentionSpec(
        "", 1, 2, 6, 3, bias=(False, True, True, True), options={"use_causal_mask": True, "softcap": 1.5}
    )
    arrays, options = make(spec, seed=3)
    rng = np.random.default_rng(4)
    weight = rng.normal(size=arrays["query"].shape)
    direction = {name: rng.normal(size=x.shape) for name, x in arrays.items()}
    step = 1e-5
    ahead, behind = (
        {name: x + sign * step * direction[name] for name, x in arrays.items()} for sign in (1, -1)
    )
    want = np.sum(weight * (oracle(ahead, options) - oracle(behind, options))) / (2 * step)

    def gradient(implementation: str, a: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return jax.grad(lambda a: jnp.sum(weight * run(a, options, implementation)))(a)

    with jax.enable_x64(True):
        inputs = {name: device_array(x) for name, x in arrays.items()}
        found = jax.jit(lambda a: {name: gradient(name, a) for name in IMPLEMENTATIONS})(inputs)
    for implementation, grads in found.items():
        got = sum(np.vdot(grads[name], direction[name]) for name in arrays)
        assert got == pytest.approx(want, rel=1e-7), implementation


@pytest.mark.slow
def test_second_gradient():
    arrays, options = make(AttentionSpec("", 1, 1, 4, 3, options={"use_causal_mask": True, "block_size": 2}))

    def bent(a: dict[str, jax.Array], implementation: str) -> jax.Array:
        inner = jax.grad(lambda a: jnp.sum(run(a, options, implementation) ** 2))(a)
        return jnp.sum(jnp.stack([jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner)]))

    with jax.enable_x64(True):
        inputs = {name: device_array(x) for name, x in arrays.items()}
        found = jax.jit(
            lambda a: {name: jax.grad(bent)(a, name) for name in IMPLEMENTATIONS}, compiler_options=FAST
        )(inputs)
    for grads in found.values():
        for name in arrays:
            np.testing.assert_allclose(grads[name], found["reference"][name], rtol=1e-8, atol=1e-10)


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_the_largest_score_has_no_derivative(implementation):
    # It would be divided by how many scores are the largest. Compiled, none may be: scores that are computed twice
    # are not always rounded alike.
    arrays, options = make(AttentionSpec("", 1, 1, 6, 1, options={"use_causal_mask": True, "window": 2}))

    def bent(a: dict[str, jax.Array]) -> jax.Array:
        inner = jax.grad(lambda a: jnp.sum(run(a, options, implementation) ** 2))(a)
        return sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner)), jnp.zeros(()))

    inputs = {name: device_array(x, jnp.float32) for name, x in arrays.items()}
    program = jax.make_jaxpr(jax.grad(bent))(inputs)
    compared = [e for e in _equations(program.jaxpr) if e.primitive.name == "eq"]
    arrays_of_each = [
        [v.aval for v in e.invars if not hasattr(v, "val")] for e in compared
    ]  # without constants
    scores = [x for x in arrays_of_each if len(x) == 2 and jnp.issubdtype(x[0].dtype, jnp.floating)]
    assert scores == []


@settings(max_examples=5, deadline=None)
@given(
    q_len=st.integers(1, 20),
    kv_len=st.integers(1, 20),
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    batch=st.integers(1, 3),
    block=st.integers(1, 9),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_sizes(q_len, kv_len, group, kv_heads, batch, block, causal, window, seed):
    options = {"use_causal_mask": causal, "window": window, "block_size": block}
    spec = AttentionSpec("", batch, kv_heads * group, q_len, 2, kv_heads, kv_len, options=options)
    arrays, options = make(spec, seed)
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    for implementation, out in jax.jit(lambda a: {n: run(a, options, n) for n in ("cpu", "xla")})(
        narrow
    ).items():
        np.testing.assert_allclose(out, oracle(arrays, options), rtol=3e-5, atol=3e-5, err_msg=implementation)


@pytest.mark.parametrize(("layout", "score_bytes"), [("bhsd", 1), ("bshd", 1), ("bshd", 500), ("bhsd", 1300)])
def test_groups_of_every_size_give_the_same(monkeypatch, layout, score_bytes):
    from capibara.ops.attention import cpu

    spec = AttentionSpec(
        "",
        4,
        6,
        7,
        3,
        3,
        bias=(True, True, True, False),
        segments=True,
        options={"layout": layout, "window": 5},
    )
    arrays, options = make(spec)
    want = oracle(arrays, options)

    def both(a: dict[str, Any]) -> Any:
        # A new function each time: the limits are read while tracing.
        @partial(jax.jit, compiler_options=FAST)
        def program(a: dict[str, Any]) -> Any:
            out, pull = jax.vjp(lambda a: run(a, options, "cpu"), a)
            return out, pull(jnp.cos(out))[0]

        return program(a)

    narrow = {name: device_array(x, jnp.float32) for name, x in arrays.items()}
    whole = both(narrow)
    monkeypatch.setattr(cpu, "SCORE_BYTES", score_bytes)
    problem, _ = prepare(*(narrow[n] for n in ("query", "key", "value")), layout=layout, block_size=64)
    assert cut_group(problem, cut_tiles(problem, 64), score_bytes).count > 1
    cut = both(narrow)
    np.testing.assert_allclose(cut[0], want, rtol=2e-5, atol=2e-5)
    for name in narrow:
        np.testing.assert_allclose(cut[1][name], whole[1][name], rtol=1e-4, atol=1e-5)


@given(
    q_len=st.integers(1, 300),
    kv_len=st.integers(1, 300),
    rows=st.integers(1, 80),
    left=st.none() | st.integers(0, 50),
    right=st.none() | st.integers(0, 50),
)
def test_tiles_cover_all_that_is_visible(q_len, kv_len, rows, left, right):
    q = jax.ShapeDtypeStruct((1, 1, q_len, 4), jnp.float32)
    k = jax.ShapeDtypeStruct((1, 1, kv_len, 4), jnp.float32)
    problem, _ = prepare(q, k, k, window=(left, right))
    tiles = cut_tiles(problem, rows)
    assert len(tiles) <= tiling_module.MAX_TILES + 1
    covered = [row for tile in tiles for row in range(tile.start, tile.stop)]
    assert covered == list(range(q_len))
    for tile in tiles:
        assert 0 <= tile.key_start < tile.key_stop <= kv_len
        for row in (tile.start, tile.stop - 1):
            low = 0 if left is None else max(0, row - left)
            high = kv_len if right is None else min(kv_len, row + right + 1)
            assert low >= high or (tile.key_start <= low and high <= tile.key_stop)


def test_causal_tiles_skip_what_is_hidden():
    x = jax.ShapeDtypeStruct((1, 1, 256, 4), jnp.float32)
    problem, _ = prepare(x, x, x, use_causal_mask=True)
    work = sum(tile.rows * tile.blocks * tile.keys for tile in cut_tiles(problem, 64))
    assert work == 256 * 256 * 5 // 8


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_sees_nothing_is_zero_with_zero_gradient(implementation):
    spec = AttentionSpec("", 1, 1, 6, 3, bias=(True, True, True, True))
    arrays, _ = make(spec)
    arrays["bias"][:, :, 2] = -np.inf
    arrays = {name: device_array(x, jnp.float32) for name, x in arrays.items()}

    @partial(jax.jit, compiler_options=FAST)
    def both(a: dict[str, Any]) -> Any:
        out, pull = jax.vjp(lambda a: run(a, {}, implementation), a)
        return out, pull(jnp.ones_like(out))[0]

    out, grads = both(arrays)
    assert not np.any(out[:, :, 2])
    assert np.all(np.isfinite(out))
    assert not np.any(grads["query"][:, :, 2])
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_huge_scores_neither_overflow_nor_vanish(implementation):
    arrays, options = make(AttentionSpec("", 1, 1, 6, 3, options={"use_causal_mask": True}))
    arrays["query"] *= 1e3
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    got = run(narrow, options, implementation)
    np.testing.assert_allclose(
        got, oracle({n: x.astype(np.float64) for n, x in narrow.items()}, options), rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize("precision", [None, "bfloat16", "highest"])
def test_bfloat16_is_rounded_once_not_accumulated(precision):
    arrays, options = make(AttentionSpec("", 1, 2, 33, 16, options={"use_causal_mask": True}))
    narrow = {name: device_array(x, jnp.bfloat16) for name, x in arrays.items()}
    want = oracle({n: np.asarray(x, np.float64) for n, x in narrow.items()}, options)
    options = {**options, "precision": precision}
    for got in jax.jit(lambda a: [run(a, options, n) for n in IMPLEMENTATIONS])(narrow):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=1e-2)


def test_precision_bfloat16_rounds_float32_operands():
    arrays, options = make(AttentionSpec("", 1, 1, 9, 8))
    narrow = {name: x.astype(np.float32) for name, x in arrays.items()}
    rounded = {n: np.asarray(device_array(x, jnp.bfloat16), np.float64) for n, x in narrow.items()}
    options = {**options, "precision": "bfloat16"}
    for got in jax.jit(lambda a: [run(a, options, n) for n in IMPLEMENTATIONS])(narrow):
        assert got.dtype == jnp.float32
        assert np.abs(got - oracle(arrays, options)).max() > 1e-4
        np.testing.assert_allclose(got, oracle(rounded, options), atol=1e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_adds_an_axis(implementation):
    arrays, options = make(AttentionSpec("", 2, 2, 9, 4, options={"use_causal_mask": True, "block_size": 4}))
    stacked = {name: device_array(np.stack([x, -x, 2 * x]), jnp.float32) for name, x in arrays.items()}

    def loss(a: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(run(a, options, implementation) ** 2)

    got = jax.jit(jax.vmap(jax.value_and_grad(loss)), compiler_options=FAST)(stacked)
    alone = jax.jit(jax.value_and_grad(loss), compiler_options=FAST)
    for i in range(3):
        want = alone({name: x[i] for name, x in stacked.items()})
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
            np.testing.assert_allclose(b[i], a, rtol=1e-4, atol=1e-4)


def test_segments_for_query_and_key_apart():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(1, 1, 3, 4)), rng.normal(size=(1, 1, 5, 4))
    ids = (device_array([[0, 1, 7]]), device_array([[0, 0, 1, 1, 2]]))
    narrow = {"query": device_array(q, jnp.float32), "key": device_array(k, jnp.float32)}
    narrow["value"] = narrow["key"]
    for got in jax.jit(lambda a: [run(a, {"segment_ids": ids}, n) for n in IMPLEMENTATIONS])(narrow):
        first = oracle({"query": q[:, :, :1], "key": k[:, :, :2], "value": k[:, :, :2]}, {})
        np.testing.assert_allclose(got[:, :, :1], first, rtol=1e-5, atol=1e-5)
        assert not np.any(got[:, :, 2])


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4)])
def test_empty_arrays(shape):
    x = jnp.zeros(shape)
    assert flash_attention(x, x, x).shape == shape
    assert jax.grad(lambda q: jnp.sum(flash_attention(q, x, x)))(x).shape == shape


def test_no_keys_give_zeros():
    q, k = jnp.ones((1, 1, 3, 4)), jnp.ones((1, 1, 0, 4))
    assert not np.any(flash_attention(q, k, k))


def test_memory_of_the_gradient_grows_with_the_sequence_not_its_square():
    def temporary(implementation: str, length: int) -> int:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sum(flash_attention(q, q, q, use_causal_mask=True, implementation=implementation))

        x = jax.ShapeDtypeStruct((1, 1, length, 8), jnp.float32)
        analysis = jax.jit(jax.grad(loss)).lower(x).compile(FAST).memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert temporary("reference", 4096) > 4096 * 4096 * 4
    for implementation in ("cpu", "xla"):
        large = temporary(implementation, 4096)
        assert large < 4096 * 4096 * 4 / 3
        assert large < 2.5 * temporary(implementation, 2048)


def test_the_cpu_form_refuses_blocks_beyond_its_limit():
    x = jax.ShapeDtypeStruct((1, 1, 1 << 18, 8), jnp.float32)
    with jax.enable_x64(True):  # which the native form has not
        wide = jax.ShapeDtypeStruct(x.shape, jnp.float64)
        found = explain(flash_attention, wide, wide, wide, platform="cpu", block_size=1 << 10)
    assert found.chosen == "xla"
    assert "MiB" in found.reasons["cpu"]
    with pytest.raises(NoImplementationError, match="MiB"):
        jax.eval_shape(lambda q: flash_attention(q, q, q, implementation="cpu"), x)


def _x(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"query": _x(2, 8, 4)}, OpShapeError, r"query must have 4 axes.*\(2, 8, 4\)"),
        ({"query": [1.0]}, OpTypeError, "query must be an array, got list"),
        ({"query": _x(2, 2, 8, 4, dtype=jnp.int32)}, OpTypeError, "query must be floating point, got int32"),
        ({"key": _x(2, 2, 8, 4, dtype=jnp.bfloat16)}, OpTypeError, "must share one dtype"),
        ({"key": _x(2, 2, 8, 5)}, OpShapeError, "the last axis"),
        ({"value": _x(2, 2, 7, 4)}, OpShapeError, "the same heads and sequence"),
        ({"query": _x(2, 3, 8, 4)}, OpShapeError, "3 query heads cannot be shared out over 2"),
        ({"bias": _x(2, 2, 8, 7)}, OpShapeError, "does not broadcast"),
        ({"bias": jnp.ones((1, 1, 8, 8), bool)}, OpTypeError, "jnp.where"),
        ({"segment_ids": _x(2, 8)}, OpTypeError, "integer array"),
        ({"segment_ids": jnp.zeros((2, 7), jnp.int32)}, OpShapeError, r"must have shape \(2, 8\)"),
        ({"window": 0}, OpValueError, "window=0"),
        ({"window": 2.5}, OpTypeError, "window must be an int"),
        ({"window": (-1, 2)}, OpValueError, "at least 0"),
        ({"softcap": 0.0}, OpValueError, "softcap must be finite and above 0"),
        ({"scale": float("nan")}, OpValueError, "finite"),
        ({"block_size": 0}, OpValueError, "block_size must be at least 1"),
        ({"block_size": 1.5}, OpTypeError, "block_size must be an int"),
        ({"precision": "bfloat"}, OpValueError, "Did you mean 'bfloat16'"),
        ({"precision": 3}, OpTypeError, "precision must be"),
        ({"layout": "bsd"}, OpValueError, "layout='bsd'"),
        ({"implementation": "pallas"}, OpValueError, "no implementation 'pallas'"),
    ],
)
def test_bad_input(change, error, match):
    call = {"query": _x(2, 2, 8, 4), "key": _x(2, 2, 8, 4), "value": _x(2, 2, 8, 4), **change}
    with pytest.raises(error, match=match):
        flash_attention(**call)


def test_specs_have_names_of_their_own():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


@pytest.mark.thin(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_long_sequences_have_gradients_inside_shard_map(implementation, monkeypatch):
    """Loops over blocks and groups carry sums, which have to vary over the mesh from the first step on."""
    monkeypatch.setattr(cpu_module, "SCORE_BYTES", 1 << 10)  # several groups
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(2, 1, 160, 4)).astype(np.float32) for name in ("query", "key", "value")}
    arrays["bias"] = rng.normal(size=(1, 1, 160, 160)).astype(np.float32)
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))

    def gradient(arrays: dict[str, Any]) -> dict[str, Any]:
        def loss(a: dict[str, Any]) -> jax.Array:
            out = flash_attention(**a, use_causal_mask=True, block_size=8, implementation=implementation)
            return jnp.sum(jnp.sin(out))

        return jax.grad(loss)(arrays)

    spec = dict.fromkeys(arrays, jax.P("data"))
    # Here every device has a bias of its own.
    inside = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=(spec,), out_specs=spec))(arrays)
    for name, want in jax.jit(gradient)(arrays).items():
        np.testing.assert_allclose(inside[name], want, rtol=1e-5, atol=1e-6, err_msg=name)
