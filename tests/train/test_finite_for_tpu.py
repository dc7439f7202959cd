"""The look at a state before it is saved, compiled for TPUs: parts of it may be in the host's memory."""

from __future__ import annotations

import pytest
from tpu_compiler import ask, needs_libtpu

SCRIPT = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from capibara.train.finite import _finite

devices = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1").devices
mesh = Mesh(np.array(devices).reshape(-1), ("data",))

def leaf(kind, dtype):
    where = NamedSharding(mesh, PartitionSpec("data"), memory_kind=kind)
    return jax.ShapeDtypeStruct((4096, 4096), dtype, sharding=where)

found = _finite.lower([leaf("pinned_host", jnp.float32)]).compile().memory_analysis()
together = _finite.lower([leaf("device", jnp.float32), leaf("device", jnp.bfloat16)]).compile().memory_analysis()
sizes = found.host_argument_size_in_bytes, found.temp_size_in_bytes, together.temp_size_in_bytes
print(json.dumps([len(devices), *sizes]))
"""


@needs_libtpu
@pytest.mark.slow
def test_what_is_in_the_hosts_memory_is_looked_at_on_the_device() -> None:
    count, on_host, temporaries, together = ask(SCRIPT)
    part = 4096 * 4096 * 4 // count
    assert on_host == part
    assert part <= temporaries < 1.1 * part
    assert together < part / 10
