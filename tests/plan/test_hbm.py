"""Donation and rematerialisation within a limit: against JAX's own memory figures, and for a described slice."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_compiler import ask, needs_libtpu

from capibara.compress.device_memory import TpuMemoryManager
from capibara.plan import HBMOptimizer
from capibara.plan.errors import DoesNotFitError, PlanError

MIB = 1 << 20


def make_step(wrap):
    block = wrap(lambda w, x: jnp.tanh(x @ w))

    def step(ws, x):
        def loss(ws):
            return jnp.mean(jax.lax.scan(lambda y, w: (block(w, y), None), x, ws)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(ws)
        return jax.tree.map(lambda w, g: w - 1e-1 * g, ws, grads), value

    return step


ARGS = (jax.ShapeDtypeStruct((4, 32, 32), jnp.float32), jax.ShapeDtypeStruct((2048, 32), jnp.float32))


def oracle(policy) -> int:
    """What JAX says of the same step, written with ``jax.checkpoint`` itself."""
    step = make_step(policy)
    m = jax.jit(step, donate_argnums=0).lower(*ARGS).compile().memory_analysis()
    assert m is not None
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


def test_chosen_within_the_limit():
    sizes = {
        "none": oracle(lambda f: f),
        "dots": oracle(
            lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        ),
        "full": oracle(jax.checkpoint),
    }
    assert sizes["full"] < sizes["dots"] <= sizes["none"]
    optimizer = HBMOptimizer()
    roomy = optimizer.choose(make_step, ARGS)
    assert (roomy.remat, roomy.bytes, roomy.donate_argnums) == ("none", sizes["none"], (0,))
    assert {one.remat: one.bytes for one in roomy.considered if one.bytes} == sizes
    offload = roomy.considered[-1]
    assert offload.remat == "offload"
    assert "nothing is freed" in offload.reason  # on a CPU
    limit = (sizes["full"] + 100) / 2**30
    tight = optimizer.choose(make_step, ARGS, memory_limit_gb=limit)
    assert (tight.remat, tight.bytes) == ("full", sizes["full"])
    assert "remat full, donated arguments: 0" in str(tight)
    with pytest.raises(DoesNotFitError, match=r"(?s)nothing fits .*remat full: .*more than"):
        optimizer.choose(make_step, ARGS, memory_limit_gb=sizes["full"] / 2 / 2**30, remat=["full"])


def test_the_chosen_step_computes_the_same_and_donates():
    rng = np.random.default_rng(0)
    ws, x = (rng.normal(size=a.shape).astype(np.float32) for a in ARGS)
    expected = jax.jit(make_step(lambda f: f))(ws, x)
    choice = HBMOptimizer().choose(make_step, (ws, x), remat=["full"])
    given = jax.device_put(np.array(ws), may_alias=False)
    found = choice.jit()(given, x)
    assert given.is_deleted()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_donated_says_why():
    choice = HBMOptimizer().choose(make_step, ARGS, donate_argnums=(0, 1), remat=["none"])
    assert choice.donate_argnums == (0,)
    assert choice.not_donated == {
        1: "1 of its arrays have no result of their shape, such as float32[2048, 32]"
    }
    assert "argument 1 is not donated" in str(choice)


@pytest.mark.parametrize(
    ("pattern", "policy", "depth"), [("sequential", "lru", 2), ("mixed", "lfu", 1), ("random", "lru", 0)]
)
def test_caches_for_a_pattern(pattern, policy, depth):
    cache = HBMOptimizer(pattern, policy).create_cache(TpuMemoryManager(), 0.001)
    assert (cache.policy, cache.prefetch_depth) == (policy, depth)
    without = TpuMemoryManager(prefetch_enabled=False)
    assert HBMOptimizer(pattern, policy).create_cache(without, 0.001).prefetch_depth == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"access_pattern": "sequence"}, "access_pattern: got 'sequence'.* Did you mean 'sequential'"),
        ({"cache_policy": "fifo"}, "cache_policy: got 'fifo', expected one of 'lru', 'lfu'"),
        ({"bandwidth_limit_gbps": 0}, "bandwidth_limit_gbps: got 0"),
        ({"bandwidth_limit_gbps": True}, "bandwidth_limit_gbps: got True"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(PlanError, match=says):
        HBMOptimizer(**options)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"remat": ["some"]}, r"remat: got \['some'\]"),
        ({"remat": []}, "remat: got"),
        ({"donate_argnums": (2,)}, "donate_argnums: got 2, expected numbers from 0 to 1"),
        ({"make_step": 3}, "make_step: got int"),
        ({"memory_limit_gb": -1}, "memory_limit_gb: got -1"),
    ],
)
def test_bad_choices(arguments, says):
    with pytest.raises(ValueError, match=says):
        HBMOptimizer().choose(**{"make_step": make_step, "args": ARGS, **arguments})


SLICE = """
import json, sys
import jax, jax.numpy as jnp
from capibara.plan import HBMOptimizer
source, folder, bandwidth = sys.argv[1:]
names = {"jax": jax, "jnp": jnp}
exec(source, names)
args = (jax.ShapeDtypeStruct((8, 512, 512), jnp.float32), jax.ShapeDtypeStruct((65536, 512), jnp.float32))
choose = HBMOptimizer(bandwidth_limit_gbps=float(bandwidth)).choose
options = dict(topology="v4:2x2x1", max_compiles=1, cache=folder)
whole = choose(names["make_step"], args, remat=["none", "offload"], **options)
sizes = {one.remat: [one.bytes, one.host_bytes, one.seconds, one.traffic] for one in whole.considered}
least = (sizes["offload"][0] + sizes["none"][0]) / 2 / 2**30
small = choose(names["make_step"], args, remat=["none", "offload"], memory_limit_gb=least, **options)
print(json.dumps([whole.remat, sizes, small.remat, whole.limit, whole.plan is not None]))
"""


@needs_libtpu
@pytest.mark.slow
def test_chosen_for_a_slice(tmp_path):
    import inspect

    source = inspect.getsource(make_step)
    roomy, sizes, small, limit, planned = ask(SLICE, source, str(tmp_path), "1")
    assert (roomy, small, planned) == ("none", "offload", True)
    assert limit == pytest.approx(30.75 * 2**30)
    product = 65536 * 512 * 4 // 4
    assert sizes["none"][1] == 0
    assert sizes["offload"][1] == 8 * product  # eight layers' products on the host
    assert sizes["offload"][0] < sizes["none"][0] - 3 * product
    for _, _, seconds, traffic in sizes.values():  # one GB/s is slower than anything else
        assert seconds == pytest.approx(traffic / 1e9)
    json.dumps(sizes)
