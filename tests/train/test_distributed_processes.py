"""The trainer over the devices of two processes: what one device computes, and one checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from capibara.launch import launch_processes
from capibara.train import TpuDistributedTrainer

PROGRAM = """
import json, sys
from pathlib import Path
from capibara.train.processes import join_processes
join_processes()  # before JAX is used
import jax, jax.numpy as jnp, numpy as np, optax
from capibara.train import TpuDistributedTrainer

def init(key):
    keys = jax.random.split(key, 2)
    return {"in": 0.4 * jax.random.normal(keys[0], (6, 8)), "out": 0.3 * jax.random.normal(keys[1], (8, 2))}

def apply(params, inputs):
    return jnp.tanh(inputs @ params["in"]) @ params["out"]

points = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
batch = (points, (points[:, 0] > 0).astype("int32"))
options = {"optimizer": optax.adam(1e-2), "gradient_accumulation_steps": 2, "ema_decay": 0.9}

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"))
    trainer = TpuDistributedTrainer((init, apply), mesh, **options)
    report = trainer.train([batch], steps=3, directory=folder / "run")
    found = {"losses": report.losses, "devices": len(jax.devices()), "all": trainer.evaluate([batch])["loss"]}
    (folder / f"{jax.process_index()}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_two_processes_are_one_device(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        command = [sys.executable, str(program), str(tmp_path)]
        code = launch_processes(command, 2, devices=2, environment=environment, out=out, err=err, grace=1.0)
    assert code == 0, (tmp_path / "err").read_text()[-4000:]
    found = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(2)]
    assert found[0] == found[1]
    assert found[0]["devices"] == 4
    names: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM, names)
    one = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    alone = TpuDistributedTrainer((names["init"], names["apply"]), one, **names["options"])
    losses = alone.train([names["batch"]], steps=3).losses
    np.testing.assert_allclose(found[0]["losses"], losses, rtol=1e-5)
    # What the two have written is read by one.
    alone.restore(tmp_path / "run")
    assert alone.step_count == 3
    assert alone.evaluate([names["batch"]])["loss"] == pytest.approx(found[0]["all"], rel=1e-5)
    assert optax.tree.norm(alone.state.ema) > 0
