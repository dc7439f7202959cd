"""What a cache counted."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.measure.sizes import size_text

__all__ = ["CacheStats"]


@dataclass(frozen=True)
class CacheStats:
    """Counts since the cache was made, and its sizes now.

    Attributes:
      hits: look-ups that found the value on the device.
      cold_hits: look-ups that found it on the host, and brought it back.
      misses: look-ups that found nothing.
      evictions: values that left the device to make room.
      prefetches: values that were brought back before they were asked for; prefetch_hits: of those, asked for since.
      lost: values that a program deleted (donation) while the cache held them.
      entries, cold_entries: values held, and those of them that are on the host.
      device_bytes: on the device, of the fullest one; capacity_bytes: the limit of that.
      host_bytes: on the host, as stored; cold_bytes: what these take on a device.
      lent_bytes: of evicted values that others still hold: memory that eviction did not give back yet.
    """

    hits: int
    cold_hits: int
    misses: int
    evictions: int
    prefetches: int
    prefetch_hits: int
    lost: int
    entries: int
    cold_entries: int
    device_bytes: int
    capacity_bytes: int
    host_bytes: int
    cold_bytes: int
    lent_bytes: int

    @property
    def hit_rate(self) -> float | None:
        """Share of look-ups that found their value on the device; None before the first."""
        asked = self.hits + self.cold_hits + self.misses
        return self.hits / asked if asked else None

    @property
    def compression_ratio(self) -> float | None:
        """Bytes of cold values on a device, per byte on the host; None without cold values."""
        return self.cold_bytes / self.host_bytes if self.host_bytes else None

    def __str__(self) -> str:
        rate = "no look-ups" if self.hit_rate is None else f"{self.hit_rate:.0%} hits"
        ratio = "" if self.compression_ratio is None else f" (from {size_text(self.cold_bytes)})"
        return (
            f"{size_text(self.device_bytes)} of {size_text(self.capacity_bytes)} on the device, "
            f"{size_text(self.host_bytes)}{ratio} on the host; {rate}, {self.cold_hits} brought back, "
            f"{self.misses} misses, {self.evictions} evictions"
        )
