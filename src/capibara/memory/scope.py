"""What a ``managed_context()`` owns, and what it reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import jax
from jax.core import Tracer

from capibara.measure.sizes import size_text
from capibara.memory.cache import DeviceCache
from capibara.memory.errors import MemorySettingError
from capibara.memory.feeding import bytes_on_a_device, checked_depth, copied_to_device, prefetch_to_device
from capibara.memory.host_copies import bytes_by_device

if TYPE_CHECKING:
    from capibara.memory.manager import MemoryManager

__all__ = ["MemoryReport", "MemoryScope"]

_Tree = TypeVar("_Tree")


@dataclass(frozen=True)
class MemoryReport:
    """The memory of a ``managed_context()``; bytes on its device.

    Attributes:
      before, after: in use when it began and ended.
      high_water: the most in use meanwhile, by any code.
      host_high_water: the largest resident memory of the process in the samples; None where the system does not say.
      limit: what might be used.
      owned: of the arrays that were deleted at the end.
      evicted: of the entries that left caches for the host, to get below the threshold.
      samples: how often the memory was read; seconds: how long the context took.
      source: where the figures come from.
    """

    before: int
    after: int
    high_water: int
    host_high_water: int | None
    limit: int
    owned: int
    evicted: int
    samples: int
    seconds: float
    source: str

    def __str__(self) -> str:
        return (
            f"at most {size_text(self.high_water)} of {size_text(self.limit)}, "
            f"{size_text(self.before)} before and {size_text(self.after)} after; {size_text(self.owned)} deleted, "
            f"{size_text(self.evicted)} evicted ({self.source}, {self.samples} samples in {self.seconds:.2f} s)"
        )


class MemoryScope:
    """Created by ``manager.managed_context()``.

    Attributes:
      report: a :class:`MemoryReport`; None within the context.
    """

    def __init__(self, manager: MemoryManager) -> None:
        self.report: MemoryReport | None = None
        self._manager = manager
        self._owned: dict[int, jax.Array] = {}
        self._caches: list[DeviceCache] = []
        self._begun = time.monotonic()
        self._high_water = manager.monitor.mark()
        self._before = manager.monitor.sample().in_use
        self._evicted_before = manager.evicted_bytes
        self._samples_before = manager.monitor.get_metrics()["samples"]

    def own(self, tree: _Tree) -> _Tree:
        """Delete these arrays when the context ends; returns them. Nothing else may need them afterwards."""
        self._check_open()
        for leaf in jax.tree.leaves(tree):
            if not isinstance(leaf, jax.Array) or isinstance(leaf, Tracer):
                raise MemorySettingError(
                    f"tree: got {type(leaf).__name__}, expected JAX arrays, which can be deleted. See put()."
                )
            self._owned[id(leaf)] = leaf
        return tree

    def keep(self, tree: _Tree) -> _Tree:
        """Do not delete these arrays after all; returns them."""
        for leaf in jax.tree.leaves(tree):
            self._owned.pop(id(leaf), None)
        return tree

    def put(self, tree: Any, sharding: Any = None) -> Any:
        """Copy arrays to the device, with room made for them first; they are deleted when the context ends.

        Args:
          tree: a pytree of NumPy or JAX arrays.
          sharding: as for ``jax.device_put``.

        Raises:
          DeviceMemoryError: there is no room.

        JAX arrays are copied, too: the argument stays.
        """
        self._check_open()
        self._manager.reserve(bytes_on_a_device(tree, sharding))
        return self.own(copied_to_device(tree, sharding))

    def prefetch(
        self, items: Iterable[_Tree], *, depth: int | None = None, sharding: Any = None
    ) -> Iterable[_Tree]:
        """The items, moved to the device before they are asked for, with room made for each.

        Args:
          items: pytrees of arrays, such as batches.
          depth: how many ahead; 2 by default. With the manager's ``prefetch_enabled=False`` each is moved when it is
            asked for.
          sharding: as for ``jax.device_put``.

        Raises:
          MemorySettingError: ``depth`` is not an integer from 1.
        """
        ahead = checked_depth(2 if depth is None else depth)
        if not self._manager.prefetch_enabled:
            return self._moved(items, sharding)
        return prefetch_to_device(items, depth=ahead, sharding=sharding, reserve=self._manager.reserve)

    def _moved(self, items: Iterable[_Tree], sharding: Any) -> Iterator[_Tree]:
        for item in items:
            self._manager.reserve(bytes_on_a_device(item, sharding))
            yield copied_to_device(item, sharding)

    def create_cache(self, cache_size_gb: float, **options: Any) -> DeviceCache:
        """As the manager's; closed when the context ends."""
        self._check_open()
        cache = self._manager.create_cache(cache_size_gb, **options)
        self._caches.append(cache)
        return cache

    def check(self) -> None:
        """Clean up if the threshold is exceeded.

        Raises:
          DeviceMemoryError: that was not enough.
        """
        self._manager.monitor.check()

    def end(self) -> MemoryReport:
        """Delete what is owned, and report; called by the context manager."""
        monitor = self._manager.monitor
        monitor.sample()
        # Computations that still read the arrays keep their buffers until they are done.
        owned = 0
        for array in self._owned.values():
            if not array.is_deleted():
                owned += bytes_by_device([array]).get(self._manager.budget.device, 0)
                array.delete()
        self._owned.clear()
        for cache in self._caches:
            cache.close()
            self._manager.remove_cache(cache)
        self._caches.clear()
        last = monitor.sample()
        metrics = monitor.get_metrics()
        hosts = [sample.host for sample in monitor.samples if sample.host and sample.seconds >= self._begun]
        self.report = MemoryReport(
            before=self._before,
            after=last.in_use,
            high_water=self._high_water(),
            host_high_water=max(hosts, default=None),
            limit=last.limit,
            owned=owned,
            evicted=self._manager.evicted_bytes - self._evicted_before,
            samples=metrics["samples"] - self._samples_before,
            seconds=time.monotonic() - self._begun,
            source=metrics["source"],
        )
        return self.report

    def _check_open(self) -> None:
        if self.report is not None:
            raise MemorySettingError("this managed_context() has ended. Enter a new one.")
