"""A step with stages, compiled for TPU v4: what goes from chip to chip, and the memory of few and many microbatches."""

from __future__ import annotations

import pytest
from tpu_compiler import ask, needs_libtpu

PROGRAM = """
import json
import jax, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh
from capibara.config import ModularModelConfig
from capibara.plan.workloads.training import lower_train_step
from capibara.sharding import Layout

topology = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
mesh = Mesh(np.array(topology.devices).reshape(2, 2), ("data", "pipeline"))
out = {}
for count in (4, 12):
    config = ModularModelConfig.from_toml("demo", {
        "model.num_layers": 2, "model.embed_dim": 256, "model.num_heads": 2, "model.num_kv_heads": 2,
        "model.mlp_dim": 512, "model.vocab_size": 512, "model.max_sequence_length": 512,
        "train.batch_size": 8 * count, "train.sequence_length": 512, "train.gradient_accumulation_steps": count})
    layout = Layout(mesh=(("data", 2), ("pipeline", 2)), parameters="replicated", remat="none", microbatches=count)
    compiled = lower_train_step(mesh, config=config.to_dict(), layout=layout.to_json()).lowered.compile()
    text = compiled.as_text()
    out[count] = {"temporary": compiled.memory_analysis().temp_size_in_bytes,
                  "permutes": text.count(" collective-permute-start("), "kernels": text.count("tpu_custom_call"),
                  "scattered": text.count(" reduce-scatter("), "joined": text.count("/all_gather")}
print(json.dumps(out))
"""


@pytest.mark.slow  # two compilations for a TPU
@needs_libtpu
def test_stages_send_asynchronously_and_memory_does_not_grow() -> None:
    found = ask(PROGRAM)
    few, many = found["4"], found["12"]
    # Activations forward, their gradients back; and of the last stage's outputs a part to each stage, and back.
    assert few["permutes"] >= 4
    assert (
        few["scattered"] == few["joined"] == 0
    )  # for these every chip would have the rows of all along ``data``
    assert few["kernels"] > 0  # attention on each chip's part
    stage_input = 4 * 512 * 256 * 2  # rows of a chip × positions × width, bfloat16
    assert abs(many["temporary"] - few["temporary"]) < 2 * stage_input
