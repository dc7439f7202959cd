"""The memory that a strategy states, against the TPU compiler's: whole train steps, compiled ahead of time for v4."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
from tpu_compiler import environment, needs_libtpu

PROGRAM = """
import json, pathlib, tempfile, warnings
warnings.simplefilter("error")
import jax, numpy as np
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from capibara.compose.physical.specs import nest
from capibara.config import ModularModelConfig
from capibara.config.axes import AxisRules
from capibara.core import ModularCapibaraModel
from capibara.plan.compiler.buffers import read_heap
from capibara.plan.sharding import optimize_sharding_strategy

BATCH, LENGTH = 64, 2048
config = ModularModelConfig.from_toml("production/tpu_v4", {"model.num_layers": 4, "model.scan_layers": "scan"})
topology = topologies.get_topology_desc(
    platform="tpu", topology_name="v4:2x4x4", chip_config_name="megacore", wrap=(False, True, True))
mesh = Mesh(np.array(topology.devices).reshape(4, 8), ("data", "model"))

def train(model, params, first, second, tokens):
    loss = lambda p: model.loss(p, {"tokens": tokens}, state={})
    (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, gradients)
    params = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), params, first, second)
    return params, first, second, value

out = {}
plain = ModularCapibaraModel(config)
for name, given, settings in (
    ("planned", plain, {}),
    ("planned by rules", plain, {"rules": AxisRules()}),
    ("by array", plain.compiled, {}),
    ("by array, rules", plain.compiled, {"rules": AxisRules()}),
    ("by array, memory", plain.compiled, {"optimization_target": "memory"}),
):
    strategy = optimize_sharding_strategy(given, (BATCH, LENGTH), (4, 8), **settings)
    assert (strategy.layout is None) == (given is plain.compiled)
    model = ModularCapibaraModel(config, mesh=mesh, rules=strategy.axis_rules())
    places = strategy.shardings(mesh)
    shapes = nest({p: jax.ShapeDtypeStruct(a.shape, a.dtype) for p, a in model.compiled.params.items()})
    arrays = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, places)
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), "int32", sharding=NamedSharding(mesh, strategy.batch_spec))
    step = jax.jit(lambda *a: train(model, *a), donate_argnums=(0, 1, 2), out_shardings=(places,) * 3 + (None,))
    with model.backend.scope(), tempfile.TemporaryDirectory() as dump:
        lowered = step.lower(arrays, arrays, arrays, tokens)
        memory = lowered.compile(compiler_options={"xla_dump_to": dump}).memory_analysis()
        heap = read_heap(pathlib.Path(dump))  # what the compiler compares with a device's memory
    kept = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    m = strategy.memory
    out[name] = {"stated": m.total, "compiled": kept + memory.temp_size_in_bytes, "needed": kept + heap,
        "kept": m.parameters + m.optimizer, "arguments": memory.argument_size_in_bytes}
print("RESULT" + json.dumps(out))
"""


@cache
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=3600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize(
    "name", ["planned", "planned by rules", "by array", "by array, rules", "by array, memory"]
)
def test_stated_memory_is_near_the_compilers(name: str) -> None:
    row = found()[name]
    # Parameters and moments are exact, but for the padding of small arrays and the tokens.
    assert row["arguments"] == pytest.approx(row["kept"], rel=0.02)
    if name.startswith("planned"):
        assert 0.95 * row["needed"] <= row["stated"] <= 1.35 * row["needed"], row
        return
    # What is made on the way is an estimate, which leans to the safe side.
    # (With so few layers it is much of the whole: 1.6 and 1.7 times too much with rules and in parts.)
    assert 0.9 * row["compiled"] <= row["stated"] <= 1.8 * row["compiled"], row
