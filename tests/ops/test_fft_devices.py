"""radix_optimized_fft over emulated devices, and compiled for TPUs; each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from emulation import emulated
from tpu_compiler import environment, needs_libtpu

MESH = """
import re
import jax, jax.numpy as jnp, numpy as np
from functools import partial
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from capibara.ops import OpValueError, explain
from capibara.ops.fft import radix_optimized_fft
from capibara.ops.fft.parallel import way

mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
random = np.random.default_rng(0)

def draw(*shape):
    return (random.normal(size=shape) + 1j * random.normal(size=shape)).astype(np.complex64)

def close(got, want, bound=2e-6):
    got = np.asarray(got)
    assert got.shape == want.shape, (got.shape, want.shape)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert error < bound, error

def count(text, kind):
    return len(re.findall(r" %s\\(" % kind, text))

def split(spec, **options):
    f = lambda x: radix_optimized_fft(x, None, True, **options)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec))

# What each device has decides the way, and the way the communication.
for shape, axis, kind, exchanges in [((4, 32), 1, "slabs", 2), ((1, 32, 3), 1, "matrix", 3), ((3, 20), 1, "gather", 0)]:
    x = draw(*shape)
    spec = P(*("y" if i == axis else None for i in range(x.ndim)))
    local = tuple(n // 4 if i == axis else n for i, n in enumerate(shape))
    assert way(local, axis, 4)[0] == kind
    for name, inverse in (("matmul", False), ("auto", True)):
        run = split(spec, axis=axis, axis_name="y", inverse=inverse, implementation=name)
        close(run(x), (np.fft.ifft if inverse else np.fft.fft)(x, axis=axis))
        text = run.lower(x).compile().as_text()
        assert count(text, "all-to-all") == exchanges and count(text, "all-gather") == (kind == "gather"), text

# Gradients are those of the whole; so is what each device does alone without use_parallel.
x = draw(1, 32)
run = split(P(None, "y"), axis_name="y", implementation="matmul")
loss = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jnp.abs(f(x))))))
close(loss(run)(x), np.asarray(loss(jnp.fft.fft)(x)))
alone = jax.shard_map(radix_optimized_fft, mesh=mesh, in_specs=P("y"), out_specs=P("y"))
x = draw(4, 8)
close(jax.jit(alone)(x), np.fft.fft(x))
mapped = lambda x: radix_optimized_fft(x, None, True, axis=(0, 1), split_axis=1, axis_name="y")
close(jax.jit(jax.shard_map(mapped, mesh=mesh, in_specs=P(None, "y"), out_specs=P(None, "y")))(x), np.fft.fft2(x))

# Real transforms of a volume, split in one dimension, two, and the one that is halved.
x = random.normal(size=(8, 6, 8)).astype(np.float32)
want = np.fft.rfftn(x)
for spec, lies in ((P("y"), P("y")), (P("y", "x"), P("y", "x")), (P("x", None, "y"), P("x"))):
    y = radix_optimized_fft(jax.device_put(x, NamedSharding(mesh, spec)), None, True, axis=(0, 1, 2), real=True)
    close(y, want)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, lies), 3), y.sharding
    close(radix_optimized_fft(y, None, True, axis=(0, 1, 2), real=True, inverse=True), x)

# All devices, one long signal, a pair in bfloat16: it travels so.
x = draw(512)
pair = [jax.device_put(jnp.asarray(v, jnp.bfloat16), NamedSharding(mesh, P(("x", "y")))) for v in (x.real, x.imag)]
exact = np.asarray(pair[0], np.float64) + 1j * np.asarray(pair[1], np.float64)
re_, im = radix_optimized_fft(pair, [2, 4, 8], True)
assert re_.dtype == jnp.bfloat16 and re_.sharding.spec == P(("x", "y"))
close(np.asarray(re_, np.float64) + 1j * np.asarray(im, np.float64), np.fft.fft(exact), 3e-2)

for call, says in [
    (lambda x: radix_optimized_fft(x.real, None, True, real=True, axis_name="y"), "cannot be split evenly"),
    (lambda x: radix_optimized_fft(x, None, True, length=9, axis_name="y"), "cannot be cropped or padded"),
    (lambda x: radix_optimized_fft(x, None, True, axis_name="z"), "no axis 'z'"),
    (lambda x: radix_optimized_fft(x, None, True, axis_name="y", split_axis=3), "split_axis must be a dimension"),
]:
    try:
        jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=P(None, "y"), out_specs=P(None, "y")), draw(2, 32))
    except ValueError as error:
        assert says in str(error), error
    else:
        raise AssertionError(says)

# Layouts in the type of an array.
explicit = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
with jax.set_mesh(explicit):
    x = draw(2, 32)
    there = jax.device_put(x, NamedSharding(explicit, P("x", "y")))
    for parallel in (False, True):
        y = jax.jit(lambda x: radix_optimized_fft(x, None, parallel))(there)
        close(y, np.fft.fft(x))
        assert jax.typeof(y).sharding.spec == (P("x", "y") if parallel else P("x", None)), jax.typeof(y)
"""


@pytest.mark.slow
def test_over_devices():
    variables = {
        **os.environ,
        "XLA_FLAGS": emulated(8, quick=True),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", MESH], env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


FOR_TPU = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from capibara.ops.fft import radix_optimized_fft

def devices(name, **options):
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices

def cycles(function, *arrays):
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert " while(" not in text
    return sum(int(n) for n in re.findall(r'"estimated_cycles":"([0-9]+)"', text)), text

megacore = {"chip_config_name": "megacore"}
for name, options in (("v4:2x2x1", megacore), ("v5e:2x2", {}), ("v5p:2x2x1", {}), ("v6e:2x2", {})):
    one = SingleDeviceSharding(devices(name, **options)[0])
    part = lambda dtype: jax.ShapeDtypeStruct((256, 1000), dtype, sharding=one)
    narrow, text = cycles(lambda *x: radix_optimized_fft(x), part(jnp.bfloat16), part(jnp.bfloat16))
    assert "bf16" in text and "f64" not in text and " fft(" not in text
    wide, _ = cycles(lambda *x: radix_optimized_fft(x), part(jnp.float32), part(jnp.float32))
    print(name, narrow, wide)
    if name.startswith("v4"):
        assert narrow < wide
        ours, _ = cycles(radix_optimized_fft, part(jnp.complex64))
        plain, _ = cycles(jnp.fft.fft, part(jnp.complex64))
        assert ours < plain, (ours, plain)

mesh = Mesh(np.array(devices("v4:2x2x2", chip_config_name="megacore")), ("data",))
split = jax.shard_map(
    lambda *x: radix_optimized_fft(x, None, True), mesh=mesh, in_specs=P("data"), out_specs=P("data")
)
given = [jax.ShapeDtypeStruct((1 << 20,), jnp.bfloat16, sharding=NamedSharding(mesh, P("data")))] * 2
compiled = jax.jit(split).lower(*given).compile()
sent = re.findall(r"= (.*?) all-to-all(?:-start)?[(]", compiled.as_text())
assert sent and all("bf16" in types and "f32" not in types for types in sent), sent
# No device holds the whole signal: 2 · 2 MiB in bfloat16.
assert compiled.memory_analysis().temp_size_in_bytes < 4 << 20, compiled.memory_analysis()
print("compiled")
"""


@needs_libtpu
@pytest.mark.slow
def test_compiles_for_tpus():
    done = subprocess.run(
        [sys.executable, "-c", FOR_TPU], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "compiled" in done.stdout
