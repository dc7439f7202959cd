"""The GPU kernels of attention: interpreted against the definition, what they refuse, and where ``auto`` takes them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import make, oracle
from device_arrays import device_array

from capibara.ops import NoImplementationError, explain
from capibara.ops.attention import flash_attention
from capibara.ops.attention.specs import SPECS, AttentionSpec
from capibara.ops.tuning import Tuned, forced

FAST: Any = {"xla_backend_optimization_level": 0}
CAUSAL = {"use_causal_mask": True}

# The shared specs fit into one block of 16; these have several, some of them hidden.
BLOCKS = (
    AttentionSpec("grouped", 1, 4, 75, 8, 2, options={**CAUSAL, "block_size": 16}),
    AttentionSpec("longer keys", 1, 1, 20, 8, kv_len=70, options={**CAUSAL, "block_size": 32}),
    AttentionSpec("window", 1, 2, 90, 20, 1, sinks=True, options={**CAUSAL, "block_size": 16, "window": 21}),
    AttentionSpec("both ways", 1, 1, 70, 8, kv_len=50, options={"block_size": 16, "window": (3, 30)}),
    AttentionSpec(
        "segments",
        2,
        2,
        40,
        8,
        1,
        value_dim=12,
        segments=True,
        sinks=True,
        options={**CAUSAL, "softcap": 3.0, "block_size": 16},
    ),
)
NAMED = ("one position", "one key head", "bshd", "window past the keys", "other value size")
SMALL = tuple(s for s in SPECS if s.name in NAMED)


def run(arrays: dict[str, Any], options: dict[str, Any], implementation: str = "pallas_gpu") -> jax.Array:
    return flash_attention(**arrays, **options, implementation=implementation)


def narrow(arrays: dict[str, np.ndarray], dtype: Any = jnp.float32) -> dict[str, jax.Array]:
    return {name: device_array(x, dtype) for name, x in arrays.items()}


@pytest.mark.thin(4)
@pytest.mark.parametrize("spec", [*BLOCKS, *SMALL], ids=lambda s: s.name)
def test_value_is_the_definition_and_gradient_that_of_the_reference(spec):
    arrays, options = make(spec)

    def value_and_gradient(implementation: str, a: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        out, pull = jax.vjp(lambda a: run(a, options, implementation), a)
        return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))[0]

    names = ("pallas_gpu", "reference")
    found = jax.jit(lambda a: [value_and_gradient(n, a) for n in names], compiler_options=FAST)(
        narrow(arrays)
    )
    np.testing.assert_allclose(found[0][0], oracle(arrays, options), rtol=2e-5, atol=2e-5)
    for name in arrays:
        np.testing.assert_allclose(found[0][1][name], found[1][1][name], rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_halves_are_rounded_once_not_accumulated(dtype):
    arrays, options = make(AttentionSpec("", 1, 1, 100, 16, options=CAUSAL))
    halves = narrow(arrays, dtype)
    got, pull = jax.vjp(lambda a: run(a, options), halves)
    assert got.dtype == dtype
    assert {x.dtype for x in pull(got)[0].values()} == {jnp.dtype(dtype)}
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
    got, want = (run(narrow(arrays), options, n) for n in ("pallas_gpu", "reference"))
    assert np.isnan(np.asarray(want)).any()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_a_query_without_keys_gets_zeros_and_no_gradient():
    arrays, options = make(AttentionSpec("", 1, 1, 40, 4, kv_len=4, options={"window": 3, "block_size": 16}))
    out, pull = jax.vjp(lambda a: run(a, options), narrow(arrays))
    assert not np.any(out[:, :, 8:])
    gradients = pull(jnp.ones_like(out))[0]
    assert not np.any(gradients["query"][:, :, 8:])
    assert all(np.all(np.isfinite(x)) for x in gradients.values())


def test_vmap_adds_an_axis_and_the_gradient_has_a_gradient():
    arrays, options = make(AttentionSpec("", 2, 2, 9, 4, 1, segments=True, options=CAUSAL))
    stacked = {name: jnp.stack([x, -x]) for name, x in narrow(arrays).items()}

    def bent(a: dict[str, jax.Array], implementation: str) -> jax.Array:
        inner = jax.grad(lambda a: jnp.sum(run(a, options, implementation) ** 2))(a)
        return sum((jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(inner)), jnp.zeros(()))

    got, want = (
        jax.jit(jax.vmap(jax.value_and_grad(partial(bent, implementation=n))), compiler_options=FAST)(stacked)
        for n in ("pallas_gpu", "reference")
    )
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bias": jnp.zeros((1, 1, 8, 8))}, "no bias"),
        ({"precision": "high"}, "no precision HIGH"),
        ({"dim": 257}, "at most 256"),
    ],
)
def test_what_it_does_not_take_goes_to_xla_with_the_reason(change, reason):
    change = dict(change)
    x = jax.ShapeDtypeStruct((1, 1, 8, change.pop("dim", 4)), jnp.float32)
    found = explain(flash_attention, x, x, x, platform="cuda", **change)
    assert found.chosen == "xla"
    assert reason in found.reasons["pallas_gpu"]
    with pytest.raises(NoImplementationError, match=reason):
        jax.eval_shape(lambda x: flash_attention(x, x, x, implementation="pallas_gpu", **change), x)


def test_auto_takes_it_only_where_it_was_measured_to_be_faster():
    x = jax.ShapeDtypeStruct((1, 1, 64, 16), jnp.float32)
    found = explain(flash_attention, x, x, x, platform="cuda")
    assert found.chosen == "xla"
    assert found.reasons["pallas_gpu"].startswith("was not measured to be faster here")
    assert explain(flash_attention, x, x, x, platform="rocm").reasons["pallas_gpu"] == "is for cuda, not rocm"
    with forced("flash_attention", Tuned("cuda", "pallas_gpu", (("pallas_gpu", (("block_size", 32),)),))):
        found = explain(flash_attention, x, x, x, platform="cuda")
        assert (found.chosen, dict(found.parameters)) == ("pallas_gpu", {"block_size": 32})
        assert explain(flash_attention, x, x, x, platform="rocm").chosen == "xla"


def _an_h100() -> AbstractContextManager[Any]:
    """JAX 0.12 lowers Triton kernels for a GPU that it is told of."""
    if jax.__version_info__ < (0, 12):
        return nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    kinds = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((1,), ("x",), kinds, abstract_device=device)
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_lowered_for_a_gpu_the_program_calls_the_three_kernels(dtype):
    x = jax.ShapeDtypeStruct((2, 4, 200, 80), dtype)
    k = jax.ShapeDtypeStruct((2, 2, 100, 80), dtype)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        out = flash_attention(q, k, v, window=(60, 9), softcap=5.0, implementation="pallas_gpu")
        return jnp.sum(out.astype(jnp.float32))

    with _an_h100():
        traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, k, k)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("__gpu$xla.gpu.triton") == 3
    for kernel in ("output", "query", "key_value"):
        assert f"capibara_attention_{kernel}" in text
    assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()
