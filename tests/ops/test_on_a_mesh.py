"""Every operation of every category on 4 × 8 emulated devices, in one process of its own.

Inside ``jax.shard_map``, and on arrays of a mesh with explicit axes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from emulation import emulated
from operation_calls import functions

SCRIPT = Path(__file__).parents[1] / "support" / "mesh_cases.py"
CATEGORIES = ("attention", "collective", "conv", "fft", "linalg", "loss", "rotary", "scan", "tropical", "vq")
# What has no arrays of a call to lay over a mesh.
NO_CASE = {
    "attention.multihead_attention_params",
    "collective.zero_residual",
    "fft.radix_optimized_fft",  # its cases are named after how they are split
    "vq.initial_codebook_state",
}


@pytest.fixture(scope="module", params=["few", pytest.param("all", marks=pytest.mark.slow)])
def found(request: pytest.FixtureRequest) -> dict[str, dict[str, dict[str, float]]]:
    environ = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": emulated(32, quick=True),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), request.param, *CATEGORIES],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for line in done.stdout.splitlines():
        rows.update(json.loads(line))
    return rows


def test_every_function_has_a_case(found):
    missing = [
        name
        for name in sorted(set(functions()) - NO_CASE)
        if not any(
            case.split()[0] == name.partition(".")[2] for case in found[name.partition(".")[0]]["manual"]
        )
    ]
    assert missing == []
    assert {name.split()[0] for name in found["fft"]["manual"]} == {"local", "over"}


@pytest.mark.parametrize("category", CATEGORIES)
def test_value_and_gradient_are_the_oracles(found, category):
    # Winograd's tiles of 4 and growing recurrences round more than a product does.
    far = {name: gap for name, gap in found[category]["manual"].items() if not gap < 2e-5}
    assert far == {}


@pytest.mark.parametrize("category", CATEGORIES)
def test_arrays_of_a_mesh_with_explicit_axes(found, category):
    far = {name: gap for name, gap in found[category]["explicit"].items() if not gap < 2e-5}
    assert far == {}
    # Collectives name the axis that they go over; so do transforms that are split.
    named = {"collective": set(found["collective"]["manual"])}.get(category, set())
    split = {name for name in found[category]["manual"] if name.startswith("over devices")}
    assert set(found[category]["manual"]) - set(found[category]["explicit"]) == named | split
