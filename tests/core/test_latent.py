"""Latent attention in a model: decoding, adapters, and heads over a mesh."""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart
from small_models import quick_jit, small_config, small_params, small_tokens

from capibara.compose.backends import jax_ops
from capibara.core import ModularCapibaraModel

LORA = {"finetune.method": "lora", "finetune.rank": 2, "finetune.alpha": 3.0}


def decoded(model: ModularCapibaraModel, params: Any, tokens: np.ndarray, first: int) -> np.ndarray:
    """Logits of a prompt of ``first`` tokens, and of the others one at a time."""
    decode, cache, found = quick_jit(model.decode), model.init_cache(len(tokens), tokens.shape[1]), []
    for start, end in [(0, first), *((i, i + 1) for i in range(first, tokens.shape[1]))]:
        logits, cache = decode(params, tokens[:, start:end], cache)
        found.append(logits)
    return np.concatenate(found, 1)


def test_the_cache_holds_latents_and_the_shared_key_only() -> None:
    model = ModularCapibaraModel(small_config("latent"))
    cache = model.init_cache(3, 20)
    assert cache["blocks"]["attention"]["cache"].shape == (2, 3, 1, 20, 6 + 2)
    assert len(jax.tree.leaves(cache)) == 2  # and the position


@pytest.mark.parametrize("base", ["full", "none", pytest.param("nf4", marks=pytest.mark.slow)])
def test_decoding_is_the_whole_sequence(base: str) -> None:
    changes = {} if base == "full" else {**LORA, "finetune.base": base}
    model = ModularCapibaraModel(small_config("latent", **changes))
    params = model.init(0)[0] if base == "nf4" else small_params(model, 3)[0]
    tokens = small_tokens(2, 9)
    whole = np.asarray(quick_jit(lambda p: model.apply(p, tokens))(params))
    np.testing.assert_allclose(decoded(model, params, tokens, 6), whole, atol=2e-5)
    if base == "none":
        merged = model.merged(params)
        np.testing.assert_allclose(merged(tokens), whole, atol=2e-5)
        names = {key for key, value in params["blocks"]["attention"].items() if "lora_a" in value}
        assert names == {"query_down", "query_up", "latent_down", "latent_up", "out"}


def test_weights_are_absorbed_where_that_is_less_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention is given: the cache itself for one token, keys and values of heads for many."""
    from capibara.ops import attention

    seen = []
    real = attention.cached_attention

    def watched(query: Any, keys: Any, *rest: Any, **options: Any) -> Any:
        seen.append(keys.shape)
        return real(query, keys, *rest, **options)

    monkeypatch.setattr(attention, "cached_attention", watched)
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    query, latent, shared = drawn(1, 12, 4, 6), drawn(1, 12, 16), drawn(1, 12, 1, 2)
    weight, empty = drawn(16, 4, 7), jnp.full((1, 1, 16, 18), jnp.nan)  # what nobody wrote is not read
    options: dict[str, Any] = {"window": None, "softcap": None, "accumulate": "float32"}
    ops: Any = jax_ops
    at_once, cache = ops.cached_latent_attention(query, latent, shared, weight, empty, 0, **options)
    rows = []
    for i in range(12):
        one = (x[:, i : i + 1] for x in (query, latent, shared))
        row, empty = ops.cached_latent_attention(*one, weight, empty, i, **options)
        rows.append(row)
    np.testing.assert_allclose(jnp.concatenate(rows, 1), at_once, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(cache, empty)
    assert seen == [(1, 16, 4, 6), *[(1, 16, 1, 18)] * 12]


SCRIPT = r"""
import json, sys
import jax, numpy as np
from small_models import small_config, small_params, small_tokens
from capibara.core import ModularCapibaraModel

config = small_config("latent")
tokens = small_tokens(8, 6)


def results(model, params):
    def loss(p):
        return model.loss(p, {"tokens": tokens}, state={}, train=False)[0]

    def run(p):
        cache = model.init_cache(8, 6)
        first, cache = model.decode(p, tokens[:, :5], cache)
        last, _ = model.decode(p, tokens[:, 5:], cache)
        return model.apply(p, tokens, state={})[0], jax.value_and_grad(loss)(p), first, last

    return jax.jit(run)(params)


one = ModularCapibaraModel(config)
params, _ = small_params(one)
want = jax.tree.map(np.asarray, results(one, params))
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
many = ModularCapibaraModel(config, mesh=mesh)
laid = jax.device_put(params, many.compiled.propose_shardings()["params"])
found = results(many, laid)
gaps = jax.tree.map(lambda a, b: float(np.abs(np.asarray(a) - b).max() / (1 + np.abs(b).max())), found, want)
attention = laid["blocks"]["attention"]
print("RESULT", json.dumps([max(jax.tree.leaves(gaps)), {key: attention[key]["weight"].addressable_shards[0].data.shape
    for key in ("latent_down", "latent_up", "out")}]))
"""


@pytest.mark.slow
def test_heads_over_a_mesh() -> None:
    gap, shapes = run_apart(SCRIPT, json.dumps([]), XLA_FLAGS=emulated(8, quick=True))
    assert gap < 2e-6
    assert shapes == {"latent_down": [2, 4, 8], "latent_up": [2, 3, 1, 7], "out": [2, 1, 3, 8 // 2]}
