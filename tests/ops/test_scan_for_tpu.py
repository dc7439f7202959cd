"""selective_scan compiled ahead of time for TPUs: memory is linear in the sequence, with no state for each position."""

from __future__ import annotations

from typing import Any

import pytest
from tpu_compiler import ask, needs_libtpu
from tpu_kinds import few_or_all

pytestmark = needs_libtpu

SCRIPT = r"""
import json, math, sys
from functools import partial
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops import explain
from capibara.ops.scan import selective_scan
from capibara.ops.scan.specs import ScanSpec

*few, kind = sys.argv[1:]
more = {"chip_config_name": "megacore"} if kind.startswith("v4") else {}
device = topologies.get_topology_desc(platform="tpu", topology_name=kind, **more).devices[0]
one = SingleDeviceSharding(device)
out = {}


def loss(scan, *arrays):
    y, state = scan(*arrays)
    return jnp.sum(y.astype(jnp.float32)) + jnp.sum(state)


def measure(name, length, dtype, implementation="auto", groups=1, several=False):
    # A layer of Mamba-2 with 768 numbers a token: 24 heads of 64 numbers, and 128 states for each.
    shapes = ScanSpec("", 1, length, 24, 64, groups, 128, 64).shapes()
    narrow = ("x", "b", "c")
    given = [jax.ShapeDtypeStruct(s, dtype if n in narrow else jnp.float32, sharding=one) for n, s in shapes.items()]

    starts = {"starts": jnp.arange(length)[None] % 1000 == 0} if several else {}

    def scan(*arrays):
        return selective_scan(*arrays[:5], initial_state=arrays[5], implementation=implementation, **starts)

    answer = explain(
        selective_scan, *given[:5], initial_state=given[5], platform="tpu", implementation=implementation, **starts
    )
    row = {"explain": answer.chosen, "x": 4 * math.prod(shapes["x"])}
    row["states"] = 128 * row["x"]
    for what, f in (("forward", scan), ("gradient", jax.grad(partial(loss, scan), tuple(range(6))))):
        compiled = jax.jit(f).lower(*given).compile()
        row[what] = compiled.memory_analysis().temp_size_in_bytes
        row["scope"] = "capibara:selective_scan:" + answer.chosen in compiled.as_text()
    out[name] = row


measure("short", 16384, "float32")
measure("long", 32768, "float32")
few or measure("bfloat16", 32768, "bfloat16")
few or measure("groups", 32768, "float32", groups=8)
few or measure("texts", 32768, "float32", several=True)
measure("reference", 4096, "float32", "reference")
print(json.dumps(out))
"""

CHUNKED = ("short", "long", "bfloat16", "groups", "texts")


@pytest.fixture(
    scope="module",
    params=few_or_all("v4"),
)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    return ask(SCRIPT, *request.param.split())


@pytest.mark.slow
def test_what_explain_says_is_in_the_program(found):
    for name, row in found.items():
        assert row["explain"] == ("xla" if name in CHUNKED else "reference"), name
        assert row["scope"], name


@pytest.mark.parametrize("name", CHUNKED)
def test_temporaries_are_some_copies_of_the_input(found, name):
    # In float32 one array like x is 192 MiB at 32768 positions, and a state for each position would be 24 GiB.
    # Kept are the inputs cut into chunks and, for the gradient, a state for each chunk, twice the size of x.
    if (row := found.get(name)) is None:
        pytest.skip("not among the few programs of make test")
    assert row["forward"] <= 5 * row["x"]
    assert row["gradient"] <= 9 * row["x"]
    assert row["gradient"] < row["states"] / 14


@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_temporaries_grow_as_the_sequence_does(found, what):
    # Both lengths are too long for what is kept on the chip and not in memory.
    assert 1.9 < found["long"][what] / found["short"][what] < 2.1


def test_one_position_after_the_other_the_gradient_keeps_every_state(found):
    assert found["reference"]["gradient"] > found["reference"]["states"]
