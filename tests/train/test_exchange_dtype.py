"""Gradients that devices exchange in the dtype of arithmetic (``precision.exchange=compute``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart

CODE = """
import json, sys
import jax, numpy as np
from axes_cases import ATTENTION
from tiny_run import tiny_config
from capibara.core import ModularCapibaraModel
from capibara.train import TpuDistributedTrainer

random = np.random.default_rng(0)
# A text that can be learnt: each token follows from the one before.
follows = random.permutation(64)
rows = [random.integers(0, 64, (16, 1))]
for _ in range(16):
    rows.append(follows[rows[-1]])
tokens = np.concatenate(rows, 1).astype("int32")
shape = json.loads(sys.argv[1])
found = {}
for name, count, exchange, dtype in (
    ("one device", 1, "accumulate", "bfloat16"),
    ("accumulate", 8, "accumulate", "bfloat16"),
    ("compute", 8, "compute", "bfloat16"),
    ("float32", 8, "accumulate", "float32"),
    ("float32, compute", 8, "compute", "float32"),
):
    axes = shape if count > 1 else {"data": 1}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    config = tiny_config(
        "unused", *ATTENTION, "model.vocab_size=64", "train.batch_size=16", "train.steps=50",
        "optimizer.warmup_steps=0", "optimizer.learning_rate=0.003", f"precision.compute_dtype={dtype}",
        f"precision.exchange={exchange}",
    )
    trainer = TpuDistributedTrainer(ModularCapibaraModel(config), mesh)
    norms = []
    report = trainer.train(
        [{"tokens": tokens}] * 50, on_step=lambda step, metrics: norms.append(float(metrics["grad_norm"]))
    )
    found[name] = {"losses": [float(x) for x in report.losses], "norms": norms}
print("RESULT" + json.dumps(found))
"""


@pytest.mark.slow  # five programs over eight devices, fifty steps each
@pytest.mark.parametrize("axes", ['{"data": 8}', '{"fsdp": 4, "model": 2}'])
def test_fifty_steps_lose_nothing_by_it(axes: str) -> None:
    # A CPU multiplies in float32, and XLA may leave out what would round the parts.
    flags = f"{emulated(8, quick=True)} --xla_allow_excess_precision=false"
    found: dict[str, Any] = run_apart(CODE, axes, XLA_FLAGS=flags)
    losses = {name: np.array(each["losses"]) for name, each in found.items()}
    norms = {name: np.array(each["norms"]) for name, each in found.items()}
    assert losses["compute"][-1] < 0.5 * losses["compute"][0]
    # It is rounded in another place, and by no more than what bfloat16 is off by anyway.
    assert norms["compute"][0] != norms["accumulate"][0]
    np.testing.assert_allclose(norms["compute"][0], norms["float32"][0], rtol=0.01)
    own = np.max(np.abs(losses["accumulate"] / losses["float32"] - 1))
    assert np.max(np.abs(losses["compute"] / losses["float32"] - 1)) < 2 * own + 0.01
    np.testing.assert_allclose(losses["compute"], losses["one device"], rtol=0.03, atol=0.01)
    # Where products have 32 bits there is nothing to narrow.
    np.testing.assert_array_equal(losses["float32, compute"], losses["float32"])
