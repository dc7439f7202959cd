"""What several products read on a mesh: values and gradients, what is exchanged, what rematerialisation keeps."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from emulation import emulated
from jax.ad_checkpoint import checkpoint_name
from other_process import run_apart
from small_models import small_config

from capibara.compose import compile
from capibara.compose.backends.jax_repeat import PRODUCT, keep_products
from capibara.core import ModularCapibaraModel
from capibara.core.decoder import build_decoder

PROGRAM = """
import json, sys, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh
from capibara.core import ModularCapibaraModel
from capibara.plan.program import read_program
from closeness import far
from small_models import quick_jit, small_config, small_params, small_tokens
import capibara.compose.physical.pipeline as pipeline

axes, changes = json.loads(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(*axes.values()), tuple(axes))
config = small_config("attention", **changes)
one = ModularCapibaraModel(config)
params, state = small_params(one)
tokens = small_tokens(8, 9)

def step(model):
    def loss(p, s):
        return model.loss(p, {"tokens": tokens}, state=s, train=True, key=jax.random.key(1))[0]
    return jax.value_and_grad(loss)

expected = quick_jit(step(one))(params, state)
out = {}
marked = pipeline._fan_out
for name, mark in (("plain", lambda graph, backend: None), ("marked", marked)):
    pipeline._fan_out = mark
    model = ModularCapibaraModel(config, mesh=mesh)
    source = model.compiled.source
    with model.backend.scope():
        laid = jax.device_put(params, model.compiled.propose_shardings()["params"])
        compiled = jax.jit(step(model)).lower(laid, state).compile()
        found = compiled(laid, state)
    rows = [c for c in read_program(compiled.as_text()).collectives if c.kind == "all-reduce"]
    out[name] = {
        "far": far(found, expected),
        "reads": source.count("ops.fan_out("),
        "exchanged": sum(c.bytes * c.trips for c in rows),
    }
print("RESULT" + json.dumps(out))
"""


ROWS, LENGTH, WIDTH, LAYERS = 8, 8, 32, 2
SIZES = {"model__embed_dim": WIDTH, "model__num_heads": 8, "model__head_dim": 4, "model__num_layers": LAYERS}


@cache
def ran(axes: str, changes: str) -> dict[str, Any]:
    return run_apart(PROGRAM, f"[{axes}, {changes}]", XLA_FLAGS=emulated(8))


@pytest.mark.thin(5)
@pytest.mark.parametrize(
    ("axes", "changes", "fewer"),
    [
        # Of queries, keys and values two sums less, of the gated layer one.
        ({"data": 2, "model": 4}, {"model__num_kv_heads": 8}, 3),
        (
            {"data": 4, "model": 2},
            {"model__num_kv_heads": 2, "model__remat": "dots", "model__scan_layers": "scan"},
            3,
        ),
        ({"fsdp": 2, "tensor": 4}, {"model__num_kv_heads": 4, "model__remat": "full"}, 3),
        # Key heads that four devices cannot divide are computed by each of them.
        ({"data": 2, "model": 4}, {"model__num_kv_heads": 2}, 1),
        ({"data": 8}, {"model__num_kv_heads": 8}, 0),
    ],
    ids=str,
)
def test_gradients_of_what_several_products_read_are_exchanged_once(
    axes: dict[str, int], changes: dict[str, Any], fewer: int
) -> None:
    found = ran(json.dumps(axes), json.dumps(SIZES | changes))
    assert found["marked"]["far"] < 1.5 * found["plain"]["far"] + 1e-6
    assert found["plain"]["far"] < 5e-5
    assert found["plain"]["reads"] == 0
    assert (found["marked"]["reads"] > 0) is (fewer > 0)
    rows = ROWS // axes.get("data", axes.get("fsdp", 1))
    less = found["plain"]["exchanged"] - found["marked"]["exchanged"]
    assert less == fewer * LAYERS * rows * LENGTH * WIDTH * 4


ELSEWHERE = """
import json, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec as P
from capibara import compose as ml
from capibara.compose.precision import Precision
from capibara.config.axes import AxisRules
from closeness import far

def model():
    inner = ml.Model()
    inner.add_input("x", ("batch", "sequence", 16), "float", ("batch", "sequence", "embed"))
    inner |= ml.Linear(8, False, axes=("embed", "mlp"))(input="x", output="left")
    inner |= ml.Linear(12, False, axes=("embed", "mlp"))(input="x", output="right")
    inner.expose("left", "right")
    return inner

x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 6, 16)), jnp.float32)
one = ml.compile(model(), ml.JaxBackend())
params = one.randomize_params(seed=0)

def gradient(compiled):
    def score(params, x):
        y = compiled.apply(params, {"x": x})
        return jnp.sum(jnp.sin(y["left"].astype("float32"))) + jnp.sum(jnp.cos(y["right"].astype("float32")))
    return jax.grad(score, argnums=(0, 1))

want, out = jax.jit(gradient(one))(params, x), {}
def study(name, run, *arrays):
    out[name] = far(jax.jit(run)(*arrays), want)

def mesh(second="model"):
    return Mesh(np.array(jax.devices()).reshape(2, 2), ("data", second))

def on(device_mesh, **options):
    compiled = ml.compile(model(), ml.JaxBackend(device_mesh=device_mesh, **options))
    assert "fan_out" in compiled.source
    return gradient(compiled)

study("automatic axes", on(mesh()), params, x)
columns = {**AxisRules().activations, "mlp": ("columns",)}
study("own rules", on(mesh("columns"), rules=AxisRules(activations=columns)), params, x)
half = Precision(compute="bfloat16", exchange="compute")
study("16 bits", on(mesh(), policy=half), params, x)
inside = jax.shard_map(
    lambda p, x: jax.tree.map(lambda g: g[None], on(mesh())(p, x)), mesh=mesh(), axis_names={"data"},
    in_specs=(P(), P("data")), out_specs=P("data"), check_vma=False)
parts = jax.jit(inside)(params, x)
out["inside of shard_map"] = far(
    (jax.tree.map(lambda g: g.sum(0), parts[0]), parts[1].reshape(x.shape)), want)
print("RESULT" + json.dumps(out))
"""


def test_other_meshes_rules_and_dtypes() -> None:
    found = run_apart(ELSEWHERE, XLA_FLAGS=emulated(4))
    assert len(found) == 4
    assert found.pop("16 bits") < 0.02
    for case, far in found.items():
        assert far < 1e-5, case


def test_nothing_is_marked_where_nothing_is_exchanged() -> None:
    mesh: Any = jax.sharding.AbstractMesh(
        (2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    config = small_config("attention")
    one, many = ModularCapibaraModel(config), ModularCapibaraModel(config, mesh=mesh, platform="tpu")
    assert "fan_out" not in one.compiled.source
    assert many.compiled.source.count("ops.fan_out(") == 2
    decoding = [build_decoder(config.model, cached=True), build_decoder(config.model)]
    backend = many.backend
    for model, inference in zip(decoding, (False, True), strict=True):
        assert "fan_out" not in compile(model, backend, inference=inference).source


@pytest.mark.parametrize("kept", [None, PRODUCT, "other"])
def test_what_is_named_a_product_is_kept(kept: str | None) -> None:
    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        parts = jnp.einsum("mbi,mio->mbo", x, w)  # products with a batch: computed again
        parts = parts if kept is None else checkpoint_name(parts, kept)
        return jnp.sin(parts).sum()

    x, w = jnp.ones((2, 3, 4)), jnp.ones((2, 4, 5))
    whole = jax.make_jaxpr(jax.grad(jax.checkpoint(block, policy=keep_products()), argnums=(0, 1)))(x, w)
    assert str(whole).count("dot_general") == (3 if kept == PRODUCT else 4)
