"""The components that need JAX: each does its work, and counts what it did."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.errors import CompressError
from capibara.compress.system.configuration import SystemConfiguration
from capibara.compress.system.engines import FallbackWarning
from capibara.compress.system.host_tropical import HostTropicalEngine
from capibara.compress.system.jax_compilation import JaxCompilationOptimizer
from capibara.compress.system.jax_devices import JaxConfigAdapter, JaxDeviceManager
from capibara.compress.system.jax_events import JaxPerformanceMonitor
from capibara.compress.system.jax_memory import JaxMemoryOptimizer, JaxMemoryPool
from capibara.compress.system.jax_tropical import JaxTropicalBridge, JaxTropicalEngine
from capibara.compress.system.monitor import MetricType, UnifiedPerformanceMonitor

DEVICE = jax.devices()[0]
RANDOM = np.random.default_rng(0)


def _double(x: Any) -> Any:
    return 2 * x


def _power(x: Any, exponent: int) -> Any:
    return x**exponent


def _rows(x: Any, y: Any) -> Any:
    return jnp.sin(x) @ y


def test_programs_are_kept_and_counted() -> None:
    rates: list[float] = []
    compiler = JaxCompilationOptimizer(2, on_lookup=rates.append)
    assert compiler.hit_rate is None
    np.testing.assert_array_equal(compiler.call(_double, np.arange(3)), [0, 2, 4])
    np.testing.assert_array_equal(compiler.call(_double, np.arange(3)), [0, 2, 4])
    np.testing.assert_array_equal(compiler.call(_power, np.arange(3), exponent=2), [0, 1, 4])
    np.testing.assert_array_equal(compiler.call(_power, np.arange(3), exponent=3), [0, 1, 8])
    assert (compiler.hits, compiler.misses, compiler.evictions, len(compiler)) == (1, 3, 1, 2)
    assert rates == [0, 1 / 2, 1 / 3, 1 / 4]
    compiler.call(_double, np.arange(3))  # it was evicted
    assert compiler.misses == 4
    compiler.call(_double, np.arange(3.0, dtype=np.float32))  # another type
    assert compiler.misses == 5
    assert compiler.seconds > 0
    compiler.clear()
    assert len(compiler) == 0


def test_a_cache_of_none_and_bad_arguments() -> None:
    compiler = JaxCompilationOptimizer(0)
    for _ in range(2):
        compiler.call(_double, np.arange(3))
    assert (compiler.hits, compiler.misses, len(compiler)) == (0, 2, 0)
    with pytest.raises(CompressError, match="size: got -1"):
        JaxCompilationOptimizer(-1)
    with pytest.raises(CompressError, match="can be hashed"):
        compiler.call(_power, np.arange(3), exponent=[2])  # type: ignore[arg-type]


def test_64_bits_in_the_systems_own_programs_only() -> None:
    wide = JaxCompilationOptimizer(4, enable_x64=True)
    assert wide.call(_double, np.arange(3.0)).dtype == np.float64
    assert not jax.config.read("jax_enable_x64")
    assert JaxCompilationOptimizer(4).call(_double, np.arange(3.0)).dtype == np.float32


def test_the_pool_keeps_what_fits() -> None:
    pool = JaxMemoryPool(DEVICE, limit=100)
    arrays = [jnp.full(10, i, jnp.float32) for i in range(3)]
    assert pool.put("a", arrays[0])
    assert pool.put("b", arrays[1])
    assert pool.get("a") is arrays[0]
    assert pool.put("c", arrays[2])  # b was used longest ago
    assert pool.get("b") is None
    assert pool.get("a") is arrays[0]
    assert (pool.held_bytes, pool.hits, pool.misses, pool.evictions) == (80, 2, 1, 1)
    assert not pool.put("d", jnp.zeros(26, jnp.float32))
    assert pool.put("a", arrays[2])
    assert pool.held_bytes == 80
    arrays[2].delete()
    assert pool.get("a") is None
    pool.clear()
    assert pool.held_bytes == 0
    with pytest.raises(CompressError, match="limit: got -1"):
        JaxMemoryPool(DEVICE, limit=-1)


def test_the_limit_is_a_share_of_the_hosts_memory_on_a_cpu() -> None:
    if DEVICE.platform != "cpu":
        pytest.skip("an accelerator's allocator has its own limit")
    whole, half = (JaxMemoryPool(DEVICE, fraction=f).limit for f in (1.0, 0.5))
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    groups = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
    limits = [path.read_text().strip() for path in groups if path.exists()]
    there = min([installed, *(int(text) for text in limits if text.isdigit())])
    assert whole == there // len(jax.devices())  # CPU devices share it
    assert half == whole // 2


class _FreePool(JaxMemoryPool):
    """A pool on a device with nothing else on it."""

    def in_use_bytes(self) -> int:
        return 0


@pytest.mark.parametrize("rows", [1, 7, 64, 101])
def test_programs_run_in_the_memory_that_there_is(rows: int) -> None:
    x = jnp.asarray(RANDOM.normal(size=(rows, 64)), jnp.float32)
    y = jnp.asarray(RANDOM.normal(size=(64, 32)), jnp.float32)
    compiler = JaxCompilationOptimizer()
    roomy = JaxMemoryOptimizer(_FreePool(DEVICE, limit=1 << 30), compiler)
    tight = JaxMemoryOptimizer(_FreePool(DEVICE, limit=10_000), compiler)
    expected = np.sin(np.asarray(x)) @ np.asarray(y)
    np.testing.assert_allclose(roomy.run(_rows, x, y), expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(tight.run(_rows, x, y), expected, rtol=2e-4, atol=2e-4)
    assert roomy.last_pieces == 1
    free = 10_000 + x.nbytes + y.nbytes
    fits = tight.estimate(_rows, x, y) <= free
    assert (tight.last_pieces == 1) == fits
    if rows == 101:
        assert tight.last_pieces > 1


def test_an_estimate_is_at_least_what_goes_in_and_out() -> None:
    memory = JaxMemoryOptimizer(JaxMemoryPool(DEVICE, limit=1 << 20), JaxCompilationOptimizer())
    x, y = jax.ShapeDtypeStruct((50, 20), np.float32), jax.ShapeDtypeStruct((20, 30), np.float32)
    assert memory.estimate(_rows, x, y) >= 4 * (50 * 20 + 20 * 30 + 50 * 30)


def test_a_row_that_does_not_fit() -> None:
    def wide(x: Any) -> Any:
        return jnp.tile(x, (1, 1000))

    memory = JaxMemoryOptimizer(_FreePool(DEVICE, limit=100), JaxCompilationOptimizer())
    with pytest.raises(CompressError, match="one row of"):
        memory.run(wide, jnp.ones((4, 10), jnp.float32))


def test_devices() -> None:
    manager = JaxDeviceManager(SystemConfiguration(jax_backend="cpu"))
    assert manager.platform == "cpu"
    assert not manager.is_accelerated
    assert len(manager.devices) == 1
    parts = manager.split(np.arange(5))
    assert [p.tolist() for p in parts] == [[0, 1, 2, 3, 4]]
    with pytest.warns(FallbackWarning, match="9999 wanted, JAX has"):
        found = JaxDeviceManager(SystemConfiguration(jax_parallel_devices=9999))
    assert len(found.devices) == len(jax.local_devices())


@pytest.mark.slow
def test_several_devices_share_a_product() -> None:
    code = """
import numpy as np, jax
from capibara.compress.system import SystemConfiguration, SystemIntegrationCoordinator
with SystemIntegrationCoordinator(SystemConfiguration(jax_backend="cpu", jax_parallel_devices=3)) as system:
    manager = system.get_component("jax_device_manager")
    assert len(manager.devices) == 3
    a = np.random.default_rng(0).normal(size=(8, 5)).astype("float32")
    parts = manager.split(a)
    assert [len(p) for p in parts] == [3, 3, 2]
    assert [next(iter(p.devices())).id for p in parts] == [0, 1, 2]
    out = system.get_component("jax_tropical_engine").matmul(a, a.T)
    assert np.allclose(out, (a[:, None] + a[None]).max(-1))
    assert system.get_component("jax_compilation_optimizer").misses == 3
    one = system.get_component("jax_tropical_engine").matmul(a[:1], a.T)
    assert np.allclose(one, out[:1])
    several = system.get_component("jax_tropical_engine").matmul(a, np.stack([a.T, -a.T]))
    assert several.shape == (2, 8, 8) and np.allclose(several[0], out)
"""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": emulated(4),
    }
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True,
                          timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_memory_fraction_is_in_the_environment_before_a_device_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, old = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
    for each in (name, old):
        monkeypatch.delenv(each, raising=False)
    adapter = JaxConfigAdapter(SystemConfiguration(jax_memory_fraction=0.4))
    adapter.apply()
    assert os.environ[name] == "0.4"
    assert adapter.describe()["memory_fraction_from"] == "the configuration"
    other = JaxConfigAdapter(SystemConfiguration(jax_memory_fraction=0.9))
    other.apply()  # what stands there is the operator's word
    assert os.environ[name] == "0.4"
    assert "0.4" in other.describe()["memory_fraction_from"]
    monkeypatch.delenv(name)
    # JAX starts no GPU where both are set.
    monkeypatch.setenv(old, "0.5")
    other.apply()
    assert name not in os.environ
    assert f"{old}=0.5" in other.describe()["memory_fraction_from"]


def test_the_scope_of_64_bits() -> None:
    with JaxConfigAdapter(SystemConfiguration(jax_enable_x64=True)).scope():
        assert jnp.zeros(1).dtype == np.float64
    with JaxConfigAdapter(SystemConfiguration()).scope():
        assert jnp.zeros(1).dtype == np.float32


def _engine() -> JaxTropicalEngine:
    devices = JaxDeviceManager(SystemConfiguration())
    compiler = JaxCompilationOptimizer()
    return JaxTropicalEngine(
        devices, compiler, JaxMemoryOptimizer(JaxMemoryPool(devices.devices[0]), compiler)
    )


@pytest.fixture(scope="module")
def engine() -> JaxTropicalEngine:
    return _engine()


def _product(a: np.ndarray, b: np.ndarray, semiring: str) -> np.ndarray:
    out = np.empty((len(a), b.shape[1]), np.float32)
    zero = -np.inf if semiring == "max_plus" else np.inf
    for i in range(len(a)):
        for j in range(b.shape[1]):
            terms = [zero if zero in (x, y) else x + y for x, y in zip(a[i], b[:, j], strict=True)]
            out[i, j] = (max if semiring == "max_plus" else min)([*terms, zero])
    return out


@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 4), (4, 0, 2), (0, 3, 2)])
def test_tropical_products_on_every_engine(
    engine: JaxTropicalEngine, semiring: str, shape: tuple[int, int, int]
) -> None:
    rows, inner, columns = shape
    a = RANDOM.normal(size=(rows, inner)).astype(np.float32)
    b = RANDOM.normal(size=(inner, columns)).astype(np.float32)
    if (rows, inner) == (5, 3):
        a[0, 0], b[0, 1], b[1, 1] = -np.inf, np.inf, -np.inf
    expected = _product(a, b, semiring)
    engines = [engine, HostTropicalEngine("numpy")]
    for each in engines:
        np.testing.assert_array_equal(np.asarray(each.matmul(a, b, semiring=semiring)), expected)
    torch = pytest.importorskip("torch")
    host = HostTropicalEngine("torch")
    np.testing.assert_array_equal(host.matmul(a, b, semiring=semiring), expected)
    out = host.matmul(torch.from_numpy(a), torch.from_numpy(b), semiring=semiring)
    np.testing.assert_array_equal(out.numpy(), expected)


@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6), n=st.integers(0, 4), negative=st.booleans())
def test_closures_on_every_engine(engine: JaxTropicalEngine, seed: int, n: int, negative: bool) -> None:
    random = np.random.default_rng(seed)
    weights = random.integers(-4, 0 if negative else 3, (n, n)).astype(np.float32)
    weights[random.random((n, n)) < 0.4] = -np.inf
    expected = np.asarray(engine.closure(weights))
    np.testing.assert_array_equal(HostTropicalEngine("numpy").closure(weights), expected)
    torch = pytest.importorskip("torch")
    np.testing.assert_array_equal(
        HostTropicalEngine("torch").closure(torch.from_numpy(weights)).numpy(), expected
    )
    flipped = HostTropicalEngine("numpy").closure(-weights, semiring="min_plus")
    np.testing.assert_array_equal(flipped, -expected)


@pytest.mark.parametrize("semiring", ["max_plus", "min_plus"])
def test_polynomials_on_every_engine(engine: JaxTropicalEngine, semiring: str) -> None:
    coefficients = RANDOM.integers(-5, 5, 6).astype(np.float32)
    x = RANDOM.integers(-3, 4, (4, 5)).astype(np.float32)
    terms = coefficients + np.arange(6) * x[..., None]
    expected = terms.max(-1) if semiring == "max_plus" else terms.min(-1)
    np.testing.assert_array_equal(engine.polyval(coefficients, x, semiring=semiring), expected)
    host = HostTropicalEngine("numpy")
    np.testing.assert_array_equal(host.polyval(coefficients, x, semiring=semiring), expected)
    torch = pytest.importorskip("torch")
    out = host.polyval(torch.from_numpy(coefficients), torch.from_numpy(x), semiring=semiring)
    np.testing.assert_array_equal(out.numpy(), expected)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.matmul(np.zeros((2, 3)), np.zeros((2, 3))), "b: got shape"),
        (lambda e: e.matmul(np.zeros(3), np.zeros((2, 3))), "a: got float64"),
        (lambda e: e.matmul(np.zeros((2, 3), int), np.zeros((3, 3))), "a: got int64"),
        (
            lambda e: e.matmul(np.zeros((2, 3)), np.zeros((3, 3)), semiring="max-plus"),
            "Did you mean 'max_plus'",
        ),
        (lambda e: e.closure(np.zeros((2, 3))), "expected a square"),
        (lambda e: e.polyval(np.zeros(0), np.zeros(3)), "at least one"),
        (lambda e: HostTropicalEngine("jax"), "name: got 'jax'"),
    ],
)
def test_bad_arguments_of_the_hosts_engine(call: Any, words: str) -> None:
    with pytest.raises(CompressError) as caught:
        call(HostTropicalEngine("numpy"))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "bfloat16", "float16", "int64", "int8", "uint8", "bool"]
)
def test_the_bridge_keeps_numbers_and_types(engine: JaxTropicalEngine, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    bridge = JaxTropicalBridge(engine)
    tensor = (torch.arange(24).reshape(4, 6) * 0.75).to(getattr(torch, dtype))
    for each in (tensor, tensor.T, tensor[::2], tensor[:0], tensor[1, 2], tensor[:1].expand(3, 6)):
        array = bridge.to_jax(each)
        assert (array.shape, array.dtype) == (tuple(each.shape), jnp.dtype(dtype))
        back = bridge.to_torch(array)
        assert back.dtype == each.dtype
        assert torch.equal(back, each)


def test_the_bridge_shares_memory(engine: JaxTropicalEngine) -> None:
    torch = pytest.importorskip("torch")
    bridge = JaxTropicalBridge(engine)
    tensor = torch.ones(64, 64)
    array = bridge.to_jax(tensor)
    assert (bridge.shared, bridge.copies) == (1, 0)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr()
    assert bridge.to_torch(array).data_ptr() == tensor.data_ptr()
    bridge.to_jax(tensor[::2])
    assert (bridge.shared, bridge.copies) == (2, 1)
    with pytest.raises(CompressError, match="tensor: got ndarray"):
        bridge.to_jax(np.ones(3))


def test_tropical_operations_over_the_bridge(engine: JaxTropicalEngine) -> None:
    torch = pytest.importorskip("torch")
    bridge = JaxTropicalBridge(engine)
    a = torch.randn(7, 5, requires_grad=True)
    out = bridge.matmul(a, a.T)
    torch.testing.assert_close(out, (a[:, None] + a[None]).amax(-1).detach())
    square = -torch.rand(4, 4)
    torch.testing.assert_close(bridge.closure(square), HostTropicalEngine("torch").closure(square))
    assert bridge.polyval(torch.zeros(3), torch.tensor([2.0])).tolist() == [4.0]


def test_the_monitor_hears_what_jax_does() -> None:
    monitor = UnifiedPerformanceMonitor()
    compiler, pool = JaxCompilationOptimizer(), JaxMemoryPool(DEVICE, limit=1 << 30)
    performance = JaxPerformanceMonitor(monitor, pool, compiler)
    compiler.on_lookup = performance.looked_up
    jax.jit(lambda x: x - 3)(1.0)
    assert monitor.latest(MetricType.JAX_COMPILATION) is None  # not started yet
    performance.start()
    assert {t.metric for t in monitor.thresholds} == {
        MetricType.JAX_COMPILATION,
        MetricType.JAX_CACHE_HITS,
        MetricType.JAX_MEMORY_POOL,
    }
    jax.jit(lambda x: x * 3 + 1)(1.0)
    compiled = monitor.statistics(MetricType.JAX_COMPILATION)
    assert compiled is not None
    assert compiled.last > 0
    for _ in range(4):
        compiler.call(_double, np.arange(7))
    assert monitor.latest(MetricType.JAX_CACHE_HITS) == 3 / 4
    kept = jnp.ones(1 << 18, jnp.float32)
    used = performance.sample()
    assert monitor.latest(MetricType.JAX_MEMORY_POOL) == used
    assert used >= kept.nbytes / (1 << 20)
    performance.stop()
    before = monitor.statistics(MetricType.JAX_COMPILATION)
    jax.jit(lambda x: x * 5 + 2)(1.0)
    assert monitor.statistics(MetricType.JAX_COMPILATION) == before


@pytest.mark.slow
def test_the_persistent_cache_is_counted(tmp_path: Any) -> None:
    code = """
import sys, jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
from capibara.compress.system import SystemIntegrationCoordinator
with SystemIntegrationCoordinator() as system:
    jax.jit(lambda x: x * 5 + 2)(1.0)
    facts = system.get_component("jax_performance_monitor").describe()
print(facts["disk_hits"] > 0, facts["disk_misses"] > 0)
"""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    said = [
        subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, capture_output=True, text=True,
                       timeout=300, check=True).stdout.split()
        for _ in range(2)
    ]  # fmt: skip
    assert said[0] == ["False", "True"]
    assert said[1][0] == "True"
