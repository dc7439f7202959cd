"""Every operation of every category inside ``jax.shard_map`` on 4 × 8 emulated devices, in one process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from operation_calls import functions

SCRIPT = Path(__file__).parents[1] / "support" / "mesh_cases.py"
CATEGORIES = ("attention", "collective", "conv", "fft", "linalg", "scan", "tropical", "vq")
# What has no arrays of a call to lay over a mesh.
NO_CASE = {
    "attention.multihead_attention_params",
    "collective.zero_residual",
    "fft.radix_optimized_fft",  # its cases are named after how they are split
    "vq.initial_codebook_state",
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=32 --xla_backend_optimization_level=0",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *CATEGORIES],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows: dict[str, dict[str, float]] = {}
    for line in done.stdout.splitlines():
        rows.update(json.loads(line))
    return rows


def test_every_function_has_a_case(found):
    missing = [
        name
        for name in sorted(set(functions()) - NO_CASE)
        if not any(case.split()[0] == name.partition(".")[2] for case in found[name.partition(".")[0]])
    ]
    assert missing == []
    assert len(found["fft"]) >= 4


@pytest.mark.parametrize("category", CATEGORIES)
def test_value_and_gradient_are_the_oracles(found, category):
    # Winograd's tiles of 4 and growing recurrences round more than a product does.
    far = {name: gap for name, gap in found[category].items() if not gap < 2e-5}
    assert far == {}
