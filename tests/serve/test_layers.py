"""Weights with a place of their own for each layer, as the programs of an engine read them on a CPU or GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_compiler import TARGET, ask, needs_gpu_compiler
from small_models import KINDS, SMALL

from capibara.compose.backends.jax_stacked import Layers
from capibara.compress import CompressionProfile, ModelCompressionAPI
from capibara.compress.coded import is_coded
from capibara.compress.jax_codes import quantized
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.memory.errors import MemorySettingError
from capibara.serve import load_compressed
from capibara.serve.engine import layers
from capibara.serve.engine.arrays import bytes_of_one_device, describe_arrays
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


@pytest.mark.parametrize("times", [3, 5, None])
def test_on_a_gpu_they_are_copies_where_there_is_room(monkeypatch: Any, times: int | None) -> None:
    model = model_of("grouped")
    elsewhere: Any = SimpleNamespace(
        mesh=None, compiled=model.compiled, backend=SimpleNamespace(platform="gpu")
    )

    def budget() -> Any:
        if times is None:
            raise MemorySettingError("the device does not say")
        return SimpleNamespace(limit=times * bytes_of_one_device(model.params))

    monkeypatch.setattr(layers, "device_budget", budget)
    described = describe_arrays(model)[0]
    given, shapes = (layers_apart(elsewhere, params) for params in (model.params, described))
    assert bool(apart(given)) == (times == 5)
    if times != 5:
        assert given is model.params
        return
    # What programs are made for before the weights are there is what they get.
    kinds = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (given, shapes)]
    assert kinds[0] == kinds[1]
    assert jax.tree.structure(given) == jax.tree.structure(shapes)
    stack = model.params["blocks"]["mlp"]["up"]["weight"]
    np.testing.assert_array_equal(np.stack(given["blocks"]["mlp"]["up"]["weight"].arrays), stack)


COMPILED = r"""
import json, sys
from pathlib import Path
from types import SimpleNamespace
import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape
from capibara.serve.engine.arrays import bytes_of_one_device, describe_arrays
from capibara.serve.engine.layers import layers_apart
from capibara.serve.engine.steps import EngineSizes

device = topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=Path(sys.argv[1]).read_text(), topology="1x1x1"
).devices[0]
one = SingleDeviceSharding(device)
model = ModularCapibaraModel(ModularModelConfig.from_dict({}, json.loads(sys.argv[2])))
params, state = describe_arrays(model)
shape, sizes = StepShape(4), EngineSizes.of(model, max_batch=4, max_length=256)
cache = model.describe_pages(sizes.pages, sizes.page_size, sizes.slots, dtype=None)


def step(params, state, cache, inputs):
    return model.decode_pages(params, inputs, cache, shape, state=state)


out = {}
for name, given in (("stacked", params), ("apart", layers_apart(model, params))):
    on = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), (given, state, cache, sizes.inputs(shape))
    )
    memory = jax.jit(step, donate_argnums=2).lower(*on).compile().memory_analysis()
    out[name] = [memory.temp_size_in_bytes, memory.alias_size_in_bytes >= bytes_of_one_device(cache)]
print(json.dumps(out))
"""


@needs_gpu_compiler
def test_for_a_gpu_no_layer_is_cut_out_of_its_stack_and_the_cache_stays_where_it_is() -> None:
    settings = {
        "model.vocab_size": 1000,
        "model.embed_dim": 512,
        "model.num_layers": 4,
        "model.num_heads": 8,
        "model.num_kv_heads": 4,
        "model.mlp_dim": 2048,
        "model.max_sequence_length": 256,
        "model.pattern": ["attention"],
        "precision.param_dtype": "bfloat16",
        "precision.compute_dtype": "bfloat16",
    }
    found = ask(COMPILED, str(TARGET), json.dumps(settings))
    for kind in ("stacked", "apart"):
        assert found[kind][1], kind
    assert found["apart"][0] < found["stacked"][0] / 2
