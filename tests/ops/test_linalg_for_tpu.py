"""Linear algebra compiled ahead of time for TPUs: it compiles, and holds no more than it has to."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tpu_compiler import environment, needs_libtpu
from tpu_kinds import few_or_all

pytestmark = needs_libtpu

SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.linalg import cholesky_update, fast_svd, optimized_gemm, qr

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
device = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0]
one = SingleDeviceSharding(device)
out = {}


def measure(name, op, *shapes, **options):
    given = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=one) for s in shapes]
    compiled = jax.jit(lambda *x: op(*x, **options)).lower(*given).compile()
    out[name] = {
        "explain": explain(op, *given, platform="tpu", **options).chosen,
        "temp": compiled.memory_analysis().temp_size_in_bytes,
        "scope": f"capibara:{op.__capibara_op__}:" + explain(op, *given, platform="tpu", **options).chosen
        in compiled.as_text(),
    }


measure("svd", fast_svd, (4096, 4096), rank=64)
few or measure("qr", qr, (4096, 64))
few or measure("cholesky", cholesky_update, (512, 512), (512,))
measure("slabs", optimized_gemm, (1024, 8192), (8192, 512), precision="bfloat16", chunk_size=1024)
print(json.dumps(out))
"""


@pytest.fixture(
    scope="module",
    params=few_or_all("v4"),
)
def compiled(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *request.param.split()],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return request.param, json.loads(result.stdout.splitlines()[-1])


@pytest.mark.slow
def test_what_explain_says_is_in_the_program(compiled):
    _, found = compiled
    assert found["svd"]["explain"] == "xla"
    assert "qr" not in found or found["qr"]["explain"] == "gram"
    for name, row in found.items():
        assert row["scope"], name


def test_nothing_of_the_size_of_the_matrix_is_kept(compiled):
    kind, found = compiled
    # The matrix is 64 MiB. The whole decomposition by jnp.linalg.svd would hold several like it.
    assert found["svd"]["temp"] < 16 << 20
    # Both operands rounded to bfloat16 are 24 MiB. The compiler for v5p rounds them before the loop nevertheless.
    assert found["slabs"]["temp"] < (28 << 20 if "v5p" in kind else 1 << 20)
