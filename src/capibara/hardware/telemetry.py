"""Current memory of devices and of this process, as reported by the machine.

A figure that the machine does not report is None, never 0 and never an estimate.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CpuTimes",
    "DeviceMemory",
    "HostMemory",
    "available_memory",
    "cpu_times",
    "device_memory",
    "host_memory",
    "live_array_bytes",
]


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device in bytes, as reported by its runtime; all None if it reports nothing (CPU)."""

    device: str
    in_use: int | None
    peak: int | None
    limit: int | None


@dataclass(frozen=True)
class HostMemory:
    """Resident memory of this process in bytes: current and peak."""

    in_use: int | None
    peak: int | None


def device_memory(devices: Any = None) -> tuple[DeviceMemory, ...]:
    """Allocator figures of each device (all local ones by default), from ``Device.memory_stats()``."""
    import jax

    report = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats() or {}
        report.append(
            DeviceMemory(
                str(device),
                stats.get("bytes_in_use"),
                stats.get("peak_bytes_in_use"),
                stats.get("bytes_limit"),
            )
        )
    return tuple(report)


def live_array_bytes(devices: Any = None, *, exact: bool = True) -> int:
    """Bytes of all live JAX arrays of this process on its devices; arrays that share a buffer count once.

    On a CPU, whose runtime reports no allocator figures, this is the closest to allocated device memory. Other threads
    may make and delete arrays meanwhile.

    Args:
      devices: the devices to count on; all local ones by default.
      exact: whether to look at the parts of arrays on several devices. JAX makes these when they are first asked for,
        and not safely beside another thread that reads the same array: a count in the background passes False. Then
        an array on one device that has the shape of a part of a larger one is taken for that part.
    """
    import jax

    asked = None if devices is None else set(devices)
    if not exact:
        return _described_bytes(jax.live_arrays(), asked)
    buffers: dict[Any, int] = {}
    for array in jax.live_arrays():
        try:
            if not hasattr(array, "addressable_shards"):
                continue
            for device, data in _parts(array):
                if data is not None and data.nbytes and (asked is None or device in asked):
                    key = _buffer(array, device, data)
                    buffers[key] = max(data.nbytes, buffers.get(key, 0))
        except Exception:
            # Deleted by another thread in this moment: JAX then finds the array without buffers, in several ways.
            if not array.is_deleted():
                raise
    return sum(buffers.values())


def _described_bytes(arrays: Any, asked: set[Any] | None) -> int:
    """The count without the parts of arrays on several devices: from shapes and shardings."""
    total = 0
    parts: Counter[Any] = Counter()
    single: dict[Any, Any] = {}
    for array in arrays:
        devices = array.sharding.device_set
        if not array.size or array.is_deleted() or not hasattr(array, "unsafe_buffer_pointer"):
            continue
        if len(devices) == 1:
            device = next(iter(devices))
            if asked is None or device in asked:
                try:
                    single[device, array.unsafe_buffer_pointer()] = array
                except (
                    RuntimeError,
                    ValueError,
                ):  # deleted in this moment, or a runtime that hides its buffers
                    single[device, id(array)] = array
            continue
        shape = array.sharding.shard_shape(array.shape)
        size = math.prod(shape) * (array.nbytes // array.size)
        for device in array.sharding.addressable_devices:
            if asked is None or device in asked:
                total += size
                parts[device, shape, str(array.dtype)] += 1
    for (device, _), array in single.items():
        key = device, array.shape, str(array.dtype)
        if parts[key]:
            parts[key] -= 1
        elif not array.is_deleted():
            total += array.nbytes
    return total


def _parts(array: Any) -> list[tuple[Any, Any]]:
    """The array on each device. One on a single device is that itself: its shard would be another array for a while."""
    devices = getattr(array.sharding, "device_set", ())
    if len(devices) == 1 and array.is_fully_addressable:
        return [(next(iter(devices)), array)]
    return [(shard.device, shard.data) for shard in array.addressable_shards]


def _buffer(array: Any, device: Any, data: Any) -> Any:
    """What is the same for two shards that share memory: their device, and where on it they begin."""
    try:
        return device, data.unsafe_buffer_pointer()
    except (RuntimeError, ValueError):  # a runtime that does not say where its buffers are
        return device, id(array)


def host_memory() -> HostMemory:
    """Resident memory of this process, from ``/proc/self/status``, or ``getrusage`` (peak only) elsewhere."""
    status = Path("/proc/self/status")
    if status.exists():
        found = dict(re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB$", status.read_text(), re.MULTILINE))
        figures = [int(found[key]) * 1024 if key in found else None for key in ("VmRSS", "VmHWM")]
        return HostMemory(*figures)
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return HostMemory(None, peak if sys.platform == "darwin" else peak * 1024)


def available_memory(meminfo: str | None = None) -> int | None:
    """Bytes of this machine's memory that a program can still take, from ``/proc/meminfo`` (or its text, if given).

    None if the machine does not say. The kernel does not count what a control group keeps from this process.
    """
    if meminfo is None:
        path = Path("/proc/meminfo")
        if not path.exists():
            return None
        meminfo = path.read_text()
    found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo, re.MULTILINE)
    return None if found is None else int(found[1]) * 1024


@dataclass(frozen=True)
class CpuTimes:
    """Time of all the machine's CPUs since start-up, in clock ticks: working, and total."""

    busy: int
    total: int

    def utilization_since(self, earlier: CpuTimes) -> float | None:
        """Share of CPU time spent working between two readings, 0 to 1.

        None if there are fewer than ten ticks between them (a tick is usually 10 ms of one CPU).
        """
        total = self.total - earlier.total
        return (self.busy - earlier.busy) / total if total >= 10 else None


def cpu_times(stat: str | None = None) -> CpuTimes | None:
    """Read ``/proc/stat`` (or its text, if given); None if there is none (not Linux)."""
    if stat is None:
        path = Path("/proc/stat")
        if not path.exists():
            return None
        stat = path.read_text()
    # user nice system idle iowait irq softirq steal; the later guest columns are contained in user and nice.
    ticks = [int(word) for word in stat.split("\n", 1)[0].split()[1:9]]
    idle = sum(ticks[3:5])
    return CpuTimes(sum(ticks) - idle, sum(ticks))
