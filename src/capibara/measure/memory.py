"""Current memory use: of live arrays, of the process, of each device."""

from __future__ import annotations

from dataclasses import dataclass

from capibara.hardware.telemetry import DeviceMemory, device_memory, host_memory, live_array_bytes

__all__ = ["MemorySnapshot", "memory_snapshot"]


@dataclass(frozen=True)
class MemorySnapshot:
    """Memory in bytes; figures that the machine does not report are None.

    Attributes:
      live_arrays: of all live JAX arrays of this process.
      host: resident memory of this process.
      host_peak: its peak.
      devices: as reported by each device's allocator.
    """

    live_arrays: int
    host: int | None
    host_peak: int | None
    devices: tuple[DeviceMemory, ...]

    def __str__(self) -> str:
        def gib(value: int | None) -> str:
            return "not reported" if value is None else f"{value / 1024**3:.3f} GiB"

        lines = [
            f"live arrays {gib(self.live_arrays)}, process {gib(self.host)}, at most {gib(self.host_peak)}"
        ]
        lines += [
            f"{d.device}: {gib(d.in_use)} in use, at most {gib(d.peak)}, of {gib(d.limit)}"
            for d in self.devices
        ]
        return "\n".join(lines)


def memory_snapshot() -> MemorySnapshot:
    """Read all memory figures once."""
    host = host_memory()
    return MemorySnapshot(live_array_bytes(), host.in_use, host.peak, device_memory())
