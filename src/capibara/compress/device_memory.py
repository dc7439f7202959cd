"""The documented memory manager and cache: :mod:`capibara.memory` with the lossless codec as the default."""

from __future__ import annotations

from typing import Any

from capibara.compress.host_arrays import LosslessArrays
from capibara.measure.installation import memory_limit_bytes
from capibara.memory.arguments import bytes_of, checked_flag
from capibara.memory.cache import DeviceCache
from capibara.memory.errors import MemorySettingError
from capibara.memory.manager import MemoryManager

__all__ = ["TpuMemoryManager", "create_optimized_cache"]


class TpuMemoryManager(MemoryManager):
    """Keeps the memory of a device below a limit; :class:`~capibara.memory.manager.MemoryManager` has the methods.

    Args:
      memory_limit_gb: GiB that may be used on each device; by default what it has, and never more than that.
      cleanup_threshold: share of the limit above which memory is freed.
      prefetch_enabled: whether caches and ``scope.prefetch`` bring data to the device before it is asked for.
      compression_enabled: whether cold arrays are stored on the host losslessly compressed, or as they are.
      options: ``device``, ``interval_seconds``.

    Raises:
      MemorySettingError: an argument is invalid.
    """

    def __init__(
        self,
        memory_limit_gb: float | None = None,
        cleanup_threshold: float = 0.85,
        prefetch_enabled: bool = True,
        compression_enabled: bool = True,
        **options: Any,
    ) -> None:
        self.compression_enabled = checked_flag("compression_enabled", compression_enabled)
        codec = LosslessArrays() if compression_enabled else None
        super().__init__(memory_limit_gb, cleanup_threshold, prefetch_enabled, codec=codec, **options)


def create_optimized_cache(
    cache_size_gb: float,
    use_hbm: bool = True,
    prefetch_enabled: bool = True,
    *,
    policy: str = "lru",
    compression_enabled: bool = True,
    prefetch_depth: int = 2,
    **options: Any,
) -> DeviceCache:
    """A cache of at most so much device memory, whose cold arrays wait on the host, losslessly compressed.

    Args:
      cache_size_gb: GiB on each device.
      use_hbm: whether arrays are held in the device's memory, or in the host's.
      prefetch_enabled: whether the arrays that followed the last time are brought back in the background.
      policy: ``"lru"`` or ``"lfu"``: which array leaves first.
      compression_enabled: whether cold arrays are compressed, or stored as they are.
      prefetch_depth: how many are brought back at a time.
      options: ``keep_cold``, ``host_bytes`` and ``name`` of :class:`~capibara.memory.cache.DeviceCache`.

    Raises:
      MemorySettingError: an argument is invalid, or the cache is larger than the device's memory.
      OffloadError: ``use_hbm=False``, and the device cannot reach the host's memory.
    """
    size = bytes_of("cache_size_gb", cache_size_gb)
    limit = memory_limit_bytes() if checked_flag("use_hbm", use_hbm) else None
    if limit is not None and size > limit:
        raise MemorySettingError(
            f"cache_size_gb: got {cache_size_gb:g}, more than the device's {limit / 2**30:.2f} GiB ({limit.source}). "
            "Make it smaller."
        )
    return DeviceCache(
        size,
        policy=policy,
        prefetch_depth=prefetch_depth if checked_flag("prefetch_enabled", prefetch_enabled) else 0,
        codec=LosslessArrays() if checked_flag("compression_enabled", compression_enabled) else None,
        use_hbm=use_hbm,
        **options,
    )
