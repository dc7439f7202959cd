"""The manager: what a context owns goes back, thresholds evict, and what cannot be freed is named."""

from __future__ import annotations

import contextlib
import gc
import threading

import jax
import numpy as np
import pytest

from capibara.compress.device_memory import TpuMemoryManager
from capibara.hardware import live_array_bytes
from capibara.memory import DeviceMemoryError, MemoryManager, MemoryPressureWarning, MemorySettingError
from capibara.memory.arguments import GIB
from capibara.memory.feeding import bytes_on_a_device

MIB = 1 << 20


def mib(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random(count * MIB // 4, np.float32)


def on_device(count: int) -> jax.Array:
    return jax.block_until_ready(jax.device_put(mib(count), may_alias=False))


def manager_of(
    free_mib: float, kind=TpuMemoryManager, cleanup_threshold: float = 0.85, **options
) -> MemoryManager:
    """With a limit whose threshold leaves room for what other tests hold, and for its part of ``free_mib``."""
    gc.collect()
    limit = live_array_bytes() / cleanup_threshold + free_mib * MIB
    return kind(limit / GIB, cleanup_threshold, interval_seconds=0.005, **options)


def test_what_a_context_owns_goes_back():
    manager = manager_of(100)
    before = live_array_bytes()
    with manager.managed_context() as scope:
        x = scope.put(mib(4))
        y = scope.own(on_device(2))
        kept = scope.keep(scope.put(mib(1, seed=3)))
        result = x.sum() + y.sum()
        cache = scope.create_cache(8 / 1024)
        cache.put("a", mib(3))
        assert live_array_bytes() - before >= 10 * MIB
    assert x.is_deleted()
    assert y.is_deleted()
    assert live_array_bytes() - before == MIB + result.nbytes  # the result, and what was kept
    np.testing.assert_array_equal(kept, mib(1, seed=3))
    np.testing.assert_allclose(result, mib(4).sum() + mib(2).sum(), rtol=1e-3)
    report = scope.report
    assert report is not None
    assert manager.last_report is report
    assert report.before == before
    assert report.after == live_array_bytes()
    assert report.high_water >= before + 10 * MIB
    assert report.owned == 6 * MIB
    assert "live JAX arrays" in str(report)
    with pytest.raises(MemorySettingError, match="has ended"):
        scope.put(mib(1))


def test_high_water_mark():
    manager = manager_of(100)
    with manager.managed_context() as scope:
        x = scope.put(mib(20))
        scope.check()
        x.delete()
    report = scope.report
    assert report is not None
    assert report.high_water - report.before == 20 * MIB
    assert report.host_high_water is not None
    assert report.host_high_water > 20 * MIB


def test_freed_even_if_the_body_fails():
    manager, put = manager_of(100), []
    with pytest.raises(ZeroDivisionError), manager.managed_context() as scope:
        put.append(scope.put(mib(4)))
        raise ZeroDivisionError
    assert put[0].is_deleted()
    assert not manager.monitor.running
    with (
        pytest.raises(MemorySettingError, match="got int, expected JAX arrays"),
        manager.managed_context() as scope,
    ):
        scope.own(3)


@pytest.mark.thin(2)
@pytest.mark.parametrize("compression_enabled", [True, False])
def test_evicts_at_the_threshold(compression_enabled):
    manager = manager_of(20, cleanup_threshold=0.5, compression_enabled=compression_enabled)
    threshold = 0.5 * manager.budget.limit
    cache = manager.create_cache(16 / 1024)
    values = {n: mib(2, seed=n) for n in range(8)}
    with manager.managed_context() as scope:
        for n, value in values.items():
            cache.put(n, value)
            scope.check()
            assert live_array_bytes() <= threshold
    assert scope.report is not None
    assert scope.report.evicted >= 4 * MIB
    evicted = manager.get_metrics()["evicted_gb"]
    assert evicted is not None
    assert evicted > 0
    stats = cache.stats()
    assert stats.cold_entries > 0
    assert stats.compression_ratio is not None
    assert (stats.compression_ratio > 1.05) is compression_enabled
    for n, value in values.items():
        assert np.asarray(cache[n]).tobytes() == value.tobytes()
    cache.close()


def test_reserve_makes_room_or_names_who_has_it():
    manager = manager_of(20, cleanup_threshold=1)
    cache = manager.create_cache(16 / 1024, name="activations")
    cache.put("block 3", mib(12))
    manager.reserve(15 * MIB)
    assert not cache.is_hot("block 3")
    weights = {"layers": [on_device(12)]}
    with pytest.raises(DeviceMemoryError) as caught:
        manager.reserve(10 * MIB)
    text = str(caught.value)
    assert "no room for 10.00 MiB more" in text
    assert "weights['layers'][0] in test_reserve_makes_room_or_names_who_has_it" in text
    assert 12 * MIB in {holder.size for holder in caught.value.holders}
    assert isinstance(caught.value, MemoryError)
    del weights
    cache.put("block 3", mib(12))
    with cache.pinned("block 3"), pytest.raises(DeviceMemoryError, match=r"activations\['block 3'\]"):
        manager.reserve(10 * MIB)
    cache.close()
    with pytest.raises(MemorySettingError, match="nbytes: got -1"):
        manager.reserve(-1)


def test_a_context_that_ends_above_the_threshold_raises():
    manager = manager_of(20, cleanup_threshold=0.5)
    kept = []
    with (
        pytest.raises(DeviceMemoryError, match="50% of the limit are exceeded"),
        manager.managed_context() as scope,
    ):
        kept.append(on_device(18))
    assert scope.report is not None


def exceed_for_a_while(manager: MemoryManager) -> jax.Array:
    with manager.managed_context() as scope:
        x = scope.own(on_device(18))
        manager.monitor._tried = -1  # whether or not the background has seen it already
        for _ in range(2):
            manager.monitor._act()
    return x


def test_a_threshold_exceeded_for_a_while_warns():
    manager = manager_of(20, cleanup_threshold=0.5)
    with pytest.warns(MemoryPressureWarning, match="50% of the limit"):
        x = exceed_for_a_while(manager)
    assert x.is_deleted()


def test_reference_cycles_are_collected():
    manager = manager_of(20, cleanup_threshold=0.5)
    gc.disable()
    try:
        cycle: list[object] = [on_device(18)]
        cycle.append(cycle)
        del cycle
        assert manager.cleanup() >= 18 * MIB
    finally:
        gc.enable()


def test_other_releases_come_after_the_caches():
    manager = manager_of(20, cleanup_threshold=0.5)
    cache = manager.create_cache(16 / 1024)
    cache.put("a", mib(4))
    own = [on_device(8), on_device(4)]
    asked = []

    def release(nbytes):
        asked.append(nbytes)
        own.pop(0)

    manager.add_release(release)
    manager.cleanup()
    assert not cache.is_hot("a")
    assert len(asked) == 1
    assert len(own) == 1
    cache.close()


def test_out_of_memory_names_the_holders():
    manager = manager_of(100)
    params = on_device(6)
    says = r"(?s)no memory left \(RESOURCE_EXHAUSTED.*params in test_out_of"
    with pytest.raises(DeviceMemoryError, match=says), manager.managed_context():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 12 bytes\nmore")
    assert params.nbytes


def test_prefetch_keeps_order_and_copies():
    manager = manager_of(100)
    buffer = np.zeros(MIB // 4, np.float32)

    def batches():
        for n in range(5):
            buffer[:] = n  # reused, as readers do
            yield {"x": buffer}

    with manager.managed_context() as scope:
        seen = [float(batch["x"][-1]) for batch in scope.prefetch(batches(), depth=1)]
    assert seen == [0, 1, 2, 3, 4]

    def failing():
        yield np.ones(2)
        raise OSError("the disk is gone")

    with manager.managed_context() as scope:
        items = iter(scope.prefetch(failing()))
        np.testing.assert_array_equal(next(items), np.ones(2))
        with pytest.raises(OSError, match="the disk is gone"):
            next(items)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("capibara-feed")]


def test_prefetch_switched_off():
    manager = manager_of(100, prefetch_enabled=False)
    read = []

    def batches():
        for n in range(3):
            read.append(n)
            yield np.full(2, n)

    with manager.managed_context() as scope:
        items = iter(scope.prefetch(batches()))
        next(items)
        assert read == [0]
    assert manager.create_cache(1 / 1024).prefetch_depth == 0


def test_nested_contexts():
    manager = manager_of(100)
    with manager.managed_context() as outer:
        a = outer.put(mib(1))
        with manager.managed_context() as inner:
            b = inner.put(mib(2))
        assert b.is_deleted()
        assert not a.is_deleted()
        assert manager.monitor.running
    assert a.is_deleted()
    assert not manager.monitor.running


def test_nested_contexts_have_high_water_marks_of_their_own():
    manager = manager_of(100)
    base = live_array_bytes()
    with manager.managed_context() as outer:
        large = outer.put(mib(8))
        outer.check()
        large.delete()
        with manager.managed_context() as inner:
            inner.put(mib(2))
        assert inner.report is not None
        assert inner.report.high_water == base + 2 * MIB
        outer.put(mib(3))
    assert outer.report is not None
    assert outer.report.high_water == base + 8 * MIB


def test_a_context_that_begins_as_the_last_one_ends_is_watched(monkeypatch):
    manager = manager_of(100)
    stop = manager.monitor.stop
    with contextlib.ExitStack() as other:

        def begin_and_stop(**options):
            monkeypatch.undo()
            other.enter_context(manager.managed_context())
            stop(**options)

        monkeypatch.setattr(manager.monitor, "stop", begin_and_stop)
        with manager.managed_context():
            pass
        assert manager.monitor.running
    assert not manager.monitor.running


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cleanup_threshold": 1.5}, "cleanup_threshold: got 1.5"),
        ({"prefetch_enabled": "no"}, "prefetch_enabled: got 'no'"),
        ({"compression_enabled": 2}, "compression_enabled: got 2"),
        ({"memory_limit_gb": "32"}, "memory_limit_gb: got '32'"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(MemorySettingError, match=says):
        TpuMemoryManager(**options)
    with pytest.raises(MemorySettingError, match="more than the limit"):
        TpuMemoryManager(1.0).create_cache(2.0)


def test_what_is_put_and_fetched_is_a_copy():
    """The argument is the caller's, even if device_put would return it or an alias of it."""
    manager = manager_of(100)
    x, y = on_device(1), on_device(1)
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    with manager.managed_context() as scope:
        copies = [scope.put(x), scope.put(x, sharding), *map(scope.own, scope.prefetch([x, y]))]
    assert all(copy.is_deleted() for copy in copies)
    np.testing.assert_array_equal(x, y)


def test_what_is_lent_does_not_count_as_freed():
    manager = manager_of(20, cleanup_threshold=0.5)
    cache = manager.create_cache(16 / 1024)
    cache.put("a", mib(12))
    held = cache["a"]
    other = [on_device(6)]
    manager.add_release(lambda nbytes: other.clear())
    with pytest.raises(DeviceMemoryError):  # 12 MiB are in use still, and it has tried everything
        manager.cleanup()
    assert other == []
    assert held.nbytes
    cache.close()


def test_a_reservation_counts_what_is_on_one_device():
    mesh = jax.sharding.AbstractMesh((4,), ("d",))
    parts = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = np.zeros((8, 2), np.float32)
    assert bytes_on_a_device([x, x], parts) == 32
    assert bytes_on_a_device({"a": x, "b": [x]}, {"a": whole, "b": parts}) == 80
    assert bytes_on_a_device([x, 3], jax.devices()[0]) == 64
    assert bytes_on_a_device(jax.random.key(0)) == 8


@pytest.mark.thin(2)
@pytest.mark.parametrize("enabled", [True, False])
def test_prefetching_reserves_and_refuses_a_depth_below_one(enabled):
    manager = manager_of(2, cleanup_threshold=1, prefetch_enabled=enabled)
    with manager.managed_context() as scope:
        with pytest.raises(MemorySettingError, match="depth: got 0"):
            scope.prefetch([mib(1)], depth=0)
        with pytest.raises(DeviceMemoryError, match=r"no room for 3\.00 MiB"):
            next(iter(scope.prefetch([mib(3)])))
