"""Steps of many sequences, compiled for TPUs: the kernel runs, and no pool is copied."""

from __future__ import annotations

import pytest
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import topologies

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape

more = {"chip_config_name": "megacore"} if sys.argv[1].startswith("v4") else {}
where = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=sys.argv[1], **more).devices[0])
PAGES = 2048
found = {}
for heads, dim in ((2, 128), (1, 64)):
    settings = {
        "model.vocab_size": 512, "model.embed_dim": 256, "model.num_layers": 3, "model.num_heads": 4 * heads,
        "model.num_kv_heads": heads, "model.head_dim": dim, "model.mlp_dim": 512, "model.max_sequence_length": 1024,
        "precision.param_dtype": "bfloat16", "precision.compute_dtype": "bfloat16",
    }
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, settings), platform="tpu")
    abstract = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)
    params = abstract(jax.eval_shape(lambda: model.init(0)[0]))
    cache = abstract(jax.eval_shape(lambda: model.init_pages(PAGES, 16, 9)))
    pools = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    for name, shape in (("one", StepShape(1)), ("decode", StepShape(8)), ("prefill", StepShape(8, 2, 64))):
        of = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32, sharding=where)
        n, of_each = shape.sequences, ("starts", "counts", "outputs")
        inputs = {"tokens": of(shape.tokens), "page_table": of(n, 64), **{k: of(n) for k in of_each}}
        step = lambda params, cache, inputs: model.decode_pages(params, inputs, cache, shape, state={})
        compiled = jax.jit(step, donate_argnums=1).lower(params, cache, inputs).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        found[f"{name} {dim}"] = {
            "kernel": "tpu_custom_call" in text, "pools": pools, "shared": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes, "pool": pools // 2,
        }
print(json.dumps(found))
"""


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", topologies("v4"))
def test_pools_are_written_in_place(kind: str) -> None:
    found = ask(SCRIPT, kind)
    for name, one in found.items():
        assert one["kernel"] or (kind.startswith("v5p") and name.endswith(" 64")), name
        assert one["shared"] >= one["pools"], (name, one)
        assert one["temporary"] < one["pool"] / 4, (name, one)


MESH_SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel
from capibara.core.paged import StepShape
from capibara.hardware import build_mesh
from capibara.serve.engine.arrays import describe_arrays

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
mesh = build_mesh((1, 4), ("data", "model"), list(devices))
found = {}
for sinks in (False, True):
    settings = {
        "model.vocab_size": 512, "model.embed_dim": 256, "model.num_layers": 3, "model.num_heads": 16,
        "model.num_kv_heads": 8, "model.head_dim": 128, "model.mlp_dim": 512, "model.max_sequence_length": 1024,
        "model.attention_sinks": sinks, "precision.param_dtype": "bfloat16", "precision.compute_dtype": "bfloat16",
    }
    model = ModularCapibaraModel(ModularModelConfig.from_dict({}, settings), mesh=mesh)
    params, state = describe_arrays(model)
    cache = model.describe_pages(2048, 16, 9)
    places = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()), jax.tree.map(lambda x: x.sharding, cache)
    for name, shape in (("decode", StepShape(8)), ("prefill", StepShape(8, 2, 64))):
        of = lambda *size: jax.ShapeDtypeStruct(size, jnp.int32)
        n = shape.sequences
        inputs = {"tokens": of(shape.tokens), "page_table": of(n, 64)}
        inputs |= {k: of(n) for k in ("starts", "counts", "outputs")}
        step = lambda params, cache, inputs: model.decode_pages(params, inputs, cache, shape, state={})
        compiled = jax.jit(step, donate_argnums=1, out_shardings=places).lower(params, cache, inputs).compile()
        memory, text = compiled.memory_analysis(), compiled.as_text()
        found[f"{name} {sinks}"] = {
            "kernel": "tpu_custom_call" in text, "shared": memory.alias_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
            "pools": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // 4,
        }
print(json.dumps(found))
"""


@needs_libtpu
@pytest.mark.slow
def test_each_device_of_a_mesh_has_its_own_heads() -> None:
    found = ask(MESH_SCRIPT)
    for name, one in found.items():
        assert one["kernel"], name
        assert one["shared"] >= one["pools"], (name, one)
        assert one["temporary"] < one["pools"] / 8, (name, one)
