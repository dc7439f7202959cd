"""The cache against a plain-dict model, in random sequences of calls.

The model is told nothing of threads, codecs or arrays: a dict from keys to NumPy arrays, and lists for what is on the
device, in the order in which entries would leave. Nothing runs in the background here, so that every count is exact.
"""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from capibara.compress.host_arrays import LosslessArrays
from capibara.memory import CacheFullError, DeviceCache, ItemTooLargeError

CAPACITY = 64
KEYS = st.sampled_from("abcdef")
COUNTS = st.sampled_from(
    [6, 4, 8, 5, 12, 16, 0, 17]
)  # elements: a few fill the cache; the last is too large for it


class Model:
    """What the cache should do, in the plainest form."""

    def __init__(self, policy: str, keep_cold: bool) -> None:
        self.policy, self.keep_cold = policy, keep_cold
        self.values: dict[str, np.ndarray] = {}
        self.uses: dict[str, int] = {}
        self.recent: list[str] = []  # the least recently used first
        self.hot: set[str] = set()
        self.pins: dict[str, int] = {}
        self.hits = self.cold_hits = self.misses = self.evictions = 0

    def held(self) -> int:
        return sum(self.values[key].nbytes for key in self.hot)

    def victim(self, spare: str | None) -> str | None:
        free = [key for key in self.recent if key in self.hot and not self.pins.get(key) and key != spare]
        if self.policy == "lfu":
            free.sort(key=lambda key: self.uses[key])  # stable: of equal ones the least recently used first
        return free[0] if free else None

    def make_room(self, size: int, spare: str | None = None) -> bool:
        """``spare`` is replaced: it leaves by itself, but only if there is room for the new value."""
        credit = self.values[spare].nbytes if spare in self.hot else 0
        while self.held() - credit + size > CAPACITY:
            key = self.victim(spare)
            if key is None:
                return False
            self.push_out(key)
        return True

    def push_out(self, key: str) -> None:
        self.evictions += 1
        self.hot.remove(key)
        if not self.keep_cold:
            self.forget(key)

    def forget(self, key: str) -> None:
        self.hot.discard(key)
        for table in (self.values, self.uses, self.pins):
            table.pop(key, None)
        if key in self.recent:
            self.recent.remove(key)

    def touch(self, key: str) -> None:
        self.uses[key] += 1
        self.recent.remove(key)
        self.recent.append(key)


class CacheMachine(RuleBasedStateMachine):
    pinned = Bundle("pinned")

    @initialize(policy=st.sampled_from(["lru", "lfu"]), keep_cold=st.booleans(), lossless=st.booleans())
    def begin(self, policy: str, keep_cold: bool, lossless: bool) -> None:
        codec = LosslessArrays() if lossless else None
        self.cache = DeviceCache(CAPACITY, policy=policy, keep_cold=keep_cold, codec=codec)
        self.model = Model(policy, keep_cold)

    @rule(items=st.lists(st.tuples(KEYS, COUNTS, st.integers(0, 99)), min_size=3, max_size=8))
    def put_some(self, items: list[tuple[str, int, int]]) -> None:
        for key, count, seed in items:
            self.put(key, count, seed)
            self.same()

    def put(self, key: str, count: int, seed: int) -> None:
        value = np.frombuffer(np.random.default_rng(seed).bytes(4 * count), np.float32)
        given = jax.device_put(value, may_alias=False)
        if value.nbytes > CAPACITY:
            with pytest.raises(ItemTooLargeError):
                self.cache.put(key, given)
            return
        spare = key if key in self.model.values else None
        if not self.model.make_room(value.nbytes, spare):
            with pytest.raises(CacheFullError):
                self.cache.put(key, given)
            return
        self.model.forget(key)
        self.cache.put(key, given)
        self.model.values[key], self.model.uses[key] = value, 1
        self.model.recent.append(key)
        self.model.hot.add(key)

    @rule(keys=st.lists(KEYS, min_size=3, max_size=10))
    def get_some(self, keys: list[str]) -> None:
        for key in keys:
            self.get(key)
            self.same()

    def get(self, key: str) -> None:
        if not self.look_up(key):
            return
        found = self.cache.get(key)
        if key not in self.model.values:
            assert found is None
        else:
            np.testing.assert_array_equal(
                np.asarray(found).view(np.uint32), self.model.values[key].view(np.uint32)
            )

    def look_up(self, key: str) -> bool:
        """Counts in the model; False if the cache has to refuse, which is checked here."""
        if key not in self.model.values:
            self.model.misses += 1
            return True
        self.model.touch(key)
        if key in self.model.hot:
            self.model.hits += 1
            return True
        self.model.cold_hits += 1
        if not self.model.make_room(self.model.values[key].nbytes):
            with pytest.raises(CacheFullError):
                self.cache.get(key)
            return False
        self.model.hot.add(key)
        return True

    @rule(target=pinned, key=KEYS)
    def pin(self, key: str):
        if key not in self.model.values:
            self.model.misses += 1
            with pytest.raises(KeyError), self.cache.pinned(key):
                pass
            return None
        if not self.look_up(key):
            return None
        context = self.cache.pinned(key)
        context.__enter__()
        self.model.pins[key] = self.model.pins.get(key, 0) + 1
        return [key, context, self.model.values[key]]

    @rule(held=pinned)
    def unpin(self, held) -> None:
        if not held:
            return
        key, context, value = held
        held.clear()
        context.__exit__(None, None, None)
        if self.model.values.get(key) is value:  # otherwise the pinned entry was replaced or removed
            self.model.pins[key] -= 1

    @rule(key=KEYS)
    def remove(self, key: str) -> None:
        assert self.cache.remove(key) is (key in self.model.values)
        self.model.forget(key)

    @rule(nbytes=st.none() | st.integers(0, 80))
    def evict(self, nbytes: int | None) -> None:
        expected = 0
        while nbytes is None or expected < nbytes:
            key = self.model.victim(None)
            if key is None:
                break
            expected += self.model.values[key].nbytes
            self.model.push_out(key)
        assert self.cache.evict(nbytes) == expected

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "cache"):
            return
        stats, model = self.cache.stats(), self.model
        assert self.cache.keys() == model.recent
        assert {key for key in model.values if self.cache.is_hot(key)} == model.hot
        assert stats.device_bytes == model.held() <= CAPACITY
        assert (stats.hits, stats.cold_hits, stats.misses, stats.evictions) == (
            model.hits,
            model.cold_hits,
            model.misses,
            model.evictions,
        )
        assert stats.cold_bytes == sum(model.values[key].nbytes for key in model.values.keys() - model.hot)

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()


CacheMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestCacheModel = CacheMachine.TestCase
