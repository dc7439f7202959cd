"""The GPU kernel of attention over pages: interpreted against the definition, and compiled for an H100."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_compiler import TARGET, ask, needs_gpu_compiler
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import arrays, check_nan_and_infinity, definition, in_pages

from capibara.ops import NoImplementationError, explain
from capibara.ops.attention import paged_attention, paged_gpu
from capibara.ops.tuning import Tuned, forced

KERNEL = partial(paged_attention, implementation="pallas_gpu")
SHAPES = {
    "grouped": {"kv_heads": 2, "heads": 4, "dim": 32, "value_dim": 16, "page_size": 3},
    "one head": {"kv_heads": 1, "heads": 8, "dim": 16, "value_dim": 64, "page_size": 16},
    "several positions": {"kv_heads": 2, "heads": 6, "dim": 16, "value_dim": 16, "page_size": 8, "new": 20},
}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"window": 5, "softcap": 0.7, "scale": 0.3},
    {"window": 40, "sinks": np.array([0.5, -2.0, 9.0, -np.inf, 0.0, 1.0, 2.0, 3.0], np.float32)},
)
LENGTHS = [70, 0, 133, 3, 1]


def check(case: dict[str, Any], got: jax.Array, tolerance: float = 1e-5, **options: Any) -> None:
    assert got.shape == (*case["query"].shape[:3], case["pages"][1].shape[3])
    for b, (keys, values) in enumerate(case["whole"]):
        want = definition(case["query"][b], keys, values, len(keys), **options)
        np.testing.assert_allclose(np.asarray(got[b], np.float64), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("shape", "options", "parts"),
    [
        pytest.param(shape, options, parts, marks=[pytest.mark.slow] * (shape != "grouped" and bool(options)))
        for shape in SHAPES
        for options in OPTIONS
        for parts in (1, 3)
    ],
)
def test_interpreted_value_is_the_definition(monkeypatch, shape, options, parts):
    monkeypatch.setattr(paged_gpu, "_LEAST_PART", 1)
    monkeypatch.setattr(paged_gpu, "_PROGRAMS", 1 if parts == 1 else 1 << 20)
    case = in_pages(LENGTHS, **SHAPES[shape], table=60)
    if "sinks" in options:
        options = options | {"sinks": options["sinks"][: SHAPES[shape]["heads"]]}
    check(case, jax.jit(partial(KERNEL, **options))(*arrays(case)), **options)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers_are_those_of_the_reference(dtype):
    case = in_pages(LENGTHS, **SHAPES["several positions"])
    got = KERNEL(*arrays(case, dtype))
    assert got.dtype == dtype
    check(case, got, 0.04)
    want = paged_attention(*arrays(case, dtype), implementation="reference")
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    new=st.integers(1, 3),
    window=st.none() | st.integers(1, 90),
    past=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_any_lengths(lengths, new, window, past, seed):
    """Also such as the table has no pages for."""
    shape = {"kv_heads": 2, "heads": 4, "dim": 16, "value_dim": 16, "page_size": 4, "new": new}
    case = in_pages(lengths, **shape, table=max(1, *(-(-n // 4) for n in lengths)), seed=seed)
    query, key, value, table, lengths = arrays(case)
    given_arrays = query, jnp.nan_to_num(key), jnp.nan_to_num(value), table, lengths + past
    got = KERNEL(*given_arrays, window=window)
    want = paged_attention(*given_arrays, window=window, implementation="reference")
    # Where a sequence has no page at all, nothing says what is seen.
    there = np.asarray(case["lengths"]) > 0
    np.testing.assert_allclose(got[there], want[there], rtol=1e-5, atol=1e-5)


def test_lengths_that_no_table_has():
    case = in_pages([5, 9], kv_heads=1, heads=2, dim=16, value_dim=16, page_size=4)
    query, key, value, table, _ = arrays(case)
    given_arrays = query, jnp.nan_to_num(key), jnp.nan_to_num(value), table, jnp.array([2**31 - 1, 2**31 - 2])
    want = paged_attention(*given_arrays, implementation="reference")
    np.testing.assert_allclose(KERNEL(*given_arrays), want, rtol=1e-5, atol=1e-5)


def test_nan_and_infinity_stay_with_their_sequence_and_head():
    check_nan_and_infinity(KERNEL, 16)


@pytest.mark.slow
def test_gradient_and_vmap():
    case = in_pages([5, 9], kv_heads=2, heads=4, dim=16, value_dim=16, page_size=4)
    query, key, value, table, lengths = arrays(case)
    key, value = jnp.nan_to_num(key), jnp.nan_to_num(value)

    def loss(implementation: str, *given_arrays: jax.Array) -> jax.Array:
        query, key, value = given_arrays
        out = paged_attention(query, key, value, table, lengths, implementation=implementation)
        return jnp.sum(jnp.sin(out))

    found = [jax.grad(partial(loss, name), (0, 1, 2))(query, key, value) for name in ("pallas_gpu", "xla")]
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    several = jax.vmap(KERNEL, (0, None, None, None, None))(
        jnp.stack([query, -query]), key, value, table, lengths
    )
    np.testing.assert_allclose(several[1], KERNEL(-query, key, value, table, lengths), rtol=1e-5, atol=1e-6)


def test_what_it_refuses_and_when_it_is_taken():
    case = in_pages([5, 9], kv_heads=2, heads=4, dim=32, value_dim=32, page_size=4)
    query, key, value, table, lengths = arrays(case)
    for change, why in (
        ((query.astype(jnp.bfloat16), key, value), "throughout"),
        ((query[..., :24], key[..., :24], value), "power of two from 16 to 256, not 24 and 32"),
        ((query[..., :8], key[..., :8], value), "power of two from 16 to 256, not 8 and 32"),
        ((jnp.tile(query, 16), jnp.tile(key, 16), value), "power of two from 16 to 256, not 512 and 32"),
    ):
        with pytest.raises(NoImplementationError, match=why):
            KERNEL(*change, table, lengths)
    codes, scales = key.astype(jnp.int8), jnp.ones(key.shape[:3])
    with pytest.raises(NoImplementationError, match="quantized pages"):
        KERNEL(query, codes, codes, table, lengths, key_scales=scales, value_scales=scales)
    given_arrays = query, key, value, table, lengths
    # It was never timed on a GPU: only where it was found to be faster.
    assert explain(paged_attention, *given_arrays, platform="cuda").chosen == "xla"
    with forced("paged_attention", Tuned("cuda", "pallas_gpu")):
        assert explain(paged_attention, *given_arrays, platform="cuda").chosen == "pallas_gpu"
        assert explain(paged_attention, *given_arrays, platform="cpu").chosen != "pallas_gpu"


COMPILED = r"""
import json, re, sys
from functools import partial
from pathlib import Path
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from capibara.ops.attention import paged_attention

device = topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=Path(sys.argv[1]).read_text(), topology="1x1x1"
).devices[0]
one = SingleDeviceSharding(device)
out = {}
for name, (batch, new, heads, kv_heads, dim, dtype) in {
    "one text": (1, 1, 16, 8, 128, "bfloat16"),
    "several": (64, 1, 32, 8, 64, "float16"),
    "prompts": (4, 128, 16, 2, 128, "bfloat16"),
    "wide": (2, 40, 4, 2, 256, "float32"),
}.items():
    def shape(*sizes, dtype=dtype):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=one)
    pool = shape(4096, 16, kv_heads, dim)
    given = shape(batch, new, heads, dim), pool, pool, shape(batch, 128, dtype="int32"), shape(batch, dtype="int32")
    for kind in ("pallas_gpu", "xla"):
        compiled = jax.jit(partial(paged_attention, implementation=kind)).lower(*given).compile()
        text = compiled.as_text()
        out[f"{name}: {kind}"] = {
            "triton": len(re.findall(r'custom_call_target="__gpu\$xla.gpu.triton"', text)),
            "loops": len(re.findall(r" while\(", text)),
            "temp": compiled.memory_analysis().temp_size_in_bytes,
            "query": batch * new * heads * dim * jnp.dtype(dtype).itemsize,
        }
print(json.dumps(out))
"""


@needs_gpu_compiler
def test_for_a_gpu_it_is_one_kernel_without_a_loop_of_the_host():
    for name, row in ask(COMPILED, str(TARGET)).items():
        kernel = name.endswith("pallas_gpu")
        assert (row["triton"], row["loops"]) == ((1, 0) if kernel else (0, 1)), name
        if kernel and "prompts" in name:
            # The queries in another order, and sums in float32: no pages.
            assert row["temp"] <= 8 * row["query"], name
