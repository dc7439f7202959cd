"""cross_entropy compiled ahead of time for TPUs: it compiles, and holds a small part of the logits."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tpu_compiler import environment, needs_libtpu

pytestmark = [needs_libtpu, pytest.mark.slow]

SCRIPT = r"""
import json, sys
from functools import partial
import jax, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from capibara.ops.loss import cross_entropy

kind = sys.argv[1]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
devices = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices
TOKENS, FEATURES, VOCAB = 8192, 256, 131072
out = {}


def measure(name, function, lay):
    given = (
        jax.ShapeDtypeStruct((8, TOKENS // 8, FEATURES), jnp.bfloat16, sharding=lay(("data",))),
        jax.ShapeDtypeStruct((FEATURES, VOCAB), jnp.bfloat16, sharding=lay((None, "model"))),
        jax.ShapeDtypeStruct((8, TOKENS // 8), jnp.int32, sharding=lay(("data",))),
    )
    for way, step in (("loss", function), ("gradient", jax.value_and_grad(function, (0, 1)))):
        compiled = jax.jit(step).lower(*given).compile()
        out[name, way] = [compiled.memory_analysis().temp_size_in_bytes, "all-gather" in compiled.as_text()]


one = SingleDeviceSharding(devices[0])
measure("one", cross_entropy, lambda axes: one)
measure("plain", partial(cross_entropy, implementation="reference"), lambda axes: one)
mesh = Mesh(np.array(devices[:4]).reshape(2, 2), ("data", "model"))


def mapped(hidden, head, labels):
    def local(*arrays):
        return jax.lax.psum(cross_entropy(*arrays, axis_name="model", reduction="sum"), "data")

    specs = (P("data"), P(None, "model"), P("data"))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P())(hidden, head, labels)


measure("mapped", mapped, lambda axes: NamedSharding(mesh, P(*axes)))
print(json.dumps({" ".join(key): value for key, value in out.items()}))
"""


@pytest.mark.parametrize("kind", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_what_it_holds(kind: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    logits = 8192 * 131072 * 4
    assert found["plain gradient"][0] > logits / 2
    for way in ("loss", "gradient"):
        assert found[f"one {way}"][0] < logits / 8
        held, gathers = found[f"mapped {way}"]
        assert held < logits / 4 / 8  # of one device's part
        assert not gathers
