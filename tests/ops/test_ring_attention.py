"""Attention of a sequence that is sharded over 4 × 2 emulated devices: value and gradients of the plain form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from emulation import emulated
from other_process import run_apart

CASES: dict[str, dict[str, Any]] = {
    "causal": {"use_causal_mask": True},
    "all": {},
    "grouped heads, packed": {"use_causal_mask": True, "kv_heads": 2, "segments": True},
    "window": {"use_causal_mask": True, "window": 3},
    "window on both sides, capped": {"window": [5, 2], "softcap": 2.0, "scale": 0.7},
    "sinks, padding": {"use_causal_mask": True, "sinks": True, "padded": True, "kv_heads": 1},
    "wide values": {"use_causal_mask": True, "value_dim": 5, "layout": "bshd"},
    "keys in blocks": {"use_causal_mask": True, "keys": 2, "sinks": True, "segments": True},
}

RUN = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from capibara.ops.attention import flash_attention, ring
from capibara.ops.attention.ring import ring_attention

random = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
batch, heads, length, dim = 2, 4, 16, 3
out, jobs = {}, {}
for name, case in json.loads(sys.argv[1]).items():
    options = dict(case)
    kv, value_dim = options.pop("kv_heads", heads), options.pop("value_dim", dim)
    ring._KEYS = options.pop("keys", 1024)
    layout = options.get("layout", "bhsd")
    if isinstance(options.get("window"), list):
        options["window"] = tuple(options["window"])
    arrays = [draw(batch, heads, length, dim), draw(batch, kv, length, dim), draw(batch, kv, length, value_dim)]
    given = P("data", None, "context")
    if layout == "bshd":
        arrays, given = [jnp.swapaxes(x, 1, 2) for x in arrays], P("data", "context")
    specs = [given] * 3
    if options.pop("sinks", False):
        arrays.append(draw(heads)); specs.append(P())
    ids = None
    if options.pop("segments", False):
        ids = jnp.asarray(np.sort(random.integers(1, 4, size=(batch, length)), 1), jnp.int32)
    if options.pop("padded", False):
        ids = jnp.asarray(np.arange(length)[None] < np.array([[11], [16]]), jnp.int32)
    count = len(arrays)
    if ids is not None:
        arrays.append(ids); specs.append(P("data", "context"))

    def call(function, *arrays, count=count, options=options, ids=ids):
        more = {"sinks": arrays[3]} if count > 3 else {}
        if ids is not None:
            more["segment_ids"] = arrays[-1]
        return function(*arrays[:3], **more, **options)

    mapped = jax.shard_map(partial(call, partial(ring_attention, axis_name="context")), mesh=mesh,
                           in_specs=tuple(specs), out_specs=given)
    plain = partial(call, partial(flash_attention, implementation="reference"))
    def both(function, *arrays, count=count):
        loss = lambda *a: (jnp.sum(jnp.sin(function(*a))), function(*a))
        grads, value = jax.grad(loss, tuple(range(count)), has_aux=True)(*arrays)
        return [value, *grads]
    got, want = (jax.jit(partial(both, f))(*arrays) for f in (mapped, plain))
    out[name] = [float(jnp.max(jnp.abs(a - b)) / (1 + jnp.max(jnp.abs(b)))) for a, b in zip(got, want, strict=True)]
    text = jax.jit(mapped).lower(*arrays).as_text()
    out[name + "?"] = [text.count("collective_permute"), text.count("all_gather")]
print("RESULT", json.dumps(out))
"""


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Any:
    return run_apart(RUN, json.dumps(CASES), XLA_FLAGS=emulated(8, quick=True))


@pytest.mark.slow  # tests/train/test_axes.py has a ring among the quick ones
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradients_are_those_of_the_plain_form(found: Any, name: str) -> None:
    assert max(found[name]) < 2e-6
    assert len(found[name]) >= 4
    # Keys and values (and segments) go round in three steps, and nothing is gathered.
    permutes, gathers = found[name + "?"]
    assert permutes in (6, 9)
    assert gathers == 0
