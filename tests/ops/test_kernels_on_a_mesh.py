"""The interpreted TPU kernels with loops in them, inside ``jax.shard_map`` on 4 × 8 emulated devices.

Pallas's interpreter has no types for what varies over a mesh in such a loop: so ``check_vma=False``, as its error says.
"""

from __future__ import annotations

import pytest
from emulation import emulated
from other_process import run_apart

SCRIPT = r"""
import json
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P
from paged_oracle import in_pages
from quantised_oracle import quantised_case

from capibara.ops import tropical
from capibara.ops.attention import paged_attention
from capibara.ops.linalg import quantised_matmul
from capibara.ops.linalg.specs import QuantisedSpec

mesh = Mesh(np.array(jax.devices()).reshape(4, 8), ("data", "model"))
random = np.random.default_rng(0)
out = {}


def compare(name, function, specs, result, *arrays):
    apart = jax.shard_map(
        partial(function, implementation="pallas_tpu"), mesh=mesh, in_specs=specs, out_specs=result, check_vma=False
    )
    want = function(*arrays, implementation="reference")
    out[name] = float(np.max(np.abs(jax.jit(apart)(*arrays) - want)) / np.max(np.abs(want)))


a, b = random.normal(size=(32, 20)).astype("f"), random.normal(size=(20, 256)).astype("f")
compare("tropical.matmul", tropical.matmul, (P("data"), P(None, "model")), P("data", "model"), a, b)
x, codes, scales, _, _ = quantised_case("int8", QuantisedSpec("", (8,), 256, 1024, 64))
split = (P("data"), P("model"), P("model"))
compare("quantised_matmul", partial(quantised_matmul, group=64), split, P("data", "model"), x, codes, scales)
case = in_pages([3, 9, 16, 1], kv_heads=8, heads=16, page_size=8)
arrays = (case["query"].astype("f"), *(np.nan_to_num(p).astype("f") for p in case["pages"]), case["table"])
heads = P(None, None, "model")
split = (P("data", None, "model"), heads, heads, P("data"), P("data"))
compare("paged_attention", paged_attention, split, P("data", None, "model"), *arrays, case["lengths"])
print("RESULT", json.dumps(out))
"""


@pytest.mark.slow
def test_kernels_inside_shard_map_are_the_reference() -> None:
    found = run_apart(SCRIPT, XLA_FLAGS=emulated(32, quick=True))
    assert found == pytest.approx(
        {"tropical.matmul": 0, "quantised_matmul": 0, "paged_attention": 0}, abs=1e-5
    )
