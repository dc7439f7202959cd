"""What devices and this machine report now. What is not reported is None, with the reason; nothing is estimated."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from capibara.hardware.accelerators import (
    DeviceReading,
    Nvml,
    accelerators_present,
    machine_accelerators,
    said,
)
from capibara.hardware.telemetry import (
    CpuTimes,
    available_memory,
    cpu_times,
    device_memory,
    host_memory,
    live_array_bytes,
)
from capibara.hardware.utilization import utilizations
from capibara.jax_versions import backends_started
from capibara.observe.health.temperature import read_temperatures

__all__ = ["METRICS", "PROCESS_METRICS", "MachineSource", "Reading", "Source"]

# Each with what it is, in the words of an alert. Shares are from 0 to 1.
METRICS = {
    "memory_usage": "memory in use, share of the fullest device's (of the machine's, if its devices are CPUs)",
    "utilization": "share of the time in which the devices worked (of the machine's CPUs, if its devices are CPUs)",
    "temperature": "°C of the warmest device",
    "host_cpu": "share of the time in which this machine's CPUs worked",
    "host_memory_usage": "memory in use, share of this machine's",
    "process_cpu": "CPU time of this process by time: 1 is one core at work",
    "process_memory_bytes": "resident memory of this process",
    "live_array_bytes": "live JAX arrays of this process",
}
PROCESS_METRICS = ("process_cpu", "process_memory_bytes", "live_array_bytes")
_SLOW = 1.0  # seconds between readings of devices and live arrays
# What takes CPU time is not read again before so many times that time: a part then costs at most 0.2 % of a core.
_COST = 500.0
# But it is read after so many seconds: an alert needs temperatures, and the count of live arrays can wait.
_AT_MOST = {"host": 1.0, "devices": 10.0, "arrays": 600.0}
_NOT_STARTED = "JAX has not started its devices in this process"


@dataclass(frozen=True)
class Reading:
    """Metrics at one time; None with a reason where a metric is not reported.

    Attributes:
      time: seconds since 1970.
      values: by the names of :data:`METRICS`.
      reasons: why a value is None.
      devices: the accelerators, one by one.
      where: the device that a value is of, where it is of one.
    """

    time: float
    values: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)
    devices: Sequence[DeviceReading] = ()
    where: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: ``time``, each metric, ``reasons``, and ``devices`` by name."""
        return {
            "time": self.time,
            **self.values,
            "reasons": dict(self.reasons),
            "devices": {device.name: device.to_dict() for device in self.devices},
        }


class Source(Protocol):
    """Something that can be read again and again."""

    def read(self) -> Reading:
        """The metrics now."""
        ...


@dataclass
class _Part:
    """What is read together."""

    values: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    devices: tuple[DeviceReading, ...] = ()
    where: dict[str, str] = field(default_factory=dict)

    def set(self, metric: str, value: float | None, why: str = "") -> None:
        self.values[metric] = value
        if value is None:
            self.reasons[metric] = why


class _Paced:
    """Reads a part again when it is due: after its period, and later if it took much time of the CPU."""

    def __init__(
        self, metrics: Sequence[str], read: Callable[[_Part, float], None], period: float, longest: float
    ) -> None:
        self._metrics, self._read, self._period, self._longest = metrics, read, period, longest
        self._due: float | None = None
        self._part = _Part()

    def __call__(self, at: float) -> _Part:
        if self._due is not None and at < self._due:
            return self._part
        part, began = _Part(), time.thread_time()
        try:
            self._read(part, at)
        except Exception as error:
            # A runtime whose device is lost, a file that is not what it was: the reason, and the other parts go on.
            part = _Part(dict.fromkeys(self._metrics), dict.fromkeys(self._metrics, said(error)))
        cost = time.thread_time() - began
        # The first one also imports and starts libraries.
        wait = self._period if self._due is None else max(self._period, min(self._longest, _COST * cost))
        self._due, self._part = at + wait, part
        return part


class MachineSource:
    """The devices of JAX, once a program uses them, and this machine.

    Args:
      machine_wide: report on every accelerator of the machine through the vendors' libraries, also on those of other
        processes, and not on this process. JAX is not asked.
      clock: monotonic seconds. now: seconds since 1970.
      root: of the file system in which accelerators are looked for.
    """

    def __init__(
        self,
        *,
        machine_wide: bool = False,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        root: str | os.PathLike[str] = "/",
    ) -> None:
        self._wide, self._clock, self._now, self._root = machine_wide, clock, now, root
        self._times: CpuTimes | None = cpu_times()
        self._busy: float | None = None
        self._own: tuple[float, float] | None = None
        self._own_busy: float | None = None
        self._total = _machine_memory()
        self._library: Nvml | None = None
        self._present = accelerators_present(root)
        devices = ("memory_usage", "utilization", "temperature")
        self._parts = (
            _Paced(("host_cpu",), self._read_cpu, 0.0, _AT_MOST["host"]),
            _Paced(("host_memory_usage",), self._read_memory, 0.0, _AT_MOST["host"]),
            _Paced(PROCESS_METRICS[:2], self._read_process, 0.0, _AT_MOST["host"]),
            _Paced(PROCESS_METRICS[2:], self._read_arrays, _SLOW, _AT_MOST["arrays"]),
            _Paced(devices, self._read_devices, _SLOW, _AT_MOST["devices"]),
        )

    @property
    def of_jax(self) -> bool:
        """Whether the devices are JAX's, named by its numbers, and not those of the machine."""
        return not self._wide and backends_started()

    def read(self) -> Reading:
        """The metrics now. Devices and live arrays are read once a second, or less often if that takes long."""
        at = self._clock()
        parts = [part(at) for part in self._parts]
        values: dict[str, float | None] = dict.fromkeys(METRICS)
        reasons: dict[str, str] = {}
        where: dict[str, str] = {}
        for part in parts:
            values |= part.values
            reasons |= part.reasons
            where |= part.where
        # Where the devices are CPUs, theirs are the machine's figures, which are read more often.
        for metric, machine in (("memory_usage", "host_memory_usage"), ("utilization", "host_cpu")):
            if metric not in parts[-1].values:
                values[metric] = values[machine]
                if machine in reasons:
                    reasons[metric] = reasons[machine]
        return Reading(self._now(), values, reasons, parts[-1].devices, where)

    def _read_cpu(self, part: _Part, at: float) -> None:
        times = cpu_times()
        if times is not None and self._times is not None:
            busy = times.utilization_since(self._times)
            if busy is not None:  # there are enough ticks between them
                self._busy, self._times = busy, times
        part.set(
            "host_cpu", self._busy, "the operating system does not say yet for how long CPUs have worked"
        )

    def _read_memory(self, part: _Part, at: float) -> None:
        free = available_memory()
        share = None if free is None or not self._total else 1 - free / self._total
        part.set("host_memory_usage", share, "the operating system does not report the machine's memory")

    def _read_process(self, part: _Part, at: float) -> None:
        if self._wide:
            for metric in PROCESS_METRICS[:2]:
                part.set(metric, None, "the machine is watched, not this process")
            return
        own = host_memory().in_use
        part.set("process_memory_bytes", own, "the operating system does not report this process's memory")
        used = time.process_time()
        if self._own is None:
            self._own = at, used
        elif at - self._own[0] >= 0.05:
            self._own_busy = (used - self._own[1]) / (at - self._own[0])
            self._own = at, used
        part.set("process_cpu", self._own_busy, "it is known from the second reading on")

    def _read_arrays(self, part: _Part, at: float) -> None:
        if self._wide:
            part.set("live_array_bytes", None, "the machine is watched, not this process")
        elif not backends_started():
            part.set("live_array_bytes", None, _NOT_STARTED)
        else:
            part.set("live_array_bytes", live_array_bytes(exact=False))

    def _read_devices(self, part: _Part, at: float) -> None:
        if self._wide:
            part.devices = machine_accelerators(self._nvml, self._root)
        elif backends_started():
            import jax

            local = jax.local_devices()
            if local[0].platform != "cpu":
                part.devices = self._of_jax(local)
        elif any(self._present):
            # JAX may still take the accelerators, or not: neither theirs nor the CPUs' figures are the program's yet.
            for metric in ("memory_usage", "utilization", "temperature"):
                part.set(metric, None, _NOT_STARTED)
            return
        if part.devices:
            self._summarize(part)
            return
        (warm,) = read_temperatures((_Cpu(),)).values()
        part.set("temperature", warm.celsius, warm.reason)

    def _summarize(self, part: _Part) -> None:
        """The fullest and the warmest device, and the mean of how much they work."""
        for metric in ("memory_usage", "temperature"):
            known = [(value, one.name) for one in part.devices if (value := getattr(one, metric)) is not None]
            if known:
                part.values[metric], part.where[metric] = max(known)
            else:
                part.set(metric, None, _first_reason(part.devices, metric))
        busy = [one.utilization for one in part.devices if one.utilization is not None]
        mean = sum(busy) / len(busy) if busy else None
        part.set("utilization", mean, _first_reason(part.devices, "utilization"))
        if len(part.devices) == 1:
            part.where["utilization"] = part.devices[0].name

    def _of_jax(self, local: Sequence[Any]) -> tuple[DeviceReading, ...]:
        warm = read_temperatures(local)
        busy = utilizations(local, self._nvml)
        found = []
        for place, (device, memory) in enumerate(zip(local, device_memory(local), strict=True)):
            reasons: dict[str, str] = {}
            if memory.in_use is None or not memory.limit:
                reasons["memory_usage"] = "the device's allocator reports no use and limit"
            share, why = busy[place]
            if share is None:
                reasons["utilization"] = why
            if warm[device.id].celsius is None:
                reasons["temperature"] = warm[device.id].reason
            name = f"{device.platform.upper()}_{device.id}"
            celsius = warm[device.id].celsius
            found.append(
                DeviceReading(name, device.device_kind, memory.in_use, memory.limit, share, celsius, reasons)
            )
        return tuple(found)

    def _nvml(self) -> Nvml:
        if self._library is None:
            self._library = Nvml()
        return self._library


def _first_reason(devices: Sequence[DeviceReading], metric: str) -> str:
    return next((one.reasons[metric] for one in devices if metric in one.reasons), "no device reports it")


@dataclass(frozen=True)
class _Cpu:
    """Stands for the processor."""

    platform: str = "cpu"
    id: int = 0


def _machine_memory() -> int | None:
    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024
