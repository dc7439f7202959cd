"""Document 2, "Auto-scaling basado en Costo": the snippet on 16 emulated devices, of which half are lost."""

from __future__ import annotations

import textwrap

import pytest
from emulation import emulated
from other_process import run_apart

SNIPPET = """
    from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler

    # Auto-scaler con límites costo
    autoscaler = TpuAutoScaler(
        min_chips=8,
        max_chips=32,
        target_utilization=0.8,
        cost_limit_per_hour=200.0,
        scaling_policy="cost_aware"
    )

    # Scaling automático durante entrenamiento
    with autoscaler.managed_scaling():
        trainer.train(dataset, epochs=10)
"""

BEFORE = """
import json, warnings
warnings.simplefilter("error")
import numpy as np
import jax
import jax.numpy as jnp
from capibara.jax.tpu_v4.training import TpuDistributedTrainer

def init(key):
    return {"w": jax.random.normal(key, (8, 4))}

def apply(params, x):
    return x @ params["w"]

x = np.random.default_rng(0).normal(size=(3, 32, 8)).astype("float32")
dataset = [(one, one.argmax(-1) % 4) for one in x]
alone = TpuDistributedTrainer((init, apply), jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",)))
expected = alone.train(dataset, epochs=10)
trainer = TpuDistributedTrainer((init, apply), optimizer_sharding=True)
losses, places = [], []
real, real_step = jax.devices, trainer.step

def devices(*args):
    # Half of them are gone from the eleventh step on.
    return real(*args)[: 8 if len(losses) >= 10 else 16]

def step(batch):
    metrics = real_step(batch)
    losses.append(metrics["loss"])
    places.append(len(trainer.params["w"].sharding.device_set))
    return metrics

jax.devices, trainer.step = devices, step
"""

AFTER = """
print("RESULT", json.dumps({
    "losses": [float(one) for one in losses], "expected": expected.losses, "places": places,
    "decisions": [[d.action, d.before, d.after, d.step, d.usd_per_hour, d.reason] for d in autoscaler.decisions],
    "equal": bool(jnp.allclose(np.asarray(trainer.params["w"]), np.asarray(alone.params["w"]), rtol=1e-5, atol=1e-6)),
}))
"""


def test_a_training_goes_on_with_the_devices_that_are_left() -> None:
    found = run_apart(BEFORE + textwrap.dedent(SNIPPET) + AFTER, XLA_FLAGS=emulated(16, quick=True))
    assert found["decisions"] == [["shrink", 16, 8, 10, 8 * 3.22, "8 of 16 devices are gone"]]
    assert found["places"] == [16] * 10 + [8] * 20
    # Every batch once, in its order.
    assert found["losses"] == pytest.approx(found["expected"], rel=1e-5)
    assert found["equal"]
