"""Gradients that devices exchange in the dtype of arithmetic (``precision.exchange=compute``), and blocks that are
compiled one by one (``model.scan_layers=unroll``): what ``capibara plan --choose-settings`` chooses."""

from __future__ import annotations

import json
import math
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
from capibara.compose import JaxBackend
from capibara.core import ModularCapibaraModel
from capibara.train import TpuDistributedTrainer

random = np.random.default_rng(0)
# A text that can be learnt: each token follows from the one before.
follows = random.permutation(64)
shape = json.loads(sys.argv[1])
devices = int(np.prod(list(shape.values())))
rows = [random.integers(0, 64, (max(16, devices), 1))]
for _ in range(16):
    rows.append(follows[rows[-1]])
tokens = np.concatenate(rows, 1).astype("int32")
found = {}
host = JaxBackend.platform
for name, count, exchange, layers, dtype in (
    ("one device", 1, "accumulate", "scan", "bfloat16"),
    ("accumulate", devices, "accumulate", "scan", "bfloat16"),
    ("compute", devices, "compute", "scan", "bfloat16"),
    ("unrolled", devices, "accumulate", "unroll", "bfloat16"),
    ("unrolled, compute", devices, "compute", "unroll", "bfloat16"),
    ("for a TPU", devices, "accumulate", "scan", "bfloat16"),
    ("for a TPU, unrolled, compute", devices, "compute", "unroll", "bfloat16"),
    ("float32", devices, "accumulate", "scan", "float32"),
    ("float32, unrolled, compute", devices, "compute", "unroll", "float32"),
):
    JaxBackend.platform = "tpu" if name.startswith("for a TPU") else host
    axes = shape if count > 1 else {"data": 1}
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(tuple(axes.values())), tuple(axes))
    config = tiny_config(
        "unused", *ATTENTION, "model.vocab_size=64", f"train.batch_size={len(tokens)}", "train.steps=50",
        f"model.scan_layers={layers}", f"precision.exchange={exchange}",
        f"precision.compute_dtype={dtype}", "optimizer.warmup_steps=0", "optimizer.learning_rate=0.003",
    )
    trainer = TpuDistributedTrainer(ModularCapibaraModel(config), mesh)
    norms = []
    report = trainer.train(
        [{"tokens": tokens}] * 50, on_step=lambda step, metrics: norms.append(float(metrics["grad_norm"]))
    )
    found[name] = {"losses": [float(x) for x in report.losses], "norms": norms}
print("RESULT" + json.dumps(found))
"""


@pytest.mark.slow  # nine programs over emulated devices, fifty steps each
@pytest.mark.parametrize(
    "axes", [{"data": 8}, {"fsdp": 32}, {"fsdp": 8, "model": 4}], ids=lambda axes: " ".join(axes)
)
def test_fifty_steps_lose_nothing_by_it(axes: dict[str, int]) -> None:
    # A CPU multiplies in float32, and XLA may leave out what would round the parts.
    flags = f"{emulated(math.prod(axes.values()), quick=True)} --xla_allow_excess_precision=false"
    found: dict[str, Any] = run_apart(CODE, json.dumps(axes), XLA_FLAGS=flags)
    losses = {name: np.array(each["losses"]) for name, each in found.items()}
    norms = {name: np.array(each["norms"]) for name, each in found.items()}
    assert losses["compute"][-1] < 0.5 * losses["compute"][0]
    # It is rounded in another place, and by no more than what bfloat16 is off by anyway.
    assert norms["compute"][0] != norms["accumulate"][0]
    assert norms["unrolled, compute"][0] != norms["unrolled"][0]
    own = np.max(np.abs(losses["accumulate"] / losses["float32"] - 1))
    for name in ("compute", "unrolled", "unrolled, compute", "for a TPU", "for a TPU, unrolled, compute"):
        np.testing.assert_allclose(norms[name][0], norms["float32"][0], rtol=0.01, err_msg=name)
        assert np.max(np.abs(losses[name] / losses["float32"] - 1)) < 2 * own + 0.01, name
        np.testing.assert_allclose(losses[name], losses["one device"], rtol=0.03, atol=0.01, err_msg=name)
    # Where products have 32 bits there is nothing to narrow.
    np.testing.assert_allclose(losses["float32, unrolled, compute"], losses["float32"], rtol=1e-4)
