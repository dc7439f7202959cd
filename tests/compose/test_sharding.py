"""Composed models over several devices: emulated ones for values, topologies of TPUs for compiled programs."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emulation import emulated
from other_process import run_apart
from tpu_compiler import environment, needs_libtpu

SUPPORT = Path(__file__).parents[1] / "support"

COMMON = """
import json, sys, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import sharded_models
from closeness import far
from capibara import compose as ml

MODELS = {"mlp": sharded_models.mlp, "block": sharded_models.block}

def values(name, batch):
    rng = np.random.default_rng(0)
    if name == "mlp":
        return {"x": rng.normal(size=(batch, 32)).astype("float32")}
    return {"x": rng.normal(size=(batch, 8, 32)).astype("float32"), "positions": np.arange(8, dtype="int32")}

def text(tree):
    return {jax.tree_util.keystr(p): str(v.spec if hasattr(v, "spec") else v.sharding.spec)
            for p, v in jax.tree_util.tree_leaves_with_path(tree)}
"""

EMULATED = """
shape = tuple(json.loads(sys.argv[1]))
out = {"devices": len(jax.devices())}

singles = {name: ml.compile(make(), ml.JaxBackend()) for name, make in MODELS.items()}

def study(name, mesh):
    batch = 2 * shape[0]
    inputs = values(name, batch)
    one = singles[name]
    many = ml.compile(MODELS[name](), ml.JaxBackend(device_mesh=mesh))
    params = many.randomize_params(3)
    plan = many.propose_shardings()
    same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), params, plan["params"])
    laid = {k: jax.device_put(v, plan["inputs"][k]) for k, v in inputs.items()}
    alone = jax.tree.map(np.asarray, params)
    cotangents = {"y": np.random.default_rng(1).normal(size=inputs["x"].shape).astype("float32")}
    y, gradients = many.evaluate(params, laid, cotangents)
    y1, gradients1 = one.evaluate(alone, inputs, cotangents)
    only = many.evaluate(params, laid)
    grads_same = jax.tree.map(lambda a, s: a.sharding.is_equivalent_to(s, a.ndim), gradients, plan["params"])
    kinds = {t.name for a in jax.tree.leaves((params, y, gradients)) for t in a.sharding.mesh.axis_types}
    return {
        "starts alike": far(params, one.randomize_params(3)), "outputs": far(y, y1),
        "outputs alone": far(only, one.evaluate(alone, inputs)), "gradients": far(gradients, gradients1),
        "host inputs": far(many.evaluate(params, inputs), y1), "as proposed": all(jax.tree.leaves(same)),
        "gradients as proposed": all(jax.tree.leaves(grads_same)), "specs": text(params), "kinds": sorted(kinds),
        "inputs": text(plan["inputs"]), "output": str(y["y"].sharding.spec),
        "devices": sorted({len(a.sharding.device_set) for a in jax.tree.leaves((params, y, gradients))}),
        # One operation at a time, which takes long to compile.
        "applied": far(many.apply(params, laid), y1) if name == "mlp" else 0.0,
    }

for name in MODELS:
    out[name] = study(name, shape)
if shape == (2, 2):
    out["smaller"] = study("mlp", (2, 1))
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    out["explicit"] = study("mlp", mesh)
    with jax.set_mesh(mesh):
        out["surrounding"] = study("mlp", mesh)
    # A backend without a mesh, given arrays that are sharded over one.
    plain = ml.compile(sharded_models.mlp(), ml.JaxBackend())
    params, inputs = plain.randomize_params(0), values("mlp", 4)
    laid = jax.device_put(inputs["x"], NamedSharding(mesh, P("data")))
    y = plain.evaluate(params, inputs)
    out["no mesh"] = {"outputs": far(plain.evaluate(params, {"x": laid}), y),
        "again": far(plain.evaluate(params, {"x": laid}), y), "one device": far(plain.evaluate(params, inputs), y)}
    # In a trace the layout of outputs is for the caller to say.
    backend = ml.JaxBackend(device_mesh=mesh)
    many = ml.compile(sharded_models.mlp(), backend)
    params = many.randomize_params(0)
    try:
        jax.jit(many.apply)(params, {"x": laid})
    except ml.InputError as error:
        out["traced"] = str(error)
    told = jax.jit(jax.sharding.auto_axes(lambda p, x: many.apply(p, {"x": x}), out_sharding={"y": P("data")}))
    with jax.set_mesh(mesh):
        out["told"] = far(told(params, laid), y)
    first = jax.device_put(jax.tree.map(np.asarray, params), jax.devices()[0])
    try:
        many.evaluate(first, inputs, {"y": jnp.ones((4, 32))})
    except ml.InputError as error:
        out["elsewhere"] = str(error)
    out["back"] = backend.ones(4, 4, device_mesh=(2, 2)).sharding.mesh == mesh
print("RESULT" + json.dumps(out))
"""

ATTENTION = """
from capibara.ops.attention import cached_attention, flash_attention
mesh = jax.make_mesh((2, 2), ("data", "model"))
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(4, h, 6, 8)).astype("float32") for h in (4, 2, 2))
bias = rng.normal(size=(1, 4, 6, 6)).astype("float32")
ids = np.array([[0, 0, 0, 1, 1, 1]] * 4)
out = {}
def loss(q, k, v, bias, ids):
    y = flash_attention(q, k, v, use_causal_mask=True, bias=bias, segment_ids=ids)
    return (y * y).sum(), y
run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
expected = run(q, k, v, bias, ids)
for spec in (P("data"), P("data", "model"), P("data", None, None, "model")):
    a, b, c = (jax.device_put(x, NamedSharding(mesh, spec)) for x in (q, k, v))
    rows = {"jit": far(run(a, b, c, bias, ids), expected)}
    rows["type"] = str(jax.typeof(run(a, b, c, bias, ids)[0][1]).sharding.spec)
    if spec == P("data"):
        with jax.set_mesh(mesh):
            rows["set_mesh"] = far(run(a, b, c, bias, ids), expected)
        rows["eager"] = far(flash_attention(a, b, c), flash_attention(q, k, v))
        swapped = [jnp.swapaxes(x, 1, 2) for x in (a, b, c)]
        found = cached_attention(*swapped, 0)
        rows["cached"] = far(found, cached_attention(*(np.swapaxes(x, 1, 2) for x in (q, k, v)), 0))
    out[str(spec)] = rows
print("RESULT" + json.dumps(out))
"""

TPU = """
from jax.experimental import topologies
topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
mesh = Mesh(np.array(topology.devices).reshape(2, 2), ("data", "model"))
out = {}
for name in MODELS:
    compiled = ml.compile(MODELS[name](), ml.JaxBackend(device_mesh=mesh))
    for gradients in (False, True):
        program = compiled.lower(gradients=gradients, batch=16).compile()
        out[f"{name} {gradients}"] = {
            "collectives": sharded_models.collectives(program.as_text(), (2, 2)),
            "outputs": [str(s.spec) for s in jax.tree.leaves(program.output_shardings)],
            "bytes": program.memory_analysis().argument_size_in_bytes,
        }
print("RESULT" + json.dumps(out))
"""


def ran(code: str, *args: str, **env: str) -> dict[str, Any]:
    return run_apart(COMMON + code, *args, **env)


@cache
def results(rows: int, columns: int) -> dict[str, Any]:
    return ran(EMULATED, json.dumps([rows, columns]), XLA_FLAGS=emulated(rows * columns))


# The longest sums have 64 terms, in float32, and devices add in another order.
CLOSE = 1e-5


def agrees(found: dict[str, Any]) -> None:
    assert found["starts alike"] < CLOSE
    for what in ("outputs", "outputs alone", "gradients", "host inputs", "applied"):
        assert found[what] < CLOSE, (what, found[what])
    assert found["as proposed"]
    assert found["gradients as proposed"]


@pytest.mark.parametrize("mesh", [(2, 2), pytest.param((4, 8), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["block", pytest.param("mlp", marks=pytest.mark.slow)])
def test_a_mesh_gives_what_one_device_gives(mesh: tuple[int, int], name: str) -> None:
    found = results(*mesh)[name]
    agrees(found)
    assert found["devices"] == [mesh[0] * mesh[1]]
    assert "'data'" in found["inputs"]["['x']"]
    assert "'data'" in found["output"]


def test_parameters_are_split_over_both_axes() -> None:
    specs = results(2, 2)["mlp"]["specs"]
    assert specs["['linear']['weight']"].endswith("('data', 'model')")
    assert specs["['linear_1']['weight']"].endswith("('model', 'data')")
    assert "('model'," in specs["['linear']['bias']"]
    block = results(2, 2)["block"]["specs"]
    assert block["['attend']['query']['weight']"].endswith("('data', 'model', None)"), block


def test_a_mesh_may_be_smaller_than_the_machine() -> None:
    found = results(2, 2)["smaller"]
    agrees(found)
    assert found["devices"] == [2]


def test_meshes_with_explicit_axes() -> None:
    found = results(2, 2)["explicit"]
    agrees(found)
    # What comes back has the axes of the mesh that was given.
    assert found["kinds"] == ["Explicit"]
    assert results(2, 2)["mlp"]["kinds"] == ["Auto"]


def test_explicit_axes_that_surround_a_call() -> None:
    agrees(results(2, 2)["surrounding"])


def test_explicit_arrays_for_a_backend_without_a_mesh() -> None:
    assert max(results(2, 2)["no mesh"].values()) < CLOSE


def test_parameters_on_one_device_are_not_those_of_a_mesh() -> None:
    found = results(2, 2)["elsewhere"]
    assert "params['linear']['bias'] is on" in found
    assert "propose_shardings" in found


def test_explicit_axes_in_a_trace_need_the_layout_of_outputs() -> None:
    found = results(2, 2)
    assert "jax.sharding.auto_axes" in found["traced"]
    assert found["told"] < CLOSE
    assert found["back"]


@cache
def attention() -> dict[str, Any]:
    return ran(ATTENTION, XLA_FLAGS=emulated(4))


@pytest.mark.slow
def test_attention_on_explicit_axes() -> None:
    found = attention()
    assert len(found) == 3
    for spec, rows in found.items():
        kept = rows.pop("type")
        assert max(rows.values()) < CLOSE, (spec, rows)
        assert ("data" in kept) == ("data" in spec)
        # The last axis of the output is whole.
        assert kept.endswith("None)")


@cache
def on_v4() -> dict[str, Any]:
    return ran(TPU, **environment())


def sizes(text: str) -> list[tuple[int, ...]]:
    """The shapes in the type of a result."""
    import re

    return [tuple(int(n) for n in row.split(",") if n) for row in re.findall(r"\w+\[([\d,]*)\]", text)]


@pytest.mark.thin(2)
@needs_libtpu
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_v4_sums_row_parallel_products_over_the_model_axis(name: str) -> None:
    rows = on_v4()[f"{name} False"]["collectives"]
    # Each device has 16 / 2 examples of the batch.
    part = (8, 32) if name == "mlp" else (8, 8, 32)
    summed = [part in sizes(t) for kind, axis, t in rows if kind == "all-reduce" and axis == "model"]
    assert summed == [True] * (1 if name == "mlp" else 2), rows


@needs_libtpu
@pytest.mark.parametrize("name", ["mlp", "block"])
@pytest.mark.parametrize("gradients", [False, True])
def test_v4_gathers_weights_and_never_the_batch(name: str, gradients: bool) -> None:
    rows = on_v4()[f"{name} {gradients}"]["collectives"]
    gathered = [(axis, t) for kind, axis, t in rows if kind == "all-gather"]
    assert gathered
    assert {axis for axis, _ in gathered} == {"data"}, rows
    for _, t in gathered:
        assert not any(shape[:1] == (16,) for shape in sizes(t)), t
    assert {kind for kind, _, _ in rows} <= {"all-reduce", "all-gather", "reduce-scatter"}


@needs_libtpu
@pytest.mark.parametrize("name", ["mlp", "block"])
def test_v4_sums_gradients_over_the_data_axis_and_leaves_them_split(name: str) -> None:
    found = on_v4()[f"{name} True"]
    summed = [
        t
        for kind, axis, t in found["collectives"]
        if kind in ("all-reduce", "reduce-scatter") and axis == "data"
    ]
    weights = [s for t in summed for s in sizes(t) if len(s) > 1]
    assert len(weights) >= (2 if name == "mlp" else 3), found
    split = [s for s in found["outputs"] if "'data'" in s and "'model'" in s]
    assert len(split) >= len(weights), found["outputs"]
