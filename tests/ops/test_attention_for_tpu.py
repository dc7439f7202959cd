"""flash_attention compiled ahead of time for TPUs: what `explain` says is in the program, and memory is linear."""

from __future__ import annotations

from typing import Any

import pytest
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

pytestmark = needs_libtpu

SCRIPT = r"""
import json, re, sys
import jax, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.attention import flash_attention

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
devices = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices
one = SingleDeviceSharding(devices[0])
out = {}


def calls(text):
    return sorted(set(re.findall(r"capibara_attention_(output|query|key_value|gradients)", text)))


def measure(name, shapes, dtype, ids=None, bias=None, sinks=None, **options):
    def loss(q, k, v, sinks, ids, bias):
        y = flash_attention(q, k, v, segment_ids=ids, bias=bias, sinks=sinks, **options)
        return jnp.sum(y.astype(jnp.float32))

    given = [jax.ShapeDtypeStruct(s, dtype, sharding=one) for s in shapes]
    given.append(None if sinks is None else jax.ShapeDtypeStruct(sinks, jnp.float32, sharding=one))
    given.append(None if ids is None else jax.ShapeDtypeStruct(ids, jnp.int32, sharding=one))
    given.append(None if bias is None else jax.ShapeDtypeStruct(bias, dtype, sharding=one))
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*given).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    options |= dict(zip(("sinks", "segment_ids", "bias"), given[3:]))
    answer = explain(flash_attention, *given[:3], platform="tpu", **options)
    out[name] = {
        "explain": answer.chosen, "calls": calls(text), "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes,
    }


whole = (1, 16, 32768, 128)
measure("long", [whole] * 3, jnp.bfloat16, use_causal_mask=True)
heads = [(1, 4, 1000, 64), (1, 2, 700, 64), (1, 2, 700, 80)]
measure("everything", heads, jnp.float32, window=300, softcap=30.0)
# As in gpt-oss, whose local layers see 128 positions.
shapes = [(1, 8, 2048, 64), (1, 1, 2048, 64), (1, 1, 2048, 64)]
measure("sinks", shapes, jnp.bfloat16, sinks=(8,), window=128, use_causal_mask=True)
measure("segments", [(2, 2, 300, 5)] * 3, jnp.float32, ids=(2, 300), precision="highest", layout="bhsd")
few or measure("wide", [(1, 2, 2048, 256)] * 3, jnp.float32, precision="bfloat16")
out["vmap"] = {"calls": calls(jax.jit(jax.vmap(flash_attention, (0, None, None))).lower(
    *(jax.ShapeDtypeStruct(s, jnp.float32, sharding=one) for s in [(3, 2, 1, 200, 8)] + [(2, 1, 200, 8)] * 2)
).compile().as_text())}
# The longest whose gradients are one kernel's, and the shortest beyond.
for name, length in (("one kernel", 10240), ("two kernels", 10752)):
    measure(name, [(1, 2, length, 128)] * 3, jnp.bfloat16, use_causal_mask=True, block_size=512)
options = {"segments": (1, 2048), "block_size": 1024, "softcap": 30.0, "use_causal_mask": True}
few or measure("large blocks", [(1, 2, 2048, 256)] * 3, jnp.bfloat16, ids=options.pop("segments"), **options)
measure("bias", [(1, 2, 256, 64)] * 3, jnp.float32, bias=(1, 2, 256, 256))
# Each kernel alone: what it holds in memory beside its operands and results.
from capibara.ops.attention import pallas_tpu_kernels as kernels
from capibara.ops.attention.pallas_plan import Plan

length = 32768
plan = Plan(512, 512, length, None, 0, 0.1, None, None, "bfloat16", False)
shapes = {"query": (1, 16, 1, length, 128), "key": (1, 16, length, 128), "row": (1, 16, 1, 1, length)}
q, k, row = (
    jax.ShapeDtypeStruct(s, jnp.float32 if n == "row" else jnp.bfloat16, sharding=one) for n, s in shapes.items()
)
backward = (q, k, k, q, row, row)
alone = {"output": (q, k, k), "query_gradient": backward, "key_value_gradients": backward}
for name, arrays in () if few else alone.items():
    compiled = jax.jit(lambda *a: getattr(kernels, name)(plan, *a)).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    out["alone " + name] = {
        "kernels": calls(compiled.as_text()), "temp": memory.temp_size_in_bytes,
        "arguments": memory.argument_size_in_bytes, "results": memory.output_size_in_bytes,
    }
if kind.startswith("v4"):
    mesh = Mesh(np.array(devices).reshape(2, 2), ("data", "model"))
    laid = NamedSharding(mesh, P("data", "model"))
    q, k = (jax.ShapeDtypeStruct((4, heads, 512, 64), jnp.bfloat16, sharding=laid) for heads in (4, 2))

    def loss(q, k, v):
        return jnp.sum(flash_attention(q, k, v, use_causal_mask=True).astype(jnp.float32))

    def local(q, k, v):
        return jax.lax.psum(loss(q, k, v), ("data", "model"))

    apart = jax.shard_map(local, mesh=mesh, in_specs=P("data", "model"), out_specs=P())
    for name, f in (("mesh", loss), ("shard_map", apart)):
        compiled = jax.jit(jax.grad(f, (0, 1, 2))).lower(q, k, k).compile()
        out[name] = {
            "calls": calls(compiled.as_text()),
            "all-gather": compiled.as_text().count("all-gather("),
            "gradients": [str(s.spec) for s in compiled.output_shardings],
        }
print(json.dumps(out))
"""

FORWARD_AND_BACKWARD = ["gradients", "output"]
# Sums of key and value that do not fit into the chip's memory, and a window that is shorter than the keys.
IN_TWO_KERNELS = ["key_value", "output", "query"]
TWO = ("long", "two kernels", "sinks")


@pytest.fixture(scope="module", params=few_or_all("v4"))
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ask(SCRIPT, *request.param.split())


def test_the_kernels_are_in_the_program_where_explain_says_so(found):
    for name, row in found.items():
        if "explain" not in row:
            continue
        kernels = row["explain"] == "pallas_tpu"
        assert kernels == (name != "bias"), name
        expected = IN_TWO_KERNELS if name in TWO else FORWARD_AND_BACKWARD
        assert row["calls"] == (expected if kernels else []), name


def test_vmap_keeps_the_kernel(found):
    assert found["vmap"]["calls"] == ["output"]


def test_memory_is_linear_in_the_sequence(found):
    # All scores of one head would be 4 GiB. Three operands in bfloat16 are 384 MiB; the gradient keeps at most as much
    # for the output and its gradient (how much of it in the results' memory is the compiler's choice), and two values
    # a row, in tiles of 8 rows.
    row = found["long"]
    assert row["arguments"] == 3 * 16 * 32768 * 128 * 2
    assert row["temp"] <= row["arguments"] + 2 * 8 * 16 * 32768 * 4


@pytest.mark.parametrize("kernel", ["output", "query_gradient", "key_value_gradients"])
def test_each_kernel_holds_nothing_beside_its_operands_and_results(found, kernel):
    if (row := found.get(f"alone {kernel}")) is None:
        pytest.skip("not among the few programs of make test")
    assert row["kernels"] == [kernel.partition("_grad")[0]]
    operand, numbers = 16 * 32768 * 128 * 2, 16 * 32768 * 4
    # A row vector [1, n] of numbers is padded to tiles of 8 rows.
    assert row["arguments"] in range(3 * operand, 4 * operand + 2 * 8 * numbers + 1)
    results = 2 * operand if kernel == "key_value_gradients" else operand + 8 * numbers
    assert row["results"] <= results + 4096  # the table of a tuple
    assert row["temp"] <= 1 << 20


def test_on_a_mesh_the_kernels_run_inside_shard_map_and_xla_splits_its_own_form_outside(found):
    if "mesh" not in found:
        pytest.skip("compiled for one kind of chip only")
    assert found["mesh"]["calls"] == []
    assert found["shard_map"]["calls"] == FORWARD_AND_BACKWARD
    for name in ("mesh", "shard_map"):
        assert found[name]["all-gather"] == 0
        assert all("'data'" in s and "'model'" in s for s in found[name]["gradients"])
