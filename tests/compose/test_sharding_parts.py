"""Attention and scans of composed models inside ``jax.shard_map``: how they are divided, values, compiled programs."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import pytest
from emulation import emulated
from other_process import run_apart
from tpu_compiler import environment, needs_libtpu

from capibara.compose.backends.jax_parts import LAYOUTS, Division, divide
from capibara.config.axes import AxisRules

SUPPORT = Path(__file__).parents[1] / "support"


def mesh_of(**axes: int) -> Any:
    return jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))


def attention(batch: int, heads: int, kv_heads: int, mesh: Any, rules: AxisRules | None = None) -> Any:
    query, key = (batch, 16, heads, 8), (batch, 16, kv_heads, 8)
    return divide(LAYOUTS["attention"], [query, key, key], mesh, rules or AxisRules())


@pytest.mark.parametrize(
    ("axes", "sizes", "batch", "heads", "groups"),
    [
        ({"data": 2, "model": 2}, (4, 4, 2), ("data",), ("model",), 0),
        ({"data": 2, "fsdp": 3, "tensor": 2}, (6, 4, 4), ("data", "fsdp"), ("tensor",), 0),
        ({"data": 2, "model": 4}, (4, 4, 2), ("data",), ("model",), 2),
        ({"data": 2, "model": 2}, (4, 6, 3), ("data",), ("model",), 3),
        ({"data": 2, "model": 2}, (4, 3, 3), ("data",), (), 0),
        ({"data": 2, "model": 2}, (1, 4, 1), (), ("model",), 1),
        ({"data": 1, "model": 2}, (4, 4, 4), (), ("model",), 0),
        ({"data": 2, "other": 2}, (4, 4, 4), ("data",), (), 0),
        ({"data": 2, "model": 2}, (0, 0, 0), ("data",), ("model",), 0),  # sizes that the model leaves open
    ],
)
def test_batch_and_heads_go_where_the_rules_say(
    axes: dict[str, int], sizes: tuple[int, int, int], batch: Any, heads: Any, groups: int
) -> None:
    found = attention(*sizes, mesh_of(**axes))
    assert isinstance(found, Division)
    assert dict(found.axes) == {"batch": batch, "heads": heads}
    assert found.groups == groups
    query, key = (found.spec(names) for names in LAYOUTS["attention"].inputs[:2])
    spec = jax.sharding.PartitionSpec
    assert query == spec(batch or None, None, heads or None, None)
    assert key == spec(batch or None, None, None if groups else heads or None, None)


def test_what_cannot_be_divided_is_left_to_xla_with_the_reason() -> None:
    assert "neither its batch nor its 3 heads" in attention(1, 3, 3, mesh_of(data=2, model=2))
    assert "its sequence is sharded over sequence" in attention(4, 4, 4, mesh_of(data=2, sequence=2))
    own = AxisRules(activations={**AxisRules().activations, "head_dim": ("columns",)})
    assert "its head_dim is sharded over columns" in attention(4, 4, 4, mesh_of(data=2, columns=2), own)
    # An axis of one device splits nothing.
    assert isinstance(attention(4, 4, 4, mesh_of(data=2, sequence=1)), Division)


COMMON = """
import json, sys, types, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import sharded_models
from closeness import far
from capibara import compose as ml
from capibara.core import ModularCapibaraModel
from capibara.ops import explain
from small_models import FLOAT64, quick_jit, small_config, small_params, small_tokens
"""

DECODERS = """
rows, columns = json.loads(sys.argv[1])
mesh = Mesh(np.array(jax.devices()[: rows * columns]).reshape(rows, columns), ("data", "model"))
h = 2 * columns
out = {}

def study(name, batch=rows, **changes):
    width = {"model__embed_dim": 2 * h, "model__num_heads": h, "model__ssm__head_dim": 4, "model__head_dim": 4}
    config = small_config("attention", **{**width, **changes})
    one, many = ModularCapibaraModel(config), ModularCapibaraModel(config, mesh=mesh)
    params, state = small_params(one)
    tokens = small_tokens(batch, 7)
    def step(model):
        def loss(p, s):
            return model.loss(p, {"tokens": tokens}, state=s, train=True, key=jax.random.key(1))
        return jax.value_and_grad(loss, has_aux=True)
    with many.backend.scope():
        text = str(jax.make_jaxpr(step(many))(params, state))
        laid = jax.device_put(params, many.compiled.propose_shardings()["params"])
        expected = quick_jit(step(one))(params, state)
        # The state is given away, as a training step does.
        found = quick_jit(step(many), donate_argnums=1)(laid, jax.tree.map(jnp.array, state))
    out[name] = {"far": far(found, expected), "parts": many.compiled._program.parts, "inside": "shard_map" in text}

every = ["attention", "ssm", "vq"]
study("mixed", model__pattern=every, model__num_layers=6, model__num_kv_heads=columns, model__remat="full",
      model__scan_layers="scan", model__attention_sinks=True)
if columns == 2:
    study("one key head", model__num_kv_heads=1, model__remat="dots", model__scan_layers="scan",
          model__attention_sinks=True)
    study("three key heads", model__num_heads=6, model__num_kv_heads=3, model__num_layers=1)
    study("heads whole", model__num_heads=3, model__num_kv_heads=3, model__num_layers=1, model__remat="full")
    study("left to XLA", batch=1, model__num_heads=3, model__num_kv_heads=3, model__num_layers=1)
    study("float64", model__num_kv_heads=2, model__num_layers=1, **FLOAT64)
else:
    study("fewer key heads", model__num_kv_heads=columns // 2, model__num_layers=1)
print("RESULT" + json.dumps(out))
"""

AROUND = """
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
one = ml.compile(sharded_models.block(), ml.JaxBackend())
many = ml.compile(sharded_models.block(), ml.JaxBackend(device_mesh=mesh))
rng = np.random.default_rng(0)
x = rng.normal(size=(4, 8, 32)).astype("float32")
places = np.arange(8, dtype="int32")
params = small_params(types.SimpleNamespace(compiled=one))[0]
laid = jax.device_put(params, many.propose_shardings()["params"])
y = quick_jit(one.apply)(params, {"x": x, "positions": places})["y"]
def forward(p, x):
    return many.apply(p, {"x": x, "positions": places})["y"]

out, maps = {}, {}
def study(name, run, *arrays):
    maps[name] = str(jax.make_jaxpr(run)(*arrays)).count("shard_map")
    out[name] = far(quick_jit(run)(*arrays), y)

study("jit", forward, laid, x)
specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
study("in shard_map", jax.shard_map(forward, mesh=mesh, **specs), params, x)
study("in one axis", jax.shard_map(forward, mesh=mesh, axis_names={"data"}, **specs), params, x)
with jax.set_mesh(mesh):
    study("set_mesh", forward, laid, x)
with jax.set_mesh(Mesh(np.array(jax.devices()), ("all",))):
    study("another mesh", forward, laid, x)
study("vmap", lambda p, x: jax.vmap(forward, (None, 0))(p, jnp.stack([x, 2 * x]))[0], laid, x)
two = ml.JaxBackend(device_mesh=Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("data", "model")))
few = ml.compile(sharded_models.block(), two)
study("two of four", lambda p, x: few.apply(p, {"x": x, "positions": places})["y"], params, x)
first = ml.compile(sharded_models.block(), ml.JaxBackend(device_mesh=(1, 1)))
study("one of four", lambda p, x: first.apply(p, {"x": x, "positions": places})["y"], params, x)

# Axes that are explicit for the caller are automatic inside.
stated = ml.compile(sharded_models.block(), ml.JaxBackend(device_mesh=jax.make_mesh((2, 2), ("data", "model"))))
over = jax.device_put(params, stated.propose_shardings()["params"])
out["explicit"] = far(stated.evaluate(over, {"x": x, "positions": places})["y"], y)

def loss(p):
    return (forward(p, x) ** 2).sum()
wanted = jax.grad(lambda p: (one.apply(p, {"x": x, "positions": places})["y"] ** 2).sum())
out["gradients again"] = far(quick_jit(jax.grad(jax.checkpoint(loss)))(laid), quick_jit(wanted)(params))

shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), params)
given = {"x": jax.ShapeDtypeStruct(x.shape, x.dtype), "positions": jax.ShapeDtypeStruct((8,), "int32")}
abstract = jax.sharding.AbstractMesh((2, 2), ("data", "model"))
lowered = ml.compile(sharded_models.block(), ml.JaxBackend(device_mesh=abstract, platform="tpu")).lower(batch=4)
print("RESULT" + json.dumps({
    "far": out, "maps": maps, "chosen": explain(many.apply, shapes, given, platform="tpu").chosen,
    "summary": many.summary(verbose=False), "alone": first.summary(verbose=False),
    "abstract": lowered.as_text().count("tpu_custom_call"),
}))
"""

TPU = """
from jax.experimental import topologies
topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
mesh = Mesh(np.array(topology.devices).reshape(2, 2), ("data", "model"))
out = {}
for kv_heads, gradients in ((1, True), (4, False), (4, True)):
    model = ModularCapibaraModel(small_config("attention", model__embed_dim=64, model__num_heads=8,
        model__num_kv_heads=kv_heads, model__head_dim=24, model__remat="full", model__scan_layers="scan"), mesh=mesh)
    program = model.compiled.lower(gradients=gradients, batch=16, sequence=40).compile().as_text()
    out[f"{kv_heads} {gradients}"] = {"kernels": program.count('custom_call_target="tpu_custom_call"'),
        "collectives": sharded_models.collectives(program, (2, 2))}
decoder = model.decoder.lower(batch=16, sequence=1, cache=328).compile().as_text()
out["decoder"] = {"collectives": sharded_models.collectives(decoder, (2, 2))}
print("RESULT" + json.dumps(out))
"""


def ran(code: str, *args: str, **env: str) -> dict[str, Any]:
    return run_apart(COMMON + code, *args, **env)


@cache
def decoders(rows: int, columns: int) -> dict[str, Any]:
    return ran(DECODERS, json.dumps([rows, columns]), XLA_FLAGS=emulated(rows * columns))


# Sums in float32, which devices add in another order.
CLOSE = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (4, 8)])
def test_a_decoder_on_parts_learns_what_it_does_on_one_device(mesh: tuple[int, int]) -> None:
    found = decoders(*mesh)
    for name, each in found.items():
        assert each["far"] < (1e-13 if name == "float64" else CLOSE), (name, each)
        assert each["inside"] == (name != "left to XLA"), name
    assert found["mixed"]["parts"] == [
        "blocks.layer_0.attention.attend on parts: batch over data, heads over model",
        "blocks.layer_1.ssm.scan on parts: batch over data, heads over model",
    ]


@cache
def around() -> dict[str, Any]:
    return ran(AROUND, XLA_FLAGS=emulated(4))


@pytest.mark.slow
def test_what_surrounds_a_call() -> None:
    found = around()
    assert max(found["far"].values()) < CLOSE, found["far"]
    # One each of its own; inside of another one, only that, and where another mesh is set none.
    own = {"jit": 1, "set_mesh": 1, "vmap": 1, "two of four": 1}
    none = {"another mesh": 0, "one of four": 0}
    assert found["maps"] == {**own, **none, "in shard_map": 1, "in one axis": 1}


def test_what_runs_on_parts_is_said() -> None:
    found = around()
    assert found["chosen"] == "xla, pallas_tpu"  # of rotary and of attention
    assert (
        "over the mesh (data 2, model 2):\n  attend.attend on parts: batch over data, heads"
        in found["summary"]
    )
    assert "over the mesh" not in found["alone"]


def test_a_mesh_without_devices_is_enough_for_lowering() -> None:
    assert around()["abstract"] == 1


@cache
def on_v4() -> dict[str, Any]:
    return ran(TPU, **environment())


PROGRAMS = ["4 False", "4 True", "1 True"]


@pytest.mark.thin(3)
@needs_libtpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_v4_runs_the_kernels_on_parts(name: str) -> None:
    # Training runs the forward kernel, again in the backward pass (rematerialised), and one for the three gradients.
    assert on_v4()[name]["kernels"] == (3 if "True" in name else 1)


@needs_libtpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_v4_gathers_neither_queries_nor_keys(name: str) -> None:
    rows = on_v4()[name]["collectives"]
    gathered = [
        tuple(int(n) for n in shape.split(","))
        for kind, _, t in rows
        if kind in ("all-gather", "all-to-all")
        for shape in re.findall(r"\w+\[([\d,]+)\]", t)
    ]
    # Weights: of heads with 24 features, or of the four heads that are a device's part.
    assert any({24, 96} & set(shape) for shape in gathered), gathered
    # Queries and keys have 40 positions, 128 with padding, perhaps made one dimension with the examples. What has
    # them and is gathered is the residual stream of 64 features, where the embedding was looked up.
    positions = {40, 128, 8 * 40, 16 * 40}
    assert {shape[-1] for shape in gathered if positions & set(shape)} <= {64}, gathered


@needs_libtpu
def test_v4_splits_cached_attention_without_gathering_the_cache() -> None:
    rows = on_v4()["decoder"]["collectives"]
    assert {kind for kind, _, _ in rows} >= {"all-gather", "all-reduce"}
    assert not any("328" in t for _, _, t in rows), rows
