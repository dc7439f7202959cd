"""Weights with a place of their own for each layer, as the programs of an engine read them on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import KINDS, SMALL

from capibara.compose.backends.jax_stacked import Layers
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.coded import is_coded
from capibara.compress.jax_codes import quantized
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.serve import load_compressed
from capibara.serve.engine.layers import layers_apart

LARGER = {"model.embed_dim": 64, "model.mlp_dim": 128}


def model_of(kind: str, **more: Any) -> ModularCapibaraModel:
    return ModularCapibaraModel(ModularModelConfig.from_dict({}, SMALL | KINDS[kind] | more))


def apart(tree: Any) -> list[Layers]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Layers))
    return [leaf for leaf in leaves if isinstance(leaf, Layers)]


@pytest.mark.thin(5)
@pytest.mark.parametrize("kind", list(KINDS))
def test_a_model_gives_the_same(kind: str) -> None:
    model = model_of(kind)
    given = layers_apart(model, model.params)
    assert apart(given)
    tokens = {"tokens": np.array([[3, 1, 4, 1, 5]], np.int32)}
    run = jax.jit(lambda p: model.compiled.apply(p, tokens, state=model.state or None))
    want, got = jax.tree.leaves(run(model.params)), jax.tree.leaves(run(given))
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-4, atol=2e-5)


def test_no_weight_is_copied() -> None:
    # Each layer's matrices begin where a line of the cache does.
    model = model_of("grouped")
    stack = model.params["blocks"]["mlp"]["up"]["weight"]
    first = stack.unsafe_buffer_pointer()
    each = stack[0].nbytes
    cut = layers_apart(model, model.params)["blocks"]["mlp"]["up"]["weight"]
    assert each % 64 == 0
    assert [x.unsafe_buffer_pointer() - first for x in cut.arrays] == [
        i * each for i in range(len(cut.arrays))
    ]
    assert cut.shape == stack.shape
    assert cut.dtype == stack.dtype


def test_codes_of_layers(tmp_path: Any) -> None:
    api = ModelCompressionAPI(CompressionProfile(strategy="int8"))
    path = api.compress(model_of("grouped", **LARGER), decode="auto").save(tmp_path / "model.capi")
    config = ModularModelConfig.from_dict({}, SMALL | KINDS["grouped"] | LARGER)
    loaded = load_compressed(path, config, decode=False)
    given = layers_apart(loaded.model, loaded.params)
    assert any(is_coded(x.arrays[0]) for x in apart(given))
    tokens = {"tokens": np.array([[3, 1, 4]], np.int32)}
    run = jax.jit(quantized(lambda p: loaded.model.compiled.apply(p, tokens)["logits"]))
    np.testing.assert_allclose(run(given), run(loaded.params), rtol=2e-4, atol=2e-5)
    decoded = load_compressed(path, config).params
    np.testing.assert_allclose(run(given), run(decoded), rtol=2e-3, atol=2e-4)
    assert jnp.isfinite(run(given)).all()
