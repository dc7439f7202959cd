"""The compiled attention over pages, against the definition."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instruction_sets import instruction_sets
from other_process import run_apart
from paged_oracle import definition, in_pages

from capibara.measure import count_flops
from capibara.native import build
from capibara.ops import NoImplementationError, explain
from capibara.ops.attention import paged_attention

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None, reason="no C++ compiler: there is no native library to test"
)
HERE = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])


def attended(case: dict[str, Any], dtype: Any = jnp.float32, **options: Any) -> np.ndarray:
    query, key, value = (jnp.asarray(x, dtype) for x in (case["query"], *case["pages"]))
    table, lengths = jnp.asarray(case["table"]), jnp.asarray(case["lengths"])
    found = paged_attention(query, key, value, table, lengths, implementation="native", **options)
    return np.asarray(found)


def check(case: dict[str, Any], **options: Any) -> None:
    got = attended(case, **options)
    for b, length in enumerate(case["lengths"]):
        keys, values = case["whole"][b]
        want = definition(case["query"][b], keys, values, length, **options)
        np.testing.assert_allclose(got[b], want, rtol=2e-5, atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.sampled_from([(1, 1), (1, 8), (2, 4), (3, 3)]),
    st.sampled_from([1, 3, 16, 40]),
    st.sampled_from([1, 7, 16, 40]),
    st.sampled_from([1, 2, 37, 140]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([{}, {"window": 1}, {"window": 50}, {"softcap": 0.7}, {"scale": 0.4, "window": 129}]),
    st.booleans(),
)
def test_values_are_the_definition(lengths, heads, dim, value_dim, new, page_size, options, sunk):
    if sunk:
        options = options | {"sinks": np.array([0.5, -2.0, 9.0, -np.inf, 0, 1, 2, 3], np.float32)[: heads[1]]}
    sizes = {"dim": dim, "value_dim": value_dim, "new": new, "page_size": page_size}
    check(in_pages(lengths, kv_heads=heads[0], heads=heads[1], **sizes), **options)


@pytest.mark.parametrize("new", [1, 4])  # packed or, where rows are few, read where they lie
def test_half_as_many_bits(new: int) -> None:
    case = in_pages([200, 3], kv_heads=2, heads=6, dim=32, value_dim=32, page_size=16, new=new)
    for b, length in enumerate(case["lengths"]):
        keys, values = case["whole"][b]
        want = definition(case["query"][b], keys, values, length)
        np.testing.assert_allclose(attended(case, jnp.bfloat16)[b].astype(np.float32), want, atol=0.03)


@pytest.mark.parametrize("new", [1, 3, 9])
def test_what_shares_a_call_changes_no_bit(new: int) -> None:
    case = in_pages([150, 9, 300], kv_heads=2, heads=4, dim=16, value_dim=16, page_size=16, new=new)
    together = attended(case)
    for b in range(3):
        alone = case | {key: case[key][b : b + 1] for key in ("query", "table", "lengths")}
        np.testing.assert_array_equal(attended(alone)[0], together[b])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(bad):
    case = in_pages([20], kv_heads=1, heads=2, dim=8, value_dim=8, page_size=4, new=20)
    case["pages"][0][case["table"][0, 2], 1] = bad  # position 9
    got = attended(case)[0]
    assert np.isfinite(got[:9]).all()
    assert not np.isfinite(got[9:]).any()


def test_vmap_and_gradients():
    case = in_pages([9, 5], kv_heads=1, heads=2, dim=8, value_dim=8, page_size=4, new=2)
    query, key, value = (jnp.nan_to_num(jnp.asarray(x, jnp.float32)) for x in (case["query"], *case["pages"]))
    rest = jnp.asarray(case["table"]), jnp.asarray(case["lengths"])

    def run(query: jax.Array, implementation: str) -> jax.Array:
        return paged_attention(query, key, value, *rest, implementation=implementation)

    several = jnp.stack([query, -query])
    got = jax.vmap(lambda q: run(q, "native"))(several)
    np.testing.assert_allclose(got, jnp.stack([run(q, "reference") for q in several]), rtol=1e-5, atol=1e-6)
    grads = [jax.grad(lambda q, i=i: jnp.sum(run(q, i) ** 2))(query) for i in ("native", "reference")]
    np.testing.assert_allclose(*grads, rtol=1e-4, atol=1e-5)


def test_cpus_choose_it():
    case = in_pages([9], kv_heads=1, heads=2, dim=8, value_dim=8, page_size=4)
    arrays = [jnp.asarray(x, jnp.float32) for x in (case["query"], *case["pages"])]
    rest = jnp.asarray(case["table"]), jnp.asarray(case["lengths"])
    assert explain(paged_attention, *arrays, *rest, platform="cpu").chosen == "native"
    assert explain(paged_attention, *arrays, *rest, platform="cuda").chosen == "xla"
    with pytest.raises(NoImplementationError, match="takes float32 and bfloat16, not float16"):
        query, key, value = (x.astype("float16") for x in arrays)
        paged_attention(query, key, value, *rest, implementation="native")
    found = count_flops(lambda *a: paged_attention(*a, implementation="native"), *arrays, *rest)
    assert found.total >= 2 * 2 * case["table"].shape[1] * 4 * (8 + 8)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", instruction_sets())
def test_other_instruction_sets(name: str) -> None:
    program = """
import json
import numpy as np
from capibara import native
from paged_oracle import in_pages
from test_native_paged import check
for sizes in ((1, 8, 64, 64, 16, 1), (2, 4, 5, 19, 3, 37)):
    names = ("kv_heads", "heads", "dim", "value_dim", "page_size", "new")
    for options in ({}, {"window": 30, "softcap": 2.0}, {"sinks": np.linspace(-2, 5, sizes[1], dtype=np.float32)}):
        check(in_pages([300, 1, 129, 0], **dict(zip(names, sizes))), **options)
print("RESULT", json.dumps(native.isa()))
"""
    assert run_apart(program, CAPIBARA_NATIVE_ISA=name, PYTHONPATH=HERE) == name
