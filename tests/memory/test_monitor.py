"""The monitor and the budget: figures against allocations of known size, thresholds, failures."""

from __future__ import annotations

import gc
import math
import re
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.hardware import live_array_bytes
from capibara.memory import DeviceMemoryError, MemorySettingError, TpuMemoryMonitor, device_budget
from capibara.memory.arguments import GIB
from capibara.memory.holders import memory_holders

MIB = 1 << 20


def mib(count: float) -> jax.Array:
    return jnp.zeros(int(count * MIB / 4), jnp.float32)


def monitor_of(free_mib: float, **options) -> TpuMemoryMonitor:
    """A monitor whose limit leaves so much memory free."""
    gc.collect()
    return TpuMemoryMonitor((live_array_bytes() + free_mib * MIB) / GIB, **options)


class Reporting:
    """A device whose runtime reports its memory, as those of TPUs and GPUs do."""

    platform, device_kind = "tpu", "TPU v4"

    def __init__(self, **stats: int) -> None:
        self.stats = stats

    def memory_stats(self):
        return self.stats

    def __str__(self) -> str:
        return "TPU_0"


def test_budget_from_the_devices_statistics():
    device = Reporting(bytes_in_use=3 * GIB, peak_bytes_in_use=5 * GIB, bytes_limit=31 * GIB)
    budget = device_budget(device)
    assert (budget.limit, budget.in_use(), budget.free()) == (31 * GIB, 3 * GIB, 28 * GIB)
    assert budget.limit.source == "the tpu backend's limit"
    assert budget.in_use().source == "device.memory_stats()['bytes_in_use']"
    assert device_budget(device, 16.0).limit == 16 * GIB
    more = device_budget(device, 64.0).limit
    assert more == 31 * GIB
    assert "less than memory_limit_gb=64" in more.source


def test_budget_of_a_cpu():
    budget = device_budget()
    assert "machine's memory" in budget.limit.source or "control group" in budget.limit.source
    before = budget.in_use()
    held = mib(3)
    assert budget.in_use() - before == 3 * MIB
    assert "live JAX arrays" in str(budget)
    del held
    assert budget.in_use() == before


@pytest.mark.parametrize("limit", [0, -1, math.inf, math.nan, True, "32"])
def test_bad_limits(limit):
    with pytest.raises(MemorySettingError, match="memory_limit_gb: got"):
        device_budget(None, limit)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cleanup_threshold": 0}, "cleanup_threshold: got 0"),
        ({"cleanup_threshold": 85}, "cleanup_threshold: got 85, expected a share"),
        ({"interval_seconds": 0}, "interval_seconds: got 0"),
        ({"keep": 0}, "keep: got 0"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(MemorySettingError, match=says):
        TpuMemoryMonitor(1.0, **options)


def test_metrics_are_measured():
    monitor = monitor_of(100)
    before = live_array_bytes()
    held = mib(10)
    monitor.sample()
    del held
    metrics = monitor.get_metrics()
    assert metrics["peak_memory_gb"] * GIB == pytest.approx(before + 10 * MIB)
    assert metrics["memory_usage_gb"] * GIB == pytest.approx(before)
    assert metrics["memory_usage"] == pytest.approx(before / (before + 100 * MIB), abs=1e-6)
    assert metrics["samples"] == 2
    assert metrics["host_memory_gb"] > 0.01
    monitor.reset()
    assert monitor.get_metrics()["peak_memory_gb"] * GIB == pytest.approx(before)


def test_efficiency_is_mean_over_peak():
    """Against the same figure from the samples, by the trapezoidal rule."""
    monitor = monitor_of(100)
    held = []
    for n in (1, 5, 2, 8):
        held = [mib(n)]
        monitor.sample()
        time.sleep(0.01)
    metrics = monitor.get_metrics()
    assert held
    seconds = np.array([sample.seconds for sample in monitor.samples])
    used = np.array([sample.in_use for sample in monitor.samples])
    mean = np.trapezoid(used, seconds) / (seconds[-1] - seconds[0])
    assert metrics["memory_efficiency"] == pytest.approx(100 * mean / used.max())
    assert 0 < metrics["memory_efficiency"] < 100


def test_the_allocators_peak_is_used_where_it_rose():
    device = Reporting(bytes_in_use=GIB, peak_bytes_in_use=5 * GIB, bytes_limit=31 * GIB)
    monitor = TpuMemoryMonitor(device=device)
    monitor.sample()
    assert monitor.high_water == GIB  # the peak was before
    device.stats["peak_bytes_in_use"] = 6 * GIB
    assert monitor.high_water == 6 * GIB  # between two samples


def test_thresholds_fire_once_an_event():
    monitor = monitor_of(10, cleanup_threshold=0.99)
    base = monitor.sample().usage
    fired = []
    half = base + (1 - base) / 2
    monitor.on_threshold(lambda sample: fired.append(sample.usage), half)
    for expected in (1, 2):
        held = mib(9)
        for _ in range(3):
            monitor.check()
        assert len(fired) == expected
        assert fired[-1] > half
        del held
        monitor.check()


def test_cleanup_frees_or_raises():
    monitor = monitor_of(10, cleanup_threshold=0.9)
    pool = [mib(3) for _ in range(4)]

    def release(nbytes: int) -> None:
        while nbytes > 0 and pool:
            nbytes -= pool.pop().nbytes

    monitor.add_cleanup(release)
    monitor.check()
    assert 0 < len(pool) < 4
    assert monitor.get_metrics()["cleanups"] == 1
    assert monitor.get_metrics()["freed_gb"] * GIB >= 3 * MIB
    stubborn = mib(12)
    with pytest.raises(DeviceMemoryError, match=r"float32\[3145728\].*stubborn") as caught:
        monitor.check()
    assert not pool
    assert caught.value.holders[0].size == 12 * MIB
    assert stubborn.nbytes


def test_what_shares_its_parts_is_looked_through_once():
    """Forty lists, each of which holds the next one twice: 2^40 leaves. And one that holds itself."""
    wanted = mib(5)
    doubled: list[Any] = [{"wanted": wanted}]
    for _ in range(40):
        doubled = [doubled, doubled]
    itself: list[Any] = []
    itself.append(itself)
    (found,) = [each for each in memory_holders(jax.devices()[0]) if each.size == 5 * MIB]
    assert "wanted in test_what_shares" in found.names[0]
    del wanted
    (found,) = [each for each in memory_holders(jax.devices()[0]) if each.size == 5 * MIB]
    assert re.match(r"doubled(\[0\])+\['wanted'\] in test_what_shares", found.names[0])


def test_in_the_background():
    monitor = monitor_of(10, cleanup_threshold=0.5, interval_seconds=0.002)
    seen = []
    monitor.on_threshold(lambda sample: seen.append(sample.in_use))
    with monitor:
        assert monitor.running
        held = mib(9)
        until = time.monotonic() + 20
        while not seen:
            assert time.monotonic() < until
            time.sleep(0.002)
    assert not monitor.running
    assert held.nbytes <= monitor.high_water


def test_failures_in_the_background_are_raised():
    def broken(sample):
        raise KeyError("in the callback")

    monitor = monitor_of(1, cleanup_threshold=0.5, interval_seconds=0.002)
    monitor.on_threshold(broken)
    held = mib(2)
    with pytest.raises(KeyError, match="in the callback"), monitor:
        until = time.monotonic() + 20
        while monitor._failure is None:
            assert time.monotonic() < until
            time.sleep(0.002)
    assert held.nbytes
    monitor = monitor_of(1, cleanup_threshold=0.5, interval_seconds=0.002)
    monitor.on_threshold(broken)
    with pytest.raises(ValueError, match="of the body"), monitor:
        raise ValueError("of the body")


def test_sampling_beside_donating_steps():
    """Arrays are made and deleted while another thread counts them."""
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    steps = 0
    with TpuMemoryMonitor(interval_seconds=0.0005) as monitor:
        x = jnp.zeros(1000)
        while steps < 300 or len(monitor.samples) < 20:
            x = step(x)
            steps += 1
    np.testing.assert_array_equal(x, np.full(1000, steps))


def test_a_low_threshold_fires_again():
    monitor = TpuMemoryMonitor(device=(device := Reporting(bytes_in_use=0, bytes_limit=100 * MIB)))
    fired = []
    monitor.on_threshold(fired.append, 0.04)
    for count, expected in ((5, 1), (3.9, 1), (5, 1), (3.7, 1), (5, 2), (0, 2), (5, 3)):
        device.stats["bytes_in_use"] = int(count * MIB)
        monitor.check()
        assert len(fired) == expected


def test_a_threshold_fires_once_in_two_threads():
    class Slow(float):
        def __lt__(self, usage):
            time.sleep(0.05)
            return float(self) < usage

    monitor = TpuMemoryMonitor(device=Reporting(bytes_in_use=90, bytes_limit=100))
    fired = []
    monitor.on_threshold(fired.append, 0.5)
    monitor._thresholds[0].fraction = Slow(0.5)
    threads = [threading.Thread(target=monitor.check) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fired) == 1
