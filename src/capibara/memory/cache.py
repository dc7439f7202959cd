"""A bounded cache of device arrays, whose cold entries move to the host, encoded.

An entry is on the device (*hot*) or on the host (*cold*). A new value or one that is brought back needs room: entries
leave the device in the order of the policy. Encoding and decoding happen outside the lock, so that look-ups of other
entries go on meanwhile; an entry on its way is marked, and only those who need that entry wait.

JAX arrays are immutable, and the cache holds the very arrays that it was given. An evicted array's memory goes back
when nobody else holds it; what others still hold is counted (``lent_bytes``).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax

from capibara.measure.sizes import size_text
from capibara.memory.arguments import checked_choice
from capibara.memory.cache_statistics import CacheStats
from capibara.memory.errors import CacheFullError, ItemTooLargeError, MemorySettingError
from capibara.memory.host_copies import ArrayCodec, HostCopy, PlainCopies, bytes_by_device, checked_arrays
from capibara.memory.offload import host_memory_kind
from capibara.memory.policy import POLICIES, choose_victim
from capibara.memory.successors import Successors

__all__ = ["DeviceCache"]

_ABSENT: Any = object()


@dataclass(eq=False)
class _Entry:
    key: Hashable
    structure: Any
    size: int  # bytes on the fullest device
    hot: list[jax.Array] | None
    cold: list[HostCopy] | None = None
    uses: int = 1
    pins: int = 0
    moving: bool = False  # to the host or back, by one thread
    held: bool = True  # the cache still has it
    prefetched: bool = False

    @property
    def host_bytes(self) -> int:
        return sum(copy.size for copy in self.cold or ())


@dataclass
class _Counts:
    hits: int = 0
    cold_hits: int = 0
    misses: int = 0
    evictions: int = 0
    prefetches: int = 0
    prefetch_hits: int = 0
    lost: int = 0


@dataclass
class _Sizes:
    device: int = 0
    host: int = 0
    reserved: int = 0
    moving: int = 0  # entries, not bytes
    lent: list[tuple[Any, int]] = field(default_factory=list)


class DeviceCache:
    """A mapping from keys to arrays (or pytrees of them) in at most so many bytes of device memory.

    Thread-safe. Values come back with the same bits, dtype, shape and sharding (a weak type becomes a strong one, as by
    any copy).

    Args:
      capacity_bytes: on each device.
      policy: ``"lru"`` or ``"lfu"``: which entry leaves first.
      prefetch_depth: after each look-up, so many of the entries that followed it last time are brought back in the
        background; 0 for none. They displace other entries, but not the one that was looked up last.
      codec: stores cold entries on the host; as they are by default.
      keep_cold: whether evicted entries are kept on the host. Otherwise they are dropped.
      host_bytes: the most bytes of cold entries on the host. An eviction that would exceed it raises
        :class:`CacheFullError`, and loses nothing. Unbounded by default.
      use_hbm: whether entries are held in the device's memory; otherwise in the host's, from where each look-up copies
        them to the device.
      name: for messages.

    Raises:
      MemorySettingError: an argument is invalid.
      OffloadError: ``use_hbm=False``, and the device cannot reach the host's memory.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        policy: str = "lru",
        prefetch_depth: int = 0,
        codec: ArrayCodec | None = None,
        keep_cold: bool = True,
        host_bytes: int | None = None,
        use_hbm: bool = True,
        name: str = "cache",
    ) -> None:
        for argument, value, least in (
            ("capacity_bytes", capacity_bytes, 1),
            ("prefetch_depth", prefetch_depth, 0),
            ("host_bytes", 0 if host_bytes is None else host_bytes, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise MemorySettingError(f"{argument}: got {value!r}, expected an integer from {least}.")
        self.capacity_bytes = capacity_bytes
        self.policy = checked_choice("policy", policy, tuple(POLICIES))
        self.prefetch_depth = prefetch_depth
        self.name = name
        self._codec: ArrayCodec = PlainCopies() if codec is None else codec
        self._keep_cold = keep_cold
        self._host_limit = host_bytes
        self._host_kind = None if use_hbm else host_memory_kind()
        self._entries: dict[Hashable, _Entry] = {}  # the least recently used first
        self._counts, self._sizes = _Counts(), _Sizes()
        self._changed = threading.Condition(threading.Lock())
        self._successors = Successors()
        self._worker: ThreadPoolExecutor | None = None
        self._latest: Hashable = _ABSENT
        self._closed = False

    # Looking up

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value of a key, on the device; ``default`` if there is none."""
        found = self._look_up(key)
        return default if found is None else found[1]

    def __getitem__(self, key: Hashable) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def get_or_load(self, key: Hashable, load: Callable[[], Any]) -> Any:
        """The value of a key; if there is none, what ``load()`` returns, which is stored: one miss."""
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            value = self.put(key, load())
            if self.prefetch_depth:
                self._successors.note(key)
        return value

    @contextlib.contextmanager
    def pinned(self, key: Hashable) -> Generator[Any, None, None]:
        """The value of a key, which does not leave the device within this context.

        Raises:
          KeyError: there is no such key.
        """
        found = self._look_up(key, pin=True)
        if found is None:
            raise KeyError(key)
        entry, value = found
        try:
            yield value
        finally:
            self._unpin(entry, 1)

    def __contains__(self, key: Hashable) -> bool:
        with self._changed:
            return key in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def keys(self) -> list[Hashable]:
        """All keys, the least recently used first."""
        with self._changed:
            return list(self._entries)

    def is_hot(self, key: Hashable) -> bool:
        """Whether the value of a key is on the device."""
        with self._changed:
            entry = self._entries.get(key)
            return entry is not None and entry.hot is not None

    # Changing

    def put(self, key: Hashable, value: Any) -> Any:
        """Store a value, instead of that of the same key.

        Args:
          key: hashable.
          value: an array, or a pytree of arrays. NumPy arrays are copied to the default device.

        Returns:
          The value as JAX arrays, on the device.

        Raises:
          ItemTooLargeError: it is larger than the cache.
          CacheFullError: no room can be made: what is there is pinned, or the host has no room for it.
          MemorySettingError: it is not made of arrays.
        """
        leaves, structure = jax.tree.flatten(value)
        if not leaves:
            raise MemorySettingError(
                f"value: got {value!r} without arrays, expected an array or a pytree of them."
            )
        arrays = checked_arrays("value", leaves)
        size = max(bytes_by_device(arrays).values(), default=0)
        if size > self.capacity_bytes:
            raise ItemTooLargeError(
                f"value: {key!r} takes {size_text(size)} on a device, more than the {size_text(self.capacity_bytes)} "
                f"of {self.name}. Make the cache larger, or store parts of it under keys of their own."
            )
        with self._changed:
            self._check_open()
            self._reserve(size, replacing=key)
        try:
            stored = [self._stored(array) for array in arrays]
        except BaseException:
            with self._changed:
                self._sizes.reserved -= size
                self._changed.notify_all()
            raise
        with self._changed:
            self._sizes.reserved -= size
            self._forget(key)
            self._entries[key] = _Entry(key, structure, size, stored)
            self._sizes.device += size
            self._changed.notify_all()
        return jax.tree.unflatten(structure, arrays)

    __setitem__ = put

    def remove(self, key: Hashable) -> bool:
        """Forget a key; returns whether it was there."""
        with self._changed:
            return self._forget(key)

    def clear(self) -> None:
        """Forget all keys."""
        with self._changed:
            for key in list(self._entries):
                self._forget(key)

    def evict(self, nbytes: int | None = None) -> int:
        """Move entries from the device to the host (or drop them, with ``keep_cold=False``).

        Args:
          nbytes: stop when so many bytes have left; by default all that are not pinned leave.

        Returns:
          The bytes that left. Their memory is free as soon as nobody else holds the arrays.

        Raises:
          CacheFullError: the host has no room for them.
        """
        left = 0
        with self._changed:
            while nbytes is None or left < nbytes:
                victim = choose_victim(self.policy, self._movable())
                if (
                    victim is None and self._sizes.moving
                ):  # by other threads: what they move leaves, or may be moved
                    self._changed.wait()
                    continue
                if victim is None:
                    break
                size = victim.size
                left += size if self._push_out(victim) else 0
        return left

    def prefetch(self, keys: Iterable[Hashable]) -> None:
        """Bring cold entries back in the background; keys that are unknown or hot are passed over.

        An entry for which no room can be made stays where it is.
        """
        with self._changed:
            cold = [key for key in keys if (e := self._entries.get(key)) and e.hot is None and not e.moving]
            if not cold or self._closed:
                return
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="capibara-prefetch")
            worker = self._worker
        for key in cold:
            try:
                worker.submit(_prefetch, weakref.ref(self), key)
            except RuntimeError:  # the interpreter, or the cache, is shutting down
                return

    def close(self) -> None:
        """Stop prefetching, and forget all keys. Further values are refused."""
        with self._changed:
            self._closed = True
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.shutdown(wait=True, cancel_futures=True)
        self.clear()

    def __enter__(self) -> DeviceCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> CacheStats:
        """Counts and sizes."""
        with self._changed:
            cold = [entry for entry in self._entries.values() if entry.hot is None]
            return CacheStats(
                **vars(self._counts),
                entries=len(self._entries),
                cold_entries=len(cold),
                device_bytes=self._sizes.device,
                capacity_bytes=self.capacity_bytes,
                host_bytes=self._sizes.host,
                cold_bytes=sum(entry.size for entry in cold),
                lent_bytes=self._lent(),
            )

    def holds(self, array: Any) -> Hashable | None:
        """The key of an array that is in the cache, on the device; None if it is not."""
        with self._changed:
            for key, entry in self._entries.items():
                if any(array is leaf for leaf in entry.hot or ()):
                    return key
        return None

    def __repr__(self) -> str:
        return f"DeviceCache({self.name!r}: {self.stats()})"

    def _look_up(self, key: Hashable, *, pin: bool = False) -> tuple[_Entry, Any] | None:
        """The entry of a key and its value on the device; None if there is none."""
        counted = False
        while True:
            with self._changed:
                entry = self._live(key)
                if entry is None:
                    self._counts.misses += not counted
                    return None
                hot = entry.hot is not None
                if not counted:
                    self._counts.hits += hot
                    self._counts.cold_hits += not hot
                counted = True
                self._touch(entry)
                self._latest = entry.key
                self._counts.prefetch_hits += entry.prefetched
                entry.prefetched = False
                entry.pins += pin
                value = self._value(entry) if hot else None
            if not hot:
                try:
                    value = self._bring_back(entry)
                except BaseException:
                    self._unpin(entry, pin)
                    raise
                if value is _ABSENT:  # another thread removed or replaced it in this moment
                    self._unpin(entry, pin)
                    continue
            if self.prefetch_depth:
                self._successors.note(key)
                self.prefetch(self._successors.after(key, self.prefetch_depth))
            return entry, value

    def _unpin(self, entry: _Entry, pins: int) -> None:
        with self._changed:
            entry.pins -= pins
            self._changed.notify_all()

    # With the lock held

    def _live(self, key: Hashable) -> _Entry | None:
        """The entry, unless a program has deleted its arrays."""
        entry = self._entries.get(key)
        if entry is not None and entry.hot is not None and any(leaf.is_deleted() for leaf in entry.hot):
            self._counts.lost += 1
            self._forget(key)
            return None
        return entry

    def _touch(self, entry: _Entry) -> None:
        entry.uses += 1
        self._entries[entry.key] = self._entries.pop(entry.key)

    def _value(self, entry: _Entry) -> Any:
        leaves = entry.hot or []
        if self._host_kind is not None:
            leaves = [_on_device(leaf) for leaf in leaves]
        return jax.tree.unflatten(entry.structure, leaves)

    def _stored(self, array: jax.Array) -> jax.Array:
        if self._host_kind is None:
            return array
        return jax.device_put(array, array.sharding.with_memory_kind(self._host_kind))

    def _forget(self, key: Hashable) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        entry.held = False
        if entry.hot is not None:
            self._sizes.device -= entry.size
        self._sizes.host -= entry.host_bytes
        self._successors.forget(key)
        self._changed.notify_all()
        return True

    def _check_open(self) -> None:
        if self._closed:
            raise MemorySettingError(f"{self.name}: the cache is closed. Make a new one.")

    def _movable(self, spare: Hashable = _ABSENT, *, background: bool = False) -> Iterator[_Entry]:
        for entry in self._entries.values():
            free = entry.hot is not None and not entry.moving and not entry.pins
            if free and entry.key is not spare and not (background and entry.prefetched):
                yield entry

    def _reserve(self, size: int, *, replacing: Hashable = _ABSENT, background: bool = False) -> None:
        """Make room, and keep it.

        Args:
          replacing: a key whose entry will go.
          background: whether this is a prefetch, which displaces neither what was looked up last nor other prefetches.
        """
        while True:
            old = self._entries.get(replacing) if replacing is not _ABSENT else None
            credit = old.size if old is not None and old.hot is not None else 0
            if self._sizes.device - credit + self._sizes.reserved + size <= self.capacity_bytes:
                self._sizes.reserved += size
                return
            spare = old.key if old is not None else self._latest if background else _ABSENT
            victim = choose_victim(self.policy, self._movable(spare, background=background))
            if victim is not None:
                self._push_out(victim)
            elif self._sizes.moving or self._sizes.reserved:
                self._changed.wait()
            else:
                pinned = sum(e.size for e in self._entries.values() if e.pins and e.hot is not None)
                raise CacheFullError(
                    f"{self.name}: no room for {size_text(size)}: {size_text(pinned)} of "
                    f"{size_text(self.capacity_bytes)} are pinned. Leave a pinned() context, or make the cache larger."
                )

    def _push_out(self, entry: _Entry) -> bool:
        """Move an entry to the host; the lock is released meanwhile. Returns whether it left."""
        assert entry.hot is not None
        if not self._keep_cold:
            self._lend(entry)
            self._forget(entry.key)
            self._counts.evictions += 1
            return True
        entry.moving = True
        self._sizes.moving += 1
        copies: list[HostCopy] | None = None
        arrays = entry.hot
        self._changed.release()
        try:
            copies = [HostCopy.of(array, self._codec) for array in arrays]
            arrays = []  # whoever waits for this memory finds it free as soon as the entry has left
        except RuntimeError:
            if not _deleted(arrays):  # by a donation in this moment
                raise
        finally:
            self._changed.acquire()
            entry.moving = False
            self._sizes.moving -= 1
            self._changed.notify_all()
        if not entry.held or entry.pins:
            return not entry.held
        if copies is None:
            self._counts.lost += 1
            return self._forget(entry.key)
        need = sum(copy.size for copy in copies)
        if self._host_limit is not None and self._sizes.host + need > self._host_limit:
            raise CacheFullError(
                f"{self.name}: {entry.key!r} should leave the device, and its {size_text(need)} do not fit on the "
                f"host, where {size_text(self._sizes.host)} of {size_text(self._host_limit)} are taken. Raise "
                "host_bytes, remove keys, or pass keep_cold=False to drop what leaves."
            )
        self._lend(entry)
        entry.hot, entry.cold = None, copies
        self._sizes.device -= entry.size
        self._sizes.host += need
        self._counts.evictions += 1
        return True

    def _lend(self, entry: _Entry) -> None:
        self._lent()
        self._sizes.lent += [(weakref.ref(leaf), leaf.nbytes) for leaf in entry.hot or ()]

    def _lent(self) -> int:
        self._sizes.lent = [
            pair for pair in self._sizes.lent if (a := pair[0]()) is not None and not a.is_deleted()
        ]
        return sum(size for _, size in self._sizes.lent)

    # Without the lock

    def _bring_back(self, entry: _Entry, *, background: bool = False) -> Any:
        """Move an entry to the device; its value, or ``_ABSENT`` if it was removed meanwhile."""
        with self._changed:
            while entry.moving and entry.hot is None and entry.held:
                self._changed.wait()
            if not entry.held:
                return _ABSENT
            if entry.hot is not None:
                return self._value(entry)
            copies = entry.cold
            assert copies is not None
            entry.moving = True
            try:
                self._reserve(entry.size, background=background)
            except BaseException:
                entry.moving = False
                self._changed.notify_all()
                raise
            self._sizes.moving += 1
        hot: list[jax.Array] | None = None
        try:
            hot = [self._stored(copy.restore(self._codec)) for copy in copies]
        finally:
            with self._changed:
                entry.moving = False
                self._sizes.moving -= 1
                self._sizes.reserved -= entry.size
                if hot is not None and entry.held:
                    self._sizes.host -= entry.host_bytes
                    entry.hot, entry.cold = hot, None
                    self._sizes.device += entry.size
                    if background:
                        entry.prefetched = True
                        self._counts.prefetches += 1
                        self._entries[entry.key] = self._entries.pop(entry.key)
                self._changed.notify_all()
        value = _Entry(entry.key, entry.structure, entry.size, hot)
        return self._value(value)


def _prefetch(reference: Any, key: Hashable) -> None:
    """In the background; what fails here fails again, and is told, when the value is asked for."""
    cache: DeviceCache | None = reference()
    if cache is None or cache._closed:
        return
    with cache._changed:
        entry = cache._entries.get(key)
        if entry is None or entry.hot is not None or entry.moving:
            return
    with contextlib.suppress(Exception):
        cache._bring_back(entry, background=True)


def _deleted(arrays: list[jax.Array]) -> bool:
    return any(array.is_deleted() for array in arrays)


def _on_device(array: jax.Array) -> jax.Array:
    kind = next(iter(array.sharding.device_set)).default_memory().kind
    return jax.device_put(array, array.sharding.with_memory_kind(kind))
