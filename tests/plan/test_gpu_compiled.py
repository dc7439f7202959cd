"""Plans compiled for GPUs by XLA's own compiler, in processes that have no GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_compiler import ask, needs_gpu_compiler

from capibara.cli import main
from capibara.config import ModularModelConfig
from capibara.plan import parse_target, plan, step_work
from capibara.plan.compiler import ProgramCache, compile_program
from capibara.plan.lock import check_lock
from capibara.plan.program import read_program
from capibara.plan.work import TrainWork
from capibara.sharding import Layout

pytestmark = needs_gpu_compiler

TINY = (
    *("model.num_layers=2", "model.embed_dim=64", "model.num_heads=4", "model.num_kv_heads=4"),
    *("model.vocab_size=512", "model.scan_layers=scan", "train.batch_size=8", "train.sequence_length=128"),
)

# The same step by JAX alone, in a process of its own.
ALONE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = topologies.get_topology_desc(
    platform="cuda", topology_name="h100", target_config=open(sys.argv[1]).read(), topology="1x1x2"
).devices
mesh = Mesh(np.array(devices).reshape(1, 2), ("data", "model"))
def array(spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
given = array(P(None, "model"), 256, 1024), array(P("model", None), 1024, 256), array(P("data"), 512, 256)
compiled = jax.jit(lambda w, v, x: x @ w @ v).lower(*given).compile()
m = compiled.memory_analysis()
print(json.dumps([m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes]))
"""


def test_a_step_function_is_compiled_for_an_h100(tmp_path):
    import jax
    import jax.numpy as jnp

    from capibara.plan import gpus

    def step(w, v, x):
        return x @ w @ v

    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((256, 1024), (1024, 256), (512, 256))]
    axes = (("embed", "mlp"), ("mlp", "embed"), ("batch", None))
    work = step_work(
        step, args, axes=axes, batch_argnums=(2,), donate_argnums=(), platform="cuda", folder=tmp_path
    )
    found = plan(work, "h100:2", compile=True, max_compiles=1, cache=tmp_path / "cache", keep=())
    layout = next(k for k in work.layouts(found.target) if dict(k.mesh)["model"] == 2)
    program = compile_program(work.job(layout, found.target), cache=ProgramCache(tmp_path / "cache"))
    memory = program.memory
    assert memory is not None
    alone = ask(ALONE, str(Path(gpus.__file__).with_name("h100.txtpb")))
    assert [memory.arguments, memory.outputs, memory.temporaries] == alone
    assert memory.total == sum(alone)
    assert program.versions["jax-cuda13-plugin"]
    facts = read_program(program.text)
    assert facts.flops == 2 * (2 * 512 * 256 * 512)
    assert [c.kind for c in facts.collectives] == ["all-reduce"]
    assert found.compiled == 1
    assert found.best.memory_source == "compiler"
    assert "[XLA's GPU compiler]" in str(found)
    assert "TPU" not in str(found)


@pytest.mark.slow  # two compilations of a training step, half a minute each where the machine is busy
def test_a_configuration_is_planned_trained_and_checked(tmp_path, capsys):
    cache = tmp_path / "cache"
    config = ModularModelConfig.from_toml("demo", TINY)
    found = plan(config, "h100:8", compile=True, max_compiles=2, cache=cache)
    assert found.compiled == 2
    best = found.best
    assert sum(best.memory.values()) == best.program.memory.total  # type: ignore[union-attr]
    assert best.time.low <= best.step_seconds <= best.time.high
    assert found.where is not None
    assert found.where.seconds == pytest.approx(best.step_seconds)
    assert any("attention" in part.name for part in found.where.parts)
    assert found.report(tmp_path / "plan.html").read_text().count("TPU") == 0
    # Attention is what a run has there: no kernels of a TPU, and on a GPU that was not tuned XLA's own.
    text = best.program.text  # type: ignore[union-attr]
    assert "tpu_custom_call" not in text
    assert "capibara:flash_attention:xla" in text
    # Asynchronous, as the flags that a run has as well have it.
    assert all(c.asynchronous for c in read_program(text).collectives)
    found.lock(tmp_path / "plan.lock")
    check = check_lock(tmp_path / "plan.lock", cache=cache)
    assert check.passed
    assert not check.changed
    arguments = ["plan", "--config", "demo", *TINY, "--topology", "h100:8", "--max-compiles", "2"]
    assert main([*arguments, "--cache", str(cache), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["candidates"][0]["memory_source"] == "compiler"
    assert data["candidates"][0]["hbm_bytes"] == best.hbm_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h200", "b200"])
def test_the_other_gpus_are_known_to_the_compiler(name, tmp_path):
    target = parse_target(f"{name}:1")
    config = ModularModelConfig.from_toml("demo", TINY)
    layout = Layout(
        mesh=(("data", 1), ("model", 1)),
        remat="none",
        flags=target.flag_choices((("data", 1), ("model", 1)))[0],
    )
    job = TrainWork(config).job(layout, target)
    program: Any = compile_program(job, cache=ProgramCache(tmp_path))
    assert program.status == "ok", program.message
    assert program.coordinates == ((0,),)
    assert read_program(program.text).collectives == ()
