"""Options in programs that the TPU compiler makes for a described slice, and such a program in a file."""

from __future__ import annotations

import pytest
from tpu_compiler import ask, needs_libtpu

pytestmark = needs_libtpu

PROGRAMS = """
import json, os, re, tempfile
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from capibara.compilation import (
    PackedProgramError, TpuCompilationConfig, create_tpu_optimized_jit, load_program, pack_program, read_packed,
)

topology = topologies.get_topology_desc(platform="tpu", topology_name="v4:2x2x1", chip_config_name="megacore")
mesh = Mesh(np.array(topology.devices).reshape(4), ("d",))

def of(*shape, spec=P()):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))

def function(w, x):
    def body(x, wi):
        return jnp.tanh(x @ wi) @ wi.T, None
    return jax.lax.scan(body, x, w)[0]

args = of(2, 512, 512, spec=P(None, "d")), of(256, 512, spec=P("d"))

def compiled(**options):
    jitted = create_tpu_optimized_jit(function, config=TpuCompilationConfig(strict=True, **options))
    (program,) = jitted.compile(input_shapes=[args]).programs
    text = re.sub(r"stack_frame_id=[0-9]+", "", program.as_text())
    return program, text

plain, text = compiled()
found = {"platform": plain.platform}
asynchronous, other = compiled(enable_async_collective=True)
found["gathers"] = [t.count(" all-gather-start(") for t in (text, other)]
found["collectives"] = list(asynchronous.notes)
_, other = compiled(optimization_level="debug")
found["debug differs"] = other != text
aggressive, _ = compiled(optimization_level="aggressive")
found["aggressive"] = dict(aggressive.options)
frugal, other = compiled(memory_optimization=True)
found["memory differs"] = other != text
found["memory"] = [p.compiled.memory_analysis().temp_size_in_bytes for p in (plain, frugal)]
rounding, other = compiled(use_bfloat16=True)
found["bf16"] = ["tensor<256x512xbf16>" in p.lowered_text() for p in (plain, rounding)]
found["notes"] = list(rounding.notes)

# Shapes alone: the devices are those of the function's own shardings.
own = tuple(one.sharding for one in args)
config = TpuCompilationConfig(strict=True, optimization_level="aggressive")
jitted = create_tpu_optimized_jit(function, config=config, in_shardings=own)
(program,) = jitted.compile(input_shapes=[tuple(one.shape for one in args)]).programs
found["in_shardings"] = [program.platform, dict(program.options) == found["aggressive"]]

path = os.path.join(tempfile.mkdtemp(), "step.caprog")
step = create_tpu_optimized_jit(function)
packed = pack_program(path, step, args)
found["packed"] = {"bytes": packed.bytes, **packed.environment}
found["read"] = read_packed(path).environment == packed.environment
try:
    load_program(path, step, (jnp.ones((2, 512, 512)), jnp.ones((256, 512))))
except PackedProgramError as error:
    found["on a CPU"] = str(error)
other = Mesh(mesh.devices[::-1], ("d",))
turned = tuple(
    jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(other, a.sharding.spec)) for a in args
)
try:
    load_program(path, step, turned)
except PackedProgramError as error:
    found["other places"] = str(error)
os.environ["LIBTPU_INIT_ARGS"] = "--xla_tpu_something=1"
try:
    load_program(path, step, args)
except PackedProgramError as error:
    found["other flags"] = str(error)
del os.environ["LIBTPU_INIT_ARGS"]
try:
    load_program(path, step, args)
except PackedProgramError as error:
    found["no hardware"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, object]:
    return ask(PROGRAMS)


def test_each_option_changes_the_compiled_program(found: dict) -> None:
    assert found["platform"] == "tpu"
    before, after = found["gathers"]
    assert before == 0 < after
    assert found["collectives"] == [f"{after} of {after} collectives asynchronous"]
    assert found["debug differs"]
    assert found["aggressive"]["optimization_level"] == 39
    assert found["memory differs"], found["memory"]
    assert found["memory"][1] <= found["memory"][0]
    assert found["bf16"] == [False, True]
    assert found["notes"] == ["2 products with bfloat16 operands"]


def test_a_program_for_a_slice_is_packed_with_what_it_depends_on(found: dict) -> None:
    packed = found["packed"]
    assert found["read"]
    assert packed["platform"] == "tpu"
    assert "TFRT TPU v4" in packed["compiler"]
    assert packed["topology"].startswith("4 × TPU v4 at 0,0,0.0 1,0,0.0 0,1,0.0 1,1,0.0")
    assert packed["bytes"] > 10_000
    assert "platform: tpu in the file, cpu here" in found["on a CPU"]
    assert "devices: 4 × TPU v4 at 0,0,0.0" in found["other places"]
    assert "LIBTPU_INIT_ARGS: none in the file, --xla_tpu_something=1 here" in found["other flags"]
    # All is as it was packed, but a described slice cannot run: its client refuses, and nothing is compiled.
    assert "the device's runtime refused the program" in found["no hardware"]
