"""Memory of the host: what the platform has, moving arrays and state, and what blocks keep for their derivative."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_compiler import ask, needs_libtpu

from capibara.memory import (
    DeviceCache,
    MemorySettingError,
    OffloadError,
    host_memory_kind,
    offload_state,
    offload_support,
    rematerialise,
    to_device,
    to_host,
)
from capibara.memory.rematerialisation import REMAT


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree)}


def device(platform: str, *memories: str) -> SimpleNamespace:
    return SimpleNamespace(
        platform=platform,
        device_kind=f"{platform} 1",
        addressable_memories=lambda: [SimpleNamespace(kind=kind) for kind in memories],
    )


@pytest.mark.parametrize(
    ("platform", "memories", "kind", "frees"),
    [
        ("tpu", ("device", "pinned_host", "unpinned_host"), "pinned_host", True),
        ("gpu", ("device", "pinned_host"), "pinned_host", True),
        ("cpu", ("device", "pinned_host", "unpinned_host"), "pinned_host", False),
        ("cpu", ("unpinned_host",), "unpinned_host", False),
        ("npu", ("device",), None, False),
    ],
)
def test_support(platform, memories, kind, frees):
    support = offload_support(device(platform, *memories))
    assert (support.kind, support.frees_memory) == (kind, frees)
    assert support.reason
    if kind is None:
        with pytest.raises(OffloadError, match="npu 1 reaches no memory of the host, only: device"):
            host_memory_kind(device(platform, *memories))


def test_a_cache_in_host_memory_is_refused_where_there_is_none(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device("npu", "device")])
    with pytest.raises(OffloadError, match="Keep the arrays on the device"):
        DeviceCache(1000, use_hbm=False)


def test_there_and_back():
    tree = {"m": jnp.arange(6.0).reshape(2, 3), "v": [jnp.ones(3, jnp.bfloat16)]}
    away = to_host(tree)
    assert kinds(away) == {host_memory_kind()}
    back = to_device(away)
    assert kinds(back) == {jax.devices()[0].default_memory().kind}
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    described = jax.ShapeDtypeStruct((2, 3), jnp.float32, sharding=tree["m"].sharding)
    assert kinds(to_host(described)) == {host_memory_kind()}


def momentum(state, params, x):
    grads = jax.grad(lambda p: jnp.sum(jnp.tanh(x @ p) ** 2))(params)
    state = jax.tree.map(lambda m, g: 0.9 * m + g, state, {"m": grads})
    return state, params - 0.1 * state["m"]


def test_a_step_with_its_state_on_the_host_is_the_same_step():
    params = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32))
    state = {"m": jnp.zeros((8, 8))}
    offloaded = jax.jit(offload_state(momentum, state), donate_argnums=0)
    plain = jax.jit(momentum)
    here, there = (state, params), (to_host(state), params)
    for _ in range(3):
        here, there = plain(*here, x), offloaded(*there, x)
        assert kinds(there[0]) == {host_memory_kind()}
    for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(there), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(MemorySettingError, match="without a sharding"):
        offload_state(momentum, {"m": np.zeros(3)})


@pytest.mark.parametrize("how", REMAT)
def test_rematerialisation_changes_no_value(how):
    def loss(w, x, wrap):
        block = wrap(lambda w, x: jnp.sin(x @ w))
        for _ in range(3):
            x = block(w, x)
        return jnp.sum(x)

    rng = np.random.default_rng(2)
    w, x = (rng.normal(size=(6, 6)).astype(np.float32) for _ in range(2))
    expected = jax.jit(jax.value_and_grad(lambda w: loss(w, x, lambda f: f)))(w)
    found = jax.jit(jax.value_and_grad(lambda w: loss(w, x, lambda f: rematerialise(f, how))))(w)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    kept = len(jax.tree.leaves(jax.vjp(rematerialise(lambda w: jnp.sin(jnp.sin(w) @ w), how), w)[1]))
    without = len(jax.tree.leaves(jax.vjp(lambda w: jnp.sin(jnp.sin(w) @ w), w)[1]))
    assert (kept < without) == (how != "none")
    assert how != "full" or kept == 1  # its argument


def test_unknown_rematerialisation():
    with pytest.raises(
        MemorySettingError, match="how: got 'some', expected one of 'none', 'dots', 'full', 'offload'"
    ):
        rematerialise(jnp.sin, "some")


COMPILED = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.memory import offload_state, offload_support, rematerialise, to_host
topology = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
mesh = Mesh(np.array(topology.devices).reshape(4), ("data",))
ws = jax.ShapeDtypeStruct((8, 512, 512), jnp.float32, sharding=NamedSharding(mesh, P()))
x = jax.ShapeDtypeStruct((65536, 512), jnp.float32, sharding=NamedSharding(mesh, P("data")))

def step(how):
    block = rematerialise(lambda w, x: jnp.tanh(x @ w), how)
    def loss(ws, x):
        return jnp.mean(jax.lax.scan(lambda y, w: (block(w, y), None), x, ws)[0] ** 2)
    return jax.grad(loss)

def state_step(state, x):
    return {"m": state["m"] * 0.9 + jnp.sum(x)}, jnp.sum(x)

out = {"frees": offload_support(topology.devices[0]).frees_memory}
for how in ("none", "offload"):
    m = jax.jit(step(how)).lower(ws, x).compile().memory_analysis()
    out[how] = [m.temp_size_in_bytes, m.host_temp_size_in_bytes]
moved = jax.jit(offload_state(state_step, {"m": ws}), donate_argnums=0)
m = moved.lower(to_host({"m": ws}), x).compile().memory_analysis()
out["state"] = [m.argument_size_in_bytes, m.host_argument_size_in_bytes, m.host_alias_size_in_bytes]
print(json.dumps(out))
"""


@needs_libtpu
@pytest.mark.slow
def test_offloading_in_the_compiled_program_for_a_tpu():
    out = ask(COMPILED)
    assert out["frees"]
    product = 65536 // 4 * 512 * 4  # of a block, float32, on each of four chips
    assert out["none"][1] == 0
    assert out["offload"][1] == 8 * product  # eight layers' products, on the host
    assert out["offload"][0] < out["none"][0] - 3 * product
    whole = 8 * 512 * 512 * 4
    assert out["state"] == [product, whole, whole]  # only x is on the device; the state is updated in place
