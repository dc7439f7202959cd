"""Document 2, "Sharding y Paralelización" and its training mesh: the snippets, on 32 emulated devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from emulation import emulated

SNIPPETS = """
    from capibara.jax.tpu_v4.optimizations import (
        create_mesh_sharding,
        optimize_sharding_strategy
    )

    # Crear mesh sharding optimizado
    mesh_sharding = create_mesh_sharding(
        mesh_shape=(4, 8),
        device_ids=list(range(32)),
        optimization_target="throughput"  # "throughput", "latency", "memory"
    )

    # Estrategia sharding automática
    sharding_strategy = optimize_sharding_strategy(
        model_params=model.params,
        input_shape=(32, 512, 768),
        mesh_shape=(4, 8),
        memory_limit_gb=32.0
    )

    # Aplicar sharding al modelo
    sharded_model = mesh_sharding.shard_model(
        model,
        strategy=sharding_strategy
    )

    from capibara.jax.tpu_v4.training import (
        create_training_mesh
    )

    # Mesh para entrenamiento distribuido
    training_mesh = create_training_mesh(
        total_chips=32,
        data_parallel_size=8,
        model_parallel_size=4,
        pipeline_parallel_size=1
    )
"""

BEFORE = """
import json, warnings
warnings.simplefilter("error")
import numpy as np
import jax as plain_jax
from capibara.config import ModularModelConfig
from capibara.core import ModularCapibaraModel

# The document's width of 768, with little else.
model = ModularCapibaraModel(ModularModelConfig.from_toml("demo", {
    "model.embed_dim": 768, "model.num_heads": 8, "model.num_kv_heads": 8, "model.head_dim": 8,
    "model.mlp_dim": 64, "model.num_layers": 1, "model.vocab_size": 32, "model.pattern": ["attention"],
}))
"""

AFTER = """
tokens = np.arange(32 * 4, dtype="int32").reshape(32, 4) % 32
logits = sharded_model(tokens)
error = float(np.max(np.abs(np.asarray(logits) - np.asarray(model(tokens)))))
devices = {len(x.sharding.device_set) for x in plain_jax.tree.leaves(sharded_model.params)}
print(json.dumps({
    "error": error, "type": type(sharded_model).__name__, "devices": sorted(devices),
    "output": len(logits.sharding.device_set), "arrays": len(sharding_strategy),
    "params": len(plain_jax.tree.leaves(model.params)), "limit": sharding_strategy.memory_limit_bytes,
    "needed": sharding_strategy.memory.total, "mesh": dict(training_mesh.shape),
    "width": sharding_strategy.assumptions[0],
}))
"""


def test_sharding_and_training_mesh(tmp_path: Path) -> None:
    script = tmp_path / "document_2.py"
    script.write_text(BEFORE + textwrap.dedent(SNIPPETS) + AFTER)
    done = subprocess.run(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": emulated(32),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] < 1e-4
    assert found["type"] == "ModularCapibaraModel"
    assert found["devices"] == [32]
    assert found["output"] == 32
    assert found["arrays"] == found["params"]
    assert found["needed"] <= found["limit"] == 32 * 2**30
    assert found["mesh"] == {"data": 8, "model": 4, "pipeline": 1}
    assert "768 wide" in found["width"]
