"""grouped_matmul and its gradients compiled ahead of time for TPUs, as XLA's own operation."""

from __future__ import annotations

import pytest
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import topologies

pytestmark = needs_libtpu

SCRIPT = r"""
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.linalg import grouped_matmul

kind = sys.argv[-1]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
device = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0]
one = SingleDeviceSharding(device)
rows, inner, columns, groups = 1024, 512, 1024, 16
shapes = ((rows, inner), jnp.bfloat16), ((groups, inner, columns), jnp.bfloat16), ((groups,), jnp.int32)
given = [jax.ShapeDtypeStruct(shape, dtype, sharding=one) for shape, dtype in shapes]


def loss(lhs, rhs, sizes):
    return jnp.sum(grouped_matmul(lhs, rhs, sizes).astype(jnp.float32) ** 2)


out = {"explain": explain(grouped_matmul, *given, platform="tpu").chosen, "product": 2 * rows * inner * columns}
for name, function in (("forward", grouped_matmul), ("gradient", jax.grad(loss, (0, 1)))):
    compiled = jax.jit(function).lower(*given).compile()
    memory = compiled.memory_analysis().temp_size_in_bytes
    out[name] = {"flops": compiled.cost_analysis()["flops"], "memory": memory}
print(json.dumps(out))
"""


@pytest.mark.parametrize("kind", topologies("v5e"))
def test_the_work_is_that_of_one_product(kind: str) -> None:
    found = ask(SCRIPT, kind)
    assert found["explain"] == "xla"
    assert found["product"] <= found["forward"]["flops"] < 1.1 * found["product"]
    # Of the blocks in loops one of each size is counted: less than two more products, and not one for each group.
    assert found["gradient"]["flops"] < 4 * found["product"]
    # All groups' products of columns in float32 at once would be 32 MiB.
    assert found["gradient"]["memory"] < 16 << 20
