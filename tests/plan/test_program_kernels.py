"""What the attention kernels state of themselves, against counting blocks one by one; and that reading needs no JAX."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from capibara.ops.attention import pallas_tpu_kernels as kernels
from capibara.ops.attention.pallas_plan import Plan, Range

SIDE = st.one_of(st.none(), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 6), SIDE, SIDE, st.integers(1, 6))
def test_live_pairs_are_those_that_the_kernel_works_on(
    outer: int, inner: int, total: int, back: int | None, ahead: int | None, blocks: int
) -> None:
    reach = Range(outer, inner, total, back, ahead)
    live = sum(bool(reach.live(i, step)) for i in range(blocks) for step in range(reach.steps))
    assert reach.pairs(blocks) == live


@pytest.mark.parametrize(("right", "pairs"), [(None, 4), (0, 3)])
def test_each_kernel_states_its_products(
    monkeypatch: pytest.MonkeyPatch, right: int | None, pairs: int
) -> None:
    """Two blocks of 128 queries on two of 128 keys, 2 · 3 heads of 32, values of 16; a causal mask hides one pair."""
    stated: list[pl.CostEstimate] = []
    call = pl.pallas_call

    def remember(*args, cost_estimate, **options):
        stated.append(cost_estimate)
        return call(*args, cost_estimate=cost_estimate, **options)

    monkeypatch.setattr(pl, "pallas_call", remember)
    plan = Plan(128, 128, 256, None, right, 0.1, None, None, "float32", interpret=True)
    query = jax.ShapeDtypeStruct((1, 2, 3, 256, 32), jnp.float32)
    key = jax.ShapeDtypeStruct((1, 2, 256, 32), jnp.float32)
    value = jax.ShapeDtypeStruct((1, 2, 256, 16), jnp.float32)
    out = jax.ShapeDtypeStruct((1, 2, 3, 256, 16), jnp.float32)
    row = jax.ShapeDtypeStruct((1, 2, 3, 1, 256), jnp.float32)
    jax.eval_shape(lambda *a: kernels.output(plan, *a), query, key, value)
    jax.eval_shape(lambda *a: kernels.query_gradient(plan, *a), query, key, value, out, row, row)
    jax.eval_shape(lambda *a: kernels.key_value_gradients(plan, *a), query, key, value, out, row, row)
    scores = 6 * pairs * 128 * 128
    assert [cost.flops for cost in stated] == [2 * scores * n for n in (32 + 16, 32 + 16 + 32, 2 * (32 + 16))]
    assert [cost.transcendentals for cost in stated] == [scores] * 3
    # Every array once at least; keys and values, or queries, once more for each block that sees them.
    assert stated[0].bytes_accessed == 6 * (256 * (4 * 32 + 4 * 16 + 4) + pairs * 128 * 4 * (32 + 16))


def test_reading_and_timing_import_no_jax() -> None:
    code = "import sys, capibara.plan.program, capibara.plan.time; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
