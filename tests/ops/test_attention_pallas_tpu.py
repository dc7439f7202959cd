"""The TPU kernels of attention, interpreted: against the definition, gradients, transformations, what they refuse."""

from __future__ import annotations

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

from capibara.ops import NoImplementationError, explain
from capibara.ops.attention import flash_attention, pallas_tpu, pallas_tpu_fused, pallas_tpu_kernels
from capibara.ops.attention.pallas_tpu_kernels import Plan
from capibara.ops.attention.problem import prepare
from capibara.ops.attention.specs import SPECS, AttentionSpec

FAST: Any = {"xla_backend_optimization_level": 0}
CAUSAL = {"use_causal_mask": True}

# The shared specs fit into one block of 128; these have several, some of them hidden.
BLOCKS = (
    AttentionSpec("grouped", 1, 4, 300, 8, 2, options={**CAUSAL, "block_size": 128}),
    AttentionSpec("longer keys", 1, 1, 130, 8, kv_len=390, options={**CAUSAL, "block_size": 128}),
    AttentionSpec("window", 1, 2, 520, 8, 1, sinks=True, options={**CAUSAL, "block_size": 128, "window": 70}),
    AttentionSpec("both ways", 1, 1, 390, 8, kv_len=270, options={"block_size": 128, "window": (3, 200)}),
    AttentionSpec(
        "segments",
        2,
        2,
        270,
        8,
        1,
        value_dim=12,
        segments=True,
        sinks=True,
        options={**CAUSAL, "softcap": 3.0},
    ),
    # Blocks of 384 with heads above 128, a block of 640 in two parts, and a factor that turns the order of scores.
    AttentionSpec("wide heads", 1, 1, 700, 136, options=CAUSAL),
    AttentionSpec("parts of a block", 1, 1, 600, 8, options={**CAUSAL, "block_size": 1024}),
    AttentionSpec("negative scale", 1, 1, 256, 8, options={"scale": -0.7, "block_size": 128}),
    # Heads of whole tiles are read where a projection wrote them; under the window by two kernels of gradients.
    AttentionSpec(
        "side by side",
        2,
        4,
        300,
        128,
        2,
        segments=True,
        options={**CAUSAL, "layout": "bshd", "block_size": 128},
    ),
    AttentionSpec(
        "side by side, window",
        1,
        2,
        520,
        128,
        1,
        value_dim=256,
        sinks=True,
        options={**CAUSAL, "layout": "bshd", "block_size": 128, "window": 70},
    ),
)
SMALL = tuple(s for s in SPECS if "odd" in s.tags or s.name in ("one key head", "bshd", "other value size"))


def run(arrays: dict[str, Any], options: dict[str, Any], implementation: str = "pallas_tpu") -> jax.Array:
    return flash_attention(**arrays, **options, implementation=implementation)


def narrow(arrays: dict[str, np.ndarray], dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {name: device_array(x, dtype) for name, x in arrays.items()}


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    "spec",
    [pytest.param(s, id=s.name, marks=[] if s in BLOCKS else pytest.mark.slow) for s in (*BLOCKS, *SMALL)],
)
def test_value_is_the_definition_and_gradient_that_of_the_reference(spec):
    arrays, options = make(spec)

    def value_and_gradient(implementation: str, a: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        out, pull = jax.vjp(lambda a: run(a, options, implementation), a)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    names = ("pallas_tpu", "reference")
    found = jax.jit(lambda a: [value_and_gradient(n, a) for n in names], compiler_options=FAST)(
        narrow(arrays)
    )
    np.testing.assert_allclose(found[0][0], oracle(arrays, options), rtol=2e-5, atol=2e-5)
    for name in arrays:
        np.testing.assert_allclose(found[0][1][name], found[1][1][name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("rows", "keys", "dim", "softcap"), [(640, 640, 8, None), (256, 128, 8, 3.0), (384, 384, 136, None)]
)
def test_gradients_of_one_kernel_and_of_two_are_those_of_the_definition(rows, keys, dim, softcap):
    # Whole kernels: which of them run is chosen by the length, and few lengths here are long enough for two.
    q_len, kv_len = 2 * rows, 2 * keys
    plan = Plan(rows, keys, kv_len - 9, None, 3, 0.3, softcap, jax.lax.Precision.HIGHEST, "float32", True)
    random = np.random.default_rng(0)
    q, do = (device_array(random.normal(size=(1, 1, 2, q_len, dim)), jnp.float32) for _ in range(2))
    k, v = (device_array(random.normal(size=(1, 1, kv_len, dim)), jnp.float32) for _ in range(2))
    hidden = (np.arange(kv_len) >= kv_len - 9) | (np.arange(kv_len) > np.arange(q_len)[:, None] + 3)

    def definition(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = 0.3 * jnp.einsum("bhgqd,bhkd->bhgqk", q, k, precision="highest")
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(hidden, -jnp.inf, scores)
        out = jnp.einsum("bhgqk,bhkd->bhgqd", jax.nn.softmax(scores), v, precision="highest")
        return out, jax.nn.logsumexp(scores, axis=-1)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array) -> tuple[Any, ...]:
        out, pull, stat = jax.vjp(definition, q, k, v, has_aux=True)
        given = (q, k, v, do, stat[:, :, :, None], jnp.sum(do * out, axis=-1)[:, :, :, None])
        two = (pallas_tpu_kernels.query_gradient(plan, *given),)
        two = (*two, *pallas_tpu_kernels.key_value_gradients(plan, *given))
        return pull(do), pallas_tpu_fused.gradients(plan, *given), two

    wanted, *found = jax.jit(both, compiler_options=FAST)(q, k, v, do)
    for name, want, *got in zip(("query", "key", "value"), wanted, *found, strict=True):
        for one in got:
            np.testing.assert_allclose(one, want, rtol=1e-4, atol=5e-5, err_msg=name)


def test_bfloat16_is_rounded_once_not_accumulated():
    arrays, options = make(AttentionSpec("", 1, 1, 200, 16, options=CAUSAL))
    halves = narrow(arrays, jnp.bfloat16)
    got, pull = jax.vjp(lambda a: run(a, options), halves)
    assert got.dtype == jnp.bfloat16
    assert {x.dtype for x in pull(got)[0].values()} == {jnp.dtype(jnp.bfloat16)}
    want = oracle({n: np.asarray(x, np.float64) for n, x in halves.items()}, options)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2e-2, atol=1e-2)


def test_precision_bfloat16_rounds_float32_operands_and_keeps_the_dtype():
    arrays, options = make(AttentionSpec("", 1, 1, 9, 8))
    rounded = {n: np.asarray(device_array(x, jnp.bfloat16), np.float64) for n, x in arrays.items()}
    out, pull = jax.vjp(lambda a: run(a, {**options, "precision": "bfloat16"}), narrow(arrays))
    assert out.dtype == jnp.float32
    assert {x.dtype for x in pull(out)[0].values()} == {jnp.dtype(jnp.float32)}
    assert np.abs(out - oracle(arrays, options)).max() > 1e-4
    np.testing.assert_allclose(out, oracle(rounded, options), atol=1e-2)


def test_nan_and_infinity_stay_in_the_rows_that_see_them():
    arrays, options = make(AttentionSpec("", 1, 1, 12, 4, options=CAUSAL))
    arrays["value"][0, 0, 5, 1] = np.nan
    arrays["query"][0, 0, 2] = np.nan
    arrays["key"][0, 0, 9, 0] = np.inf
    got, want = (run(narrow(arrays), options, n) for n in ("pallas_tpu", "reference"))
    assert np.isnan(np.asarray(want)).any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_gets_zeros_and_no_gradient():
    arrays, options = make(AttentionSpec("", 1, 1, 12, 4, kv_len=4, options={"window": 3}))
    out, pull = jax.vjp(lambda a: run(a, options), narrow(arrays))
    assert not np.any(out[:, :, 8:])
    gradients = pull(jnp.ones_like(out))[0]
    assert not np.any(gradients["query"][:, :, 8:])
    assert all(np.all(np.isfinite(x)) for x in gradients.values())


def test_vmap_adds_an_axis():
    arrays, options = make(AttentionSpec("", 2, 2, 9, 4, 1, segments=True, options=CAUSAL))
    stacked = {name: jnp.stack([x, -x, 2 * x]) for name, x in narrow(arrays).items()}

    def loss(a: dict[str, jax.Array], implementation: str) -> jax.Array:
        return jnp.sum(run(a, options, implementation) ** 2)

    got, want = (
        jax.jit(jax.vmap(jax.value_and_grad(partial(loss, implementation=n))), compiler_options=FAST)(stacked)
        for n in ("pallas_tpu", "reference")
    )
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_second_gradient():
    arrays, options = make(AttentionSpec("", 1, 1, 4, 3, segments=True, options=CAUSAL))

    def bent(a: dict[str, jax.Array], implementation: str) -> jax.Array:
        inner = jax.grad(lambda a: jnp.sum(run(a, options, implementation) ** 2))(a)
        return sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner)), jnp.zeros(()))

    found = jax.jit(
        lambda a: [jax.grad(bent)(a, name) for name in ("pallas_tpu", "reference")], compiler_options=FAST
    )(narrow(arrays))
    for name in arrays:
        np.testing.assert_allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None)
@given(
    q_len=st.integers(1, 900),
    kv_len=st.integers(1, 900),
    block=st.integers(1, 400),
    left=st.none() | st.integers(0, 400),
    right=st.none() | st.integers(0, 400),
)
def test_the_grid_reaches_every_visible_pair_once(q_len, kv_len, block, left, right):
    q, k = (jax.ShapeDtypeStruct((1, 1, n, 4), jnp.float32) for n in (q_len, kv_len))
    problem, _ = prepare(q, k, k, window=(left, right), block_size=block)
    plan, rows, keys = pallas_tpu.output_plan(problem, True)
    assert isinstance(plan, Plan)
    row_blocks, key_blocks = rows // plan.rows, keys // plan.keys
    assert (row_blocks - 1) * plan.rows < q_len <= rows
    assert (key_blocks - 1) * plan.keys < kv_len <= keys
    lowest, highest = -1 if left is None else left, -1 if right is None else right
    for reach, outer, inner, back, ahead in (
        (plan.key_blocks(key_blocks), plan.rows, plan.keys, lowest, highest),
        (plan.row_blocks(row_blocks), plan.keys, plan.rows, highest, lowest),
    ):
        for i in range(2):
            visited = [int(reach.at(i, s)) for s in range(reach.steps) if bool(reach.live(i, s))]
            wanted = [
                j
                for j in range(reach.total)
                if (back < 0 or (j + 1) * inner - 1 >= i * outer - back)
                and (ahead < 0 or j * inner <= (i + 1) * outer - 1 + ahead)
            ]
            assert visited == wanted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": jnp.zeros((1, 1, 8, 8))}, "no bias"),
        ({"precision": "high"}, "no precision HIGH"),
        ({"precision": "float16"}, "not float16"),
        ({"dtype": jnp.float16}, "not float16"),
        ({"dim": 4096}, "do not fit into"),
    ],
)
def test_what_it_does_not_take_goes_to_xla_with_the_reason(change, reason):
    change = dict(change)
    x = jax.ShapeDtypeStruct((1, 1, 8, change.pop("dim", 4)), change.pop("dtype", jnp.float32))
    found = explain(flash_attention, x, x, x, platform="tpu", **change)
    assert found.chosen == "xla"
    assert reason in found.reasons["pallas_tpu"]
    with pytest.raises(NoImplementationError, match=reason):
        jax.eval_shape(lambda x: flash_attention(x, x, x, implementation="pallas_tpu", **change), x)
