"""Cold arrays come back with the same bits, dtype, shape and sharding."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress import DamagedError
from capibara.compress.host_arrays import LosslessArrays
from capibara.memory import DeviceCache, MemorySettingError
from capibara.memory.host_copies import HostCopy, PlainCopies

DTYPES = [
    "bool", "int8", "uint8", "int16", "int32", "uint32", "int64", "float16", "float32", "float64", "complex64",
    "complex128", ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip


def random_bits(dtype: np.dtype, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Any bits that the dtype has: NaN payloads, infinities, subnormal values and both zeros among them."""
    rng = np.random.default_rng(seed)
    if dtype.name in ("bool", "int4", "uint4"):
        return rng.integers(-8 if dtype.name == "int4" else 0, 2, shape).astype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(rng.bytes(count), dtype).reshape(shape)


@pytest.mark.thin(4)
@pytest.mark.parametrize("codec", [LosslessArrays(), PlainCopies()], ids=["lossless", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (5, 33), (2, 3, 64)])
def test_codecs_return_the_bits(codec, dtype, shape):
    array = random_bits(np.dtype(dtype), shape, 1)
    again = codec.decode(codec.encode(array), array.dtype, shape)
    assert (again.dtype, again.shape) == (array.dtype, shape)
    assert again.tobytes() == array.tobytes()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2**32), st.booleans())
def test_codec_of_any_array(dtype, shape, seed, constant):
    array = random_bits(np.dtype(dtype), tuple(shape), seed)
    if constant and array.size:
        array = np.broadcast_to(array.reshape(-1)[0], array.shape).copy()
    data = LosslessArrays().encode(array)
    assert len(data) <= array.nbytes + 1
    assert LosslessArrays().decode(data, array.dtype, array.shape).tobytes() == array.tobytes()


def test_weights_shrink():
    weights = np.random.default_rng(0).normal(size=(256, 256)).astype(ml_dtypes.bfloat16)
    assert len(LosslessArrays().encode(weights)) < 0.75 * weights.nbytes


def test_a_damaged_copy_is_refused():
    array = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    data = LosslessArrays().encode(array)
    with pytest.raises(DamagedError):
        LosslessArrays().decode(data[:-40], array.dtype, array.shape)
    with pytest.raises(DamagedError):
        LosslessArrays().decode(b"", array.dtype, array.shape)


def through_the_host(value):
    cache = DeviceCache(1 << 20, codec=LosslessArrays())
    cache.put("key", value)
    assert cache.evict() > 0
    assert not cache.is_hot("key")
    return cache["key"]


def test_keys_scalars_and_trees():
    tree = {
        "key": jax.random.key(3),
        "rbg": jax.random.key(3, impl="rbg"),
        "step": jnp.int32(7),
        "w": [jnp.ones((2, 2))],
    }
    back = through_the_host(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for name in ("key", "rbg"):
        assert back[name].dtype == tree[name].dtype
        np.testing.assert_array_equal(
            jax.random.uniform(back[name], (3,)), jax.random.uniform(tree[name], (3,))
        )
    assert int(back["step"]) == 7
    assert back["step"].shape == ()


def test_wide_types_survive_when_they_are_off_again():
    with jax.enable_x64(True):
        wide = jnp.asarray(np.array([1 / 3, 1e300]))
    assert wide.dtype == np.float64
    back = through_the_host(wide)
    assert back.dtype == np.float64
    assert np.asarray(back).tobytes() == np.asarray(wide).tobytes()


def test_uncommitted_arrays_stay_free_to_move():
    free, bound = jnp.ones(4), jax.device_put(jnp.ones(4), jax.devices()[0])
    assert [through_the_host(a).committed for a in (free, bound)] == [free.committed, bound.committed]


def test_what_a_caller_writes_later_changes_nothing():
    given_array = np.arange(4096, dtype=np.float32)  # large enough for JAX's CPU runtime to use its memory
    cache = DeviceCache(1 << 20)
    cache.put("a", given_array)
    given_array[:] = -1
    np.testing.assert_array_equal(cache["a"], np.arange(4096, dtype=np.float32))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.zeros(3), "float64, which JAX would store as float32"),
        ("text", "got str, expected JAX or NumPy arrays"),
        (np.array(["text"]), "Pass an array of numbers"),
        (np.zeros(2, [("a", "f4")]), "Pass an array of numbers"),
        (2**40, "Pass an array of numbers"),
        ({}, "without arrays"),
        ([jnp.ones(2), object()], r"value\[1\]: got object"),
    ],
)
def test_bad_values(value, says):
    cache = DeviceCache(1 << 20)
    cache.put("a", jnp.ones(2))
    with pytest.raises(MemorySettingError, match=says):
        cache.put("a", value)
    np.testing.assert_array_equal(cache["a"], np.ones(2))  # nothing was lost


def test_traced_and_deleted_values():
    cache = DeviceCache(1 << 20)

    @jax.jit
    def traced(x):
        cache.put("a", x)
        return x

    with pytest.raises(MemorySettingError, match="outside of jit"):
        traced(jnp.ones(2))
    gone = jnp.ones(2)
    gone.delete()
    with pytest.raises(MemorySettingError, match="was deleted"):
        cache.put("a", gone)


SHARDED = """
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from capibara.compress.host_arrays import LosslessArrays
from capibara.compilation import create_tpu_optimized_jit, pack_program
from capibara.memory import DeviceCache, MemoryManager, TpuMemoryMonitor, device_budget
from capibara.measure.installation import device_memory_allocated, memory_limit_bytes
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
out = {}
for name, spec in {"rows": P("data"), "both": P("data", "model"), "replicated": P()}.items():
    array = jax.device_put(values, NamedSharding(mesh, spec))
    cache = DeviceCache(1 << 20, codec=LosslessArrays())
    cache.put("a", array)
    size = cache.stats().device_bytes
    one = int(device_memory_allocated(jax.devices()[3]))
    assert one == device_memory_allocated(jax.devices()[3], exact=False)  # with and without looking at the parts
    expected = array.sharding
    del array
    cache.evict()
    gone = int(device_memory_allocated(jax.devices()[3]))
    back = cache["a"]
    out[name] = [size, one - gone, back.sharding == expected, bool((np.asarray(back) == values).all())]
with TpuMemoryMonitor(interval_seconds=0.0002) as monitor:  # counts arrays that are deleted meanwhile
    both = NamedSharding(mesh, P("data", "model"))
    states = {n: jax.device_put(np.zeros((8, 64), np.float32), both) for n in range(20)}
    step = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    for _ in range(100):
        before, states = states, step(states)
        assert before[0].is_deleted()  # looking does not keep a buffer from being donated
out["donated"] = all(bool((np.asarray(a) == 100).all()) for a in states.values())

with jax.default_device(jax.devices()[1]):
    array = jax.numpy.arange(3)
cache = DeviceCache(1 << 20)
cache.put("a", array)
cache.evict()
out["movable"] = [array.committed, cache["a"].committed, cache["a"].device.id]
manager = MemoryManager(1.0)
with manager.managed_context() as scope:
    scope.put(values, NamedSharding(mesh, P("data", "model")))
out["owned"] = scope.report.owned
keys = jax.device_put(jax.random.split(jax.random.key(0), 8), NamedSharding(mesh, P("data")))
with manager.managed_context() as scope:
    out["keys"] = bool((scope.put(keys) == keys).all()) and scope.put(keys).sharding == keys.sharding
out["keys"] = out["keys"] and not keys.is_deleted()
jitted = create_tpu_optimized_jit(lambda x: jax.lax.with_sharding_constraint(x + 1, P("d")))
used = []
for first in (0, 2, 0):
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[first : first + 2]), ("d",))):
        used.append(sorted(device.id for device in jitted(np.ones(4)).devices()))
out["used"] = [used, len(jitted.programs)]
there = NamedSharding(mesh, P("model"))
jitted = create_tpu_optimized_jit(lambda x: x + 1, in_shardings=there)
out["topology"] = pack_program(sys.argv[1], jitted, (np.ones(8),)).environment["topology"]
out["share"] = device_budget().limit * 8 / memory_limit_bytes()
print(json.dumps(out))
"""


def test_sharded_arrays_on_eight_devices(tmp_path):
    env = {**os.environ, "XLA_FLAGS": emulated(8), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED, str(tmp_path / "a")],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    out = json.loads(done.stdout)
    whole = 64 * 64 * 4
    assert out["rows"] == [whole // 2, whole // 2, True, True]
    assert out["both"] == [whole // 8, whole // 8, True, True]
    assert out["replicated"] == [whole, whole, True, True]
    assert out["donated"]
    assert out["movable"] == [False, False, 1]
    assert out["owned"] == whole // 8
    assert out["keys"]
    assert out["used"] == [[[0, 1], [2, 3], [0, 1]], 2]
    assert out["topology"].startswith("8 × cpu")
    assert out["share"] == pytest.approx(1.0)


def test_a_copy_says_its_size():
    copy = HostCopy.of(jnp.ones(8), PlainCopies())
    assert copy.size == 32
