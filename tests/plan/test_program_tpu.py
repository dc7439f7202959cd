"""Decoders compiled by the TPU's compiler, scanned and unrolled, on several meshes: the work is the same work.

The closed form: 6 · N · D for N parameters in matrix products and D tokens (2 forward, 4 backward), and for the scores
of each layer 12 · D · S · d (their masked half is multiplied too by XLA), where d is the width and S the sequence.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tpu_compiler import environment, needs_libtpu

from capibara.plan.program import ProgramFacts, mesh_axes_of, read_program
from capibara.plan.slices import Slice, parse_slice
from capibara.plan.time import predict_step

pytestmark = needs_libtpu

SCRIPT = r"""
import sys
from pathlib import Path
import jax, jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

folder, *cases = sys.argv[1:]
layers, width, hidden, heads, words, batch, length = 3, 256, 1024, 4, 512, 8, 128
shapes = {
    "q": (width, heads, width // heads), "k": (width, heads, width // heads), "v": (width, heads, width // heads),
    "o": (heads, width // heads, width), "gate": (width, hidden), "up": (width, hidden), "down": (hidden, width),
}
split = {name: P("data", "model") for name in shapes} | {"o": P("model", None, "data"), "down": P("model", "data")}


def rows(x):  # without it the compiler may work on the whole batch everywhere, which is more work
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, None)))


def layer(x, w):
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) for name in "qkv")
    scores = jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    mixed = jnp.einsum("bhst,bthk->bshk", jax.nn.softmax(scores).astype(x.dtype), v)
    x = rows(x + jnp.einsum("bshk,hkd->bsd", mixed, w["o"]))
    up = jax.nn.silu(jnp.einsum("bsd,df->bsf", x, w["gate"])) * jnp.einsum("bsd,df->bsf", x, w["up"])
    return rows(x + jnp.einsum("bsf,fd->bsd", up, w["down"])), None


def loss(params, tokens, scanned, remat):
    x = rows(params["embedding"][tokens])
    step = jax.checkpoint(layer) if remat else layer
    if scanned:
        x, _ = jax.lax.scan(step, x, params["layers"])
    else:
        for i in range(layers):
            x, _ = step(x, jax.tree.map(lambda a: a[i], params["layers"]))
    logits = jnp.einsum("bsd,dv->bsv", x, params["out"]).astype(jnp.float32)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1).mean()


for case in cases:
    jax.clear_caches()  # bodies of scans are traced once, with the mesh of the case before
    name, topology, data, model, scanned, remat = case.split(",")
    more = {"chip_config_name": "megacore"} if topology.startswith("v4") else {}
    described = topologies.get_topology_desc(platform="tpu", topology_name=topology, **more)
    size = int(data) * int(model)
    grid = np.array(described.devices[:size]).reshape(int(data), int(model))
    mesh = Mesh(grid, ("data", "model"))

    def struct(shape, spec, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {
        "layers": {key: struct((layers, *shape), P(None, *split[key])) for key, shape in shapes.items()},
        "embedding": struct((words, width), P(None, "data")),
        "out": struct((width, words), P("data", "model")),
    }
    run = jax.jit(lambda p, t: jax.grad(loss)(p, t, scanned == "scan", remat == "remat"))
    text = run.lower(params, struct((batch, length), P("data"), jnp.int32)).compile().as_text()
    Path(folder, name + ".txt").write_text(text)
"""

TOKENS, WIDTH, LENGTH, LAYERS = 8 * 128, 256, 128, 3
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * 1024
CLOSED_FORM = 6 * TOKENS * (LAYERS * LAYER + WIDTH * 512) + LAYERS * 12 * TOKENS * LENGTH * WIDTH


def compile_decoders(folder: Path, *cases: str) -> dict[str, ProgramFacts]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), *cases],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-1500:]
    return {
        case.split(",")[0]: read_program((folder / f"{case.split(',')[0]}.txt").read_text()) for case in cases
    }


@pytest.mark.slow
def test_a_decoder_is_6_n_d_and_attention(tmp_path: Path) -> None:
    (facts,) = compile_decoders(tmp_path, "one,v4:2x2x1,1,1,scan,keep").values()
    assert facts.flops == pytest.approx(CLOSED_FORM, rel=0.03)
    assert facts.unknown == ()
    assert facts.num_devices == 1
    assert not facts.collectives
    assert facts.cycles > CLOSED_FORM / 262_144  # what eight units of 128 × 128 do in a cycle


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ProgramFacts]:
    return compile_decoders(
        tmp_path_factory.mktemp("hlo"),
        "scanned,v4:2x2x1,4,1,scan,remat",
        "unrolled,v4:2x2x1,4,1,unroll,remat",
        "tensors,v4:2x2x1,1,4,scan,remat",
        "both,v4:2x2x1,2,2,scan,remat",
        "v5e,v5e:2x2,4,1,scan,remat",
        "v5p,v5p:2x2x1,2,2,scan,remat",
        "v6e,v6e:2x2,2,2,scan,remat",
    )


@pytest.mark.slow
def test_scanned_and_unrolled_are_the_same_work(decoders: dict[str, ProgramFacts]) -> None:
    scanned, unrolled = decoders["scanned"], decoders["unrolled"]
    assert scanned.flops == pytest.approx(unrolled.flops, rel=0.01)
    target, mesh = parse_slice("v4:2x2x1"), (("data", 4), ("model", 1))
    times = [predict_step(facts, target, mesh).seconds for facts in (scanned, unrolled)]
    assert times[0] == pytest.approx(times[1], rel=0.15)


@pytest.mark.slow
def test_every_mesh_and_chip_does_the_same_work(decoders: dict[str, ProgramFacts]) -> None:
    totals = {name: facts.flops * facts.num_devices for name, facts in decoders.items()}
    assert min(totals.values()) > 0.95 * max(totals.values()), totals
    # The recomputed forward pass leaves out what the backward pass does not need (the last product of a layer).
    again = 2 * TOKENS * LAYERS * (LAYER - WIDTH * 1024) + LAYERS * 4 * TOKENS * LENGTH * WIDTH
    assert totals["scanned"] == pytest.approx(CLOSED_FORM + again, rel=0.03)


@pytest.mark.slow
def test_everything_in_the_programs_is_understood(decoders: dict[str, ProgramFacts]) -> None:
    for name, facts in decoders.items():
        assert facts.unknown == (), name
        assert facts.num_devices == 4
        assert facts.collectives
        for collective in facts.collectives:
            assert collective.bytes > 0
            assert max(device for group in collective.groups for device in group) < 4
            assert collective.trips in (1, LAYERS)


def _slice_of(name: str) -> Slice:
    return parse_slice({"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}.get(name, "v4:2x2x1"))


@pytest.mark.slow
def test_products_take_at_least_their_roofline(decoders: dict[str, ProgramFacts]) -> None:
    for name, facts in decoders.items():
        target = _slice_of(name)
        floor = facts.flops / target.chip.peak("bfloat16")
        mesh = (
            (("data", 4), ("model", 1))
            if name in ("scanned", "unrolled", "v5e")
            else (("data", 2), ("model", 2))
        )
        mesh = (("data", 1), ("model", 4)) if name == "tensors" else mesh
        step = predict_step(facts, target, mesh)
        assert floor < step.compute
        assert step.communication > 0
        assert step.low <= step.seconds <= step.high


@pytest.mark.slow
def test_collectives_lie_along_the_axes_that_were_split(decoders: dict[str, ProgramFacts]) -> None:
    """Weights are gathered over ``data``; with the width of the model split too, sums go over ``model``."""
    mesh = (("data", 2), ("model", 2))
    axes = {mesh_axes_of(c.groups, mesh) for c in decoders["both"].collectives if c.kind == "all-gather"}
    assert ("data",) in axes
    sums = {mesh_axes_of(c.groups, mesh) for c in decoders["both"].collectives if c.kind == "all-reduce"}
    assert ("model",) in sums
    alone = {mesh_axes_of(c.groups, (("data", 4), ("model", 1))) for c in decoders["scanned"].collectives}
    assert alone == {("data",)}
