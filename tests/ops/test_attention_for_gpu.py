"""flash_attention compiled ahead of time for an H100: the kernels compile, and memory is linear in the sequence."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_compiler import TARGET, ask, needs_gpu_compiler

pytestmark = needs_gpu_compiler

SCRIPT = r"""
import json, re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.attention import flash_attention

device = topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=Path(sys.argv[1]).read_text(), topology="1x1x1"
).devices[0]
one = SingleDeviceSharding(device)
out = {}


def measure(name, shapes, dtype, ids=None, **options):
    def loss(q, k, v, ids):
        y = flash_attention(q, k, v, segment_ids=ids, **options)
        return jnp.sum(y.astype(jnp.float32))

    given = [jax.ShapeDtypeStruct(s, dtype, sharding=one) for s in shapes]
    given.append(None if ids is None else jax.ShapeDtypeStruct(ids, jnp.int32, sharding=one))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*given).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    answer = explain(flash_attention, *given[:3], segment_ids=given[3], platform="cuda", **options)
    out[name] = {
        "explain": answer.chosen,
        "calls": sorted(set(re.findall(r"capibara_attention_(output|query|key_value)", text))),
        "triton": len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', text)),
        "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
    }


gpu = {"implementation": "pallas_gpu"}
measure("long", [(1, 16, 32768, 128)] * 3, jnp.bfloat16, use_causal_mask=True, **gpu)
heads = [(1, 4, 1000, 64), (1, 2, 700, 64), (1, 2, 700, 80)]
measure("everything", heads, jnp.float32, window=300, softcap=30.0, **gpu)
measure("segments", [(2, 2, 300, 5)] * 3, jnp.float32, ids=(2, 300), precision="highest", **gpu)
measure("wide", [(1, 2, 1024, 256)] * 3, jnp.float32, block_size=128, **gpu)
measure("halves", [(1, 2, 256, 64)] * 3, jnp.float16, block_size=128, **gpu)
measure("auto", [(1, 2, 256, 64)] * 3, jnp.float32)
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return ask(SCRIPT, str(TARGET))


def test_the_kernels_are_in_the_program_where_explain_says_so(found):
    for name, row in found.items():
        kernels = name != "auto"
        assert row["explain"] == ("pallas_gpu" if kernels else "xla"), name
        assert row["calls"] == (["key_value", "output", "query"] if kernels else []), name
        assert (row["triton"] >= 3) == kernels, name


def test_memory_is_linear_in_the_sequence(found):
    # All scores of one head would be 4 GiB. The output is a third of the operands, and two numbers a row are little.
    row = found["long"]
    assert row["arguments"] == 3 * 16 * 32768 * 128 * 2
    assert row["temp"] <= row["arguments"] // 2
