"""Arrays on real meshes: eight devices that XLA makes of one CPU, in a process of their own."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from emulation import emulated
from other_process import run_apart

from capibara.errors import ConfigError
from capibara.plan.errors import PlanError
from capibara.plan.sharding import create_mesh_sharding, create_training_mesh, optimize_sharding_strategy

SUPPORT = Path(__file__).parents[1] / "support"

PROGRAM = """
import json, re, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec as P
from small_models import small_config, small_tokens
from capibara import compose as ml
from capibara.core import ModularCapibaraModel
from capibara.plan.sharding import create_mesh_sharding, create_training_mesh, optimize_sharding_strategy

out = {}
def far(a, b):
    return float(np.max(np.abs(np.asarray(a) - np.asarray(b))))
def message(run):
    try:
        run()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]

ids = list(range(8))
both = create_mesh_sharding((2, 4), ids, "throughput")
small = create_mesh_sharding((2, 4), ids[::-1], "memory")
out["mesh"] = [dict(both.mesh.shape), sorted({t.name for t in both.mesh.axis_types}), str(both)]
out["chosen"] = sorted(d.id for d in create_mesh_sharding((2, 2), [1, 3, 5, 7]).mesh.devices.flat)
out["first"] = sorted(d.id for d in create_mesh_sharding((2,)).mesh.devices.flat)

# A model of the package: the same logits, and each device holds what the strategy says.
big = {"model.num_heads": 4, "model.num_kv_heads": 4, "model.head_dim": 2, "model.vocab_size": 16,
       "model.mlp_dim": 16, "model.embed_dim": 8, "model.pattern": ["attention", "vq"], "model.num_layers": 2}
model = ModularCapibaraModel(small_config(**big))
tokens = np.asarray(small_tokens(8, 6)) % 16
expected = model(tokens)
rows = {}
for name, sharding, limit in (("throughput", both, 1.0), ("memory", small, 1.0)):
    strategy = sharding.optimize(model, (8, 6), limit)
    sharded = sharding.shard_model(model, strategy)
    logits = sharded(sharding.shard_batch(tokens, strategy))
    held = {}
    for path, x in jax.tree_util.tree_leaves_with_path(sharded.params):
        for shard in x.addressable_shards:
            held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    specs = jax.tree.map(lambda x, s: x.sharding.spec == s, sharded.params, strategy.specs)
    rows[name] = {"far": far(logits, expected), "host": far(sharded(tokens), expected) if name == "memory" else 0.0,
        "held": sorted(set(held.values())), "planned": strategy.memory.parameters, "devices": len(held),
        "specs": all(jax.tree.leaves(specs)), "type": type(sharded).__name__,
        "on": len(logits.sharding.device_set),
        "untouched": len(model.params["embedding"]["weight"].sharding.device_set),
        "batch": list(strategy.batch_axes), "state": len(jax.tree.leaves(sharded.state))}
out["model"] = rows
found = both.shard_model(model, input_shape=(8, 6))
out["without strategy"] = far(found.params["embedding"]["weight"], model.params["embedding"]["weight"])

# Parameters alone, and gradients that lie as they do.
rng = np.random.default_rng(0)
params = {"up": rng.normal(size=(32, 64)).astype("float32"), "down": rng.normal(size=(64, 32)).astype("float32")}
x = rng.normal(size=(8, 32)).astype("float32")
out["pair's memory"] = [mesh.optimize(params, (8, 32)).memory.parameters for mesh in (both, small)]
strategy = small.optimize(params, (8, 32))
placed = small.shard_model(params, strategy)
def loss(p, x):
    return jnp.sum(jnp.square(jax.nn.relu(x @ p["up"]) @ p["down"]))
step = jax.jit(jax.grad(loss), out_shardings=strategy.shardings(small.mesh))
one = jax.jit(jax.grad(loss))(params, x)
many = step(placed, small.shard_batch(x, strategy))
scale = max(float(np.max(np.abs(v))) for v in one.values())
out["gradients"] = max(far(many[k], one[k]) / scale for k in one)
out["numpy stays"] = type(params["up"]).__name__

# State of an optimiser lies as the parameters do.
from typing import NamedTuple
class State(NamedTuple):
    count: object
    mu: object
    nu: object
state = small.shard_state((State(np.zeros((), "int32"), params, params), {"rate": np.float32(0.1)}), strategy)
out["moments"] = [all(state[0].mu[k].sharding == placed[k].sharding == state[0].nu[k].sharding for k in params),
    str(state[0].count.sharding.spec), len(state[1]["rate"].sharding.device_set), type(state[0]).__name__]

# What the partitioner does is what was counted: one sum of [tokens, embed] for a pair that is cut.
line = create_mesh_sharding((8,), ids, "latency", axis_names=("model",))
pair = line.optimize(params, (1, 32), link_bandwidth=1e12, chip="tpu-v4")
forced = optimize_sharding_strategy(
    {"up": (4096, 16384), "down": (16384, 4096)}, (1, 4096), (8,), axis_names=("model",), optimization_target="latency")
laid = {k: jax.device_put(v, jax.sharding.NamedSharding(line.mesh, forced[k])) for k, v in params.items()}
program = jax.jit(lambda p, x: jax.nn.relu(x @ p["up"]) @ p["down"]).lower(laid, x).compile().as_text()
out["pair"] = {"specs": [str(forced[k]) for k in ("up", "down")],
    "sums": len(re.findall(r"= f32\\[8,32\\]\\S* all-reduce(?:-start)?\\(", program)),
    "others": len(re.findall(r"(?:all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\\(", program))}

# A compiled model with its parameters.
mlp = ml.Model()
mlp += ml.models.Linear(16, axes=("embed", "mlp"))(input="x", output="y")
mlp.expose("y")
compiled = ml.compile(mlp, ml.JaxBackend(), shapes={"x": ("batch", 32)})
p = compiled.randomize_params(0)
pair_strategy = both.optimize(compiled, (8, 32))
again, moved = both.shard_model((compiled, p), pair_strategy)
y = again.evaluate(moved, {"x": both.shard_batch(x, pair_strategy)})["y"]
out["compiled"] = [again is compiled, far(y, compiled.evaluate(p, {"x": x})["y"]), len(y.sharding.device_set)]

class Holder:
    def __init__(self, params):
        self.params = params
held = Holder(params)
moved = small.shard_model(held, strategy)
out["holder"] = [type(moved).__name__, len(moved.params["up"].sharding.device_set), type(held.params["up"]).__name__]

structs = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), params)
out["errors"] = {
    "alone": message(lambda: both.shard_model(compiled, pair_strategy)),
    "other": message(lambda: small.shard_model({"up": params["up"]}, strategy)),
    "more": message(lambda: small.shard_model({**params, "extra": x}, strategy)),
    "shape": message(lambda: small.shard_model({**params, "up": x}, strategy)),
    "mesh": message(lambda: create_mesh_sharding((4, 2)).shard_model(params, strategy)),
    "batch": message(lambda: small.shard_batch({"x": x[:3]}, strategy)),
    "structs": message(lambda: small.shard_model(structs, strategy)),
    "strategy": message(lambda: small.shard_model(params, "auto")),
    "neither": message(lambda: small.shard_model(params)),
    "unknown": message(lambda: create_mesh_sharding((2, 2), [0, 1, 2, 99])),
    "doubled": message(lambda: create_mesh_sharding((2, 2), [0, 1, 2, 2])),
    "number": message(lambda: create_mesh_sharding((2, 2), [0, 1, 2])),
    "few": message(lambda: create_mesh_sharding((4, 8))),
}
t = create_training_mesh(8, 2, 4, 1)
half = create_training_mesh(4, model_parallel_size=2)
more = create_training_mesh(8, context_parallel_size=2, fsdp_parallel_size=2, expert_parallel_size=1)
assert list(more.shape.items()) == [
    ("data", 2), ("fsdp", 2), ("expert", 1), ("context", 2), ("model", 1), ("pipeline", 1)
]
out["training"] = [dict(t.shape), sorted({a.name for a in t.axis_types}), dict(half.shape)]
print("RESULT" + json.dumps(out))
"""


@cache
def found() -> dict[str, Any]:
    return run_apart(PROGRAM, XLA_FLAGS=emulated(8))


@pytest.mark.slow
def test_a_mesh_of_chosen_devices() -> None:
    out = found()
    assert out["mesh"][:2] == [{"data": 2, "model": 4}, ["Auto"]]
    assert "2 data × 4 model on 8 devices" in out["mesh"][2]
    assert out["chosen"] == [1, 3, 5, 7]
    assert out["first"] == [0, 1]


@pytest.mark.thin(2)
@pytest.mark.parametrize("target", ["throughput", "memory"])
def test_a_model_on_a_mesh_gives_what_it_gave(target: str) -> None:
    row = found()["model"][target]
    assert row["far"] < 1e-5
    assert row["host"] < 1e-5
    assert row["type"] == "ModularCapibaraModel"
    assert row["specs"]
    assert row["on"] == row["devices"] == 8
    assert row["untouched"] == 1
    assert row["state"] > 0
    # Every device holds the bytes that the strategy says.
    assert row["held"] == [row["planned"]]


def test_memory_is_less_where_that_is_the_target() -> None:
    rows = found()["model"]
    assert rows["memory"]["planned"] <= rows["throughput"]["planned"]
    assert found()["pair's memory"][1] < found()["pair's memory"][0]
    assert found()["without strategy"] == 0


def test_parameters_alone_and_their_gradients() -> None:
    assert found()["gradients"] < 1e-5
    assert found()["numpy stays"] == "ndarray"
    assert found()["holder"] == ["Holder", 8, "ndarray"]
    assert found()["compiled"] == [True, pytest.approx(0, abs=1e-5), 8]


def test_moments_lie_as_their_parameters() -> None:
    assert found()["moments"] == [True, str(jax.sharding.PartitionSpec()), 8, "State"]


def test_the_partitioner_makes_the_sums_that_were_counted() -> None:
    pair = found()["pair"]
    assert pair["specs"] == [
        str(jax.sharding.PartitionSpec(None, "model")),
        str(jax.sharding.PartitionSpec("model", None)),
    ]
    assert pair["sums"] == 1
    assert pair["others"] == 0


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("alone", "(compiled, params)"),
        ("other", "has the array 'down' (64, 32), which the model does not have"),
        ("more", "'extra'"),
        ("shape", "'up': the shape is (8, 32), but the strategy was made for (32, 64)"),
        ("mesh", "mesh data 4 × model 2"),
        ("batch", "batch.x has the shape (3, 32)"),
        ("structs", "expected an array"),
        ("strategy", "expected a ShardingStrategy"),
        ("neither", "input_shape="),
        ("unknown", "there is no device 99; jax.devices() has 8 (0 to 7, cpu)"),
        ("doubled", "names 2 more than once"),
        ("number", "has 3 ids, but a mesh of 2x2 has 4 places"),
        ("few", "--xla_force_host_platform_device_count=32"),
    ],
)
def test_clear_refusals(case: str, text: str) -> None:
    name, said = found()["errors"][case]
    assert name == ("ConfigError" if case == "few" else "PlanError")
    assert text in said


def test_training_meshes() -> None:
    out = found()["training"]
    assert out == [
        {"data": 2, "model": 4, "pipeline": 1},
        ["Auto"],
        {"data": 2, "model": 2, "pipeline": 1},
    ]


def test_sizes_that_do_not_multiply() -> None:
    with pytest.raises(PlanError, match="model_parallel_size=4 would do") as caught:
        create_training_mesh(32, 8, 3, 1)
    assert "1, 2, 4, 8, 16, 32" in str(caught.value)
    with pytest.raises(PlanError, match=r"24 devices, but total_chips=7\. Every size must divide 7: 1, 7"):
        create_training_mesh(7, 2, 3, 4)
    with pytest.raises(PlanError, match="pipeline_parallel_size=0"):
        create_training_mesh(4, 2, 2, 0)
    with pytest.raises(PlanError, match="total_chips=True"):
        create_training_mesh(True, 1, 1, 1)
    with pytest.raises(PlanError, match="context_parallel_size=4 would do"):
        create_training_mesh(8, 2, context_parallel_size=3)
    with pytest.raises(ConfigError, match="--xla_force_host_platform_device_count=65536"):
        create_training_mesh(65536, 256, 256, 1)


def test_one_device_is_a_mesh_too() -> None:
    sharding = create_mesh_sharding((1, 1), [jax.devices()[0].id])
    params = {"w": np.ones((4, 4), "float32")}
    strategy = optimize_sharding_strategy(params, (2, 4), (1, 1), 1.0)
    assert strategy.communication_seconds == 0
    placed = sharding.shard_model(params, strategy)
    np.testing.assert_array_equal(placed["w"], params["w"])
    with pytest.raises(PlanError, match="Did you mean 'latency'"):
        create_mesh_sharding((1, 1), [0], "latncy")  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match="device_ids="):
        create_mesh_sharding((1, 1), ["a"])  # pyright: ignore[reportArgumentType]


def test_sizes_that_do_not_fit_are_told_at_once_for_any_number_of_chips() -> None:
    with pytest.raises(PlanError, match=r"must divide 24: 1, 2, 3, 4, 6, 8, 12, 24$"):
        create_training_mesh(24, 5)
    # Counting up to so many would take hours.
    with pytest.raises(PlanError, match=r"must divide 10000000000037: 1, "):
        create_training_mesh(10_000_000_000_037, 3)
