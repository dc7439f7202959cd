"""Document 2, "Entrenamiento Distribuido": the snippet on 32 emulated devices, and what its trainer does then."""

from __future__ import annotations

import textwrap

import pytest
from emulation import emulated
from other_process import run_apart

SNIPPET = """
    from capibara.jax.tpu_v4.training import (
        TpuDistributedTrainer,
        create_training_mesh
    )

    # Mesh para entrenamiento distribuido
    training_mesh = create_training_mesh(
        total_chips=32,
        data_parallel_size=8,
        model_parallel_size=4,
        pipeline_parallel_size=1
    )

    # Trainer distribuido optimizado TPU
    trainer = TpuDistributedTrainer(
        model=model,
        mesh=training_mesh,

        # Optimizaciones entrenamiento
        gradient_accumulation_steps=4,
        use_gradient_checkpointing=True,
        async_gradient_communication=True,

        # Configuración memoria
        activation_offloading=True,
        optimizer_sharding=True
    )
"""

BEFORE = """
import json, warnings
warnings.simplefilter("error")
import numpy as np
import jax
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel

config = ModularModelConfig.from_toml("demo", {
    "model.embed_dim": 32, "model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 8,
    "model.mlp_dim": 64, "model.num_layers": 1, "model.vocab_size": 32, "model.pattern": ["attention"],
    "model.max_sequence_length": 8, "train.sequence_length": 8, "train.batch_size": 32,
    "optimizer.warmup_steps": 0, "train.steps": 4,
})
model = ModularCapibaraModel(config)
"""

AFTER = """
dataset = [{"tokens": (np.arange(32 * 9).reshape(32, 9) * 7 % 32).astype("int32")}]
report = trainer.train(dataset, epochs=3)
# The same on one device, with none of the options.
one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
alone = TpuDistributedTrainer(model, one).train(dataset, epochs=3)
moment = trainer.state.opt_state[1].mu["embedding"]["weight"]
kept = trainer.state.params["embedding"]["weight"]
print("RESULT", json.dumps({
    "losses": report.losses, "alone": alone.losses, "norms": [report.metrics["grad_norm"], alone.metrics["grad_norm"]],
    "moment": moment.sharding.shard_shape(moment.shape), "kept": kept.sharding.shard_shape(kept.shape),
    "options": trainer.compiler_options, "devices": len(kept.sharding.device_set),
    "remat": "prevent_cse" in str(jax.make_jaxpr(trainer._step)(trainer.state, trainer._feeder.put(dataset[0]))),
}))
"""


@pytest.mark.slow  # a program over 32 devices
def test_the_trainer() -> None:
    found = run_apart(BEFORE + textwrap.dedent(SNIPPET) + AFTER, XLA_FLAGS=emulated(32, quick=True))
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["losses"][-1] < found["losses"][0]
    assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-4)
    # Four devices share a matrix, and all 32 its moment.
    assert found["kept"] == [8, 32]
    assert found["moment"] == [8, 4]
    assert found["devices"] == 32
    assert found["options"] == {"xla_cpu_enable_concurrency_optimized_scheduler": True}
    assert found["remat"]
