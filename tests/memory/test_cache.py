"""The cache beyond its model: threads, prefetching, donation, the host's limit, arguments."""

from __future__ import annotations

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from capibara.compress.device_memory import create_optimized_cache
from capibara.compress.host_arrays import LosslessArrays
from capibara.hardware import live_array_bytes
from capibara.memory import CacheFullError, DeviceCache, ItemTooLargeError, MemorySettingError

KIB = 1024


def kib(seed: int, count: int = 1) -> jax.Array:
    """Random arrays of whole KiB."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=256 * count).astype(np.float32))


def wait_for(condition, seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def test_evicted_memory_goes_back():
    gc.collect()
    before = live_array_bytes()
    cache = DeviceCache(8 * KIB, codec=LosslessArrays())
    for n in range(20):
        cache.put(n, kib(n))
        assert live_array_bytes() - before <= 9 * KIB  # and the one that is being made
    assert live_array_bytes() - before == 8 * KIB
    cache.evict()
    assert live_array_bytes() == before
    cache.clear()
    assert len(cache) == 0


def test_lent_memory_is_counted():
    cache = DeviceCache(4 * KIB)
    cache.put("a", kib(0, 2))
    held = cache["a"]
    assert cache.evict() == 2 * KIB
    assert cache.stats().lent_bytes == 2 * KIB
    np.testing.assert_array_equal(held, kib(0, 2))  # the caller's array is not touched
    del held
    assert cache.stats().lent_bytes == 0


def test_too_large_is_a_clear_error():
    cache = DeviceCache(4 * KIB, name="layers")
    with pytest.raises(ItemTooLargeError, match=r"'w' takes 5.00 KiB .* more than the 4.00 KiB of layers"):
        cache.put("w", kib(0, 5))
    assert "w" not in cache


def test_full_host_loses_nothing():
    cache = DeviceCache(2 * KIB, host_bytes=KIB + 100)
    values = [kib(n) for n in range(4)]
    for n in range(3):
        cache.put(n, values[n])
    with pytest.raises(CacheFullError, match="Raise host_bytes"):
        cache.put(3, values[3])
    assert 3 not in cache
    for n in (1, 2):
        np.testing.assert_array_equal(cache[n], values[n])
    assert cache.stats().cold_entries == 1
    with pytest.raises(CacheFullError):
        cache.evict()
    assert cache.remove(0)
    cache.put(3, values[3])
    np.testing.assert_array_equal(cache[3], values[3])


def test_a_donated_entry_is_a_miss():
    cache = DeviceCache(4 * KIB)
    cache.put("a", kib(0))
    jax.jit(lambda x: x + 1, donate_argnums=0)(cache["a"])
    assert cache.get("a") is None
    cache.put("b", kib(1))
    jax.jit(lambda x: x + 1, donate_argnums=0)(cache["b"])
    assert cache.evict() >= 0
    assert cache.stats().lost == 2
    assert cache.stats().device_bytes == 0


def test_get_or_load():
    cache = DeviceCache(4 * KIB)
    calls = []

    def load():
        calls.append(1)
        return kib(0)

    for _ in range(3):
        np.testing.assert_array_equal(cache.get_or_load("a", load), kib(0))
    assert len(calls) == 1
    assert (cache.stats().misses, cache.stats().hits) == (1, 2)


def test_get_or_load_returns_what_another_thread_drops_at_once():
    class Dropping(DeviceCache):
        def put(self, key, value):
            stored = super().put(key, value)
            self.evict()
            return stored

    cache = Dropping(4 * KIB, keep_cold=False)
    np.testing.assert_array_equal(cache.get_or_load("a", lambda: np.ones(3, np.float32)), np.ones(3))
    assert "a" not in cache


def test_prefetch_brings_back_what_was_asked():
    cache = DeviceCache(4 * KIB, codec=LosslessArrays())
    for n in range(4):
        cache.put(n, kib(n))
    cache.evict()
    cache.prefetch([0, 1, "unknown"])
    wait_for(lambda: cache.is_hot(0) and cache.is_hot(1))
    assert not cache.is_hot(2)
    np.testing.assert_array_equal(cache[1], kib(1))
    stats = cache.stats()
    assert (stats.prefetches, stats.prefetch_hits, stats.hits, stats.cold_hits) == (2, 1, 1, 0)
    cache.close()


def test_a_loop_over_more_than_fits_is_learnt():
    """Least recently used evicts just what comes next; what followed last time is brought back ahead."""
    cache = DeviceCache(4 * KIB, codec=LosslessArrays(), prefetch_depth=1)
    for n in range(8):
        cache.put(n, kib(n))
    for n in range(8):  # the first turn teaches
        cache[n]
    cold = cache.stats().cold_hits
    assert cold == 8
    for turn in range(2):
        for n in range(8):
            if turn or n:  # what follows the last of the first turn is not known yet
                wait_for(lambda n=n: cache.is_hot(n))
            np.testing.assert_array_equal(cache[n], kib(n))
    assert cache.stats().cold_hits <= cold + 1
    assert cache.stats().prefetch_hits >= 15
    cache.close()


def test_prefetch_does_not_displace_what_is_used_now():
    cache = DeviceCache(2 * KIB, prefetch_depth=0)
    cache.put("big", kib(0, 2))
    cache.put("now", kib(1, 2))
    cache["now"]
    assert not cache.is_hot("big")
    cache.prefetch(["big"])
    assert cache._worker is not None
    cache._worker.shutdown(wait=True)
    assert cache.is_hot("now")
    assert not cache.is_hot("big")


def test_a_failing_codec_is_told_and_loses_nothing():
    class Failing(LosslessArrays):
        broken = False

        def decode(self, data, dtype, shape):
            if self.broken:
                raise OSError("no memory for it")
            return super().decode(data, dtype, shape)

    codec = Failing()
    cache = DeviceCache(4 * KIB, codec=codec)
    cache.put("a", kib(0))
    cache.evict()
    codec.broken = True
    cache.prefetch(["a"])
    with pytest.raises(OSError, match="no memory for it"):
        cache["a"]
    codec.broken = False
    np.testing.assert_array_equal(cache["a"], kib(0))
    assert cache.stats().device_bytes == KIB
    cache.close()


@pytest.mark.parametrize("policy", ["lru", "lfu"])
@pytest.mark.parametrize("depth", [0, 2])
def test_threads(policy, depth):
    """Many threads at once: every value is the right one, and the bound holds at every moment."""
    cache = DeviceCache(6 * KIB, policy=policy, prefetch_depth=depth, codec=LosslessArrays())
    values = {n: np.asarray(kib(n, 1 + n % 3)) for n in range(12)}
    for n, value in values.items():
        cache.put(n, value)
    errors: list[BaseException] = []
    one_pin = threading.Lock()  # several could fill the cache, which is an error
    done = threading.Event()

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(120):
                n = int(rng.integers(12))
                action = rng.integers(10)
                if action == 0:
                    cache.put(n, values[n])
                elif action == 1:
                    cache.evict(int(rng.integers(3)) * KIB)
                elif action == 2:
                    with one_pin, cache.pinned(n) as found:
                        np.testing.assert_array_equal(found, values[n])
                else:
                    np.testing.assert_array_equal(cache[n], values[n])
        except BaseException as error:
            errors.append(error)

    def watch() -> None:
        while not done.is_set():
            if cache.stats().device_bytes > 6 * KIB:
                errors.append(AssertionError(cache.stats()))
            time.sleep(0.001)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    watcher = threading.Thread(target=watch)
    for thread in [*threads, watcher]:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    done.set()
    watcher.join()
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not errors, errors[0]
    cache.close()
    stats = cache.stats()
    assert (stats.device_bytes, stats.host_bytes, stats.entries) == (0, 0, 0)


def test_pins_that_fill_the_cache():
    cache = DeviceCache(2 * KIB, name="weights")
    cache.put("a", kib(0, 2))
    with cache.pinned("a"), pytest.raises(CacheFullError, match=r"2\.00 KiB of 2\.00 KiB are pinned"):
        cache.put("b", kib(1))
    cache.put("b", kib(1))
    assert cache.is_hot("b")


def test_host_memory_instead_of_the_devices():
    cache = create_optimized_cache(0.001, use_hbm=False, prefetch_enabled=False)
    cache.put("a", kib(0))
    found = cache["a"]
    assert found.sharding.memory_kind == jax.devices()[0].default_memory().kind
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(found), kib(0) + 1)


def test_closed():
    with DeviceCache(KIB) as cache:
        cache.put("a", kib(0))
    with pytest.raises(MemorySettingError, match="closed"):
        cache.put("a", kib(0))
    assert cache.get("a") is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"cache_size_gb": 0}, "cache_size_gb: got 0, expected a number above 0, in GiB"),
        ({"cache_size_gb": float("nan")}, "cache_size_gb: got nan"),
        ({"cache_size_gb": True}, "cache_size_gb: got True"),
        ({"cache_size_gb": 1e9}, "more than the device's"),
        ({"cache_size_gb": 1, "policy": "fifo"}, "policy: got 'fifo', expected one of 'lru', 'lfu'"),
        ({"cache_size_gb": 1, "prefetch_enabled": 1}, "prefetch_enabled: got 1, expected True or False"),
        ({"cache_size_gb": 1, "compression_enabled": None}, "compression_enabled: got None"),
        ({"cache_size_gb": 1, "use_hbm": "yes"}, "use_hbm: got 'yes'"),
        ({"cache_size_gb": 1, "prefetch_depth": -1}, "prefetch_depth: got -1"),
        ({"cache_size_gb": 1, "host_bytes": 1.5}, "host_bytes: got 1.5"),
    ],
)
def test_bad_arguments(options, says):
    with pytest.raises(MemorySettingError, match=says):
        create_optimized_cache(**options)
