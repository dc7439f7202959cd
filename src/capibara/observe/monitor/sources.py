"""What devices and this machine report now. What is not reported is None, with the reason; nothing is estimated."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from capibara.hardware.telemetry import (
    CpuTimes,
    available_memory,
    cpu_times,
    device_memory,
    host_memory,
    live_array_bytes,
)
from capibara.jax_versions import backends_started
from capibara.observe.health.temperature import read_temperatures

__all__ = ["METRICS", "MachineSource", "Reading", "Source"]

# Each with what it is, in the words of an alert. Shares are from 0 to 1.
METRICS = {
    "memory_usage": "memory in use, share of the fullest device's (of the machine's, if its devices are CPUs)",
    "utilization": "share of the time in which the devices worked (of the machine's CPUs, if its devices are CPUs)",
    "temperature": "°C of the warmest device",
    "host_cpu": "share of the time in which this machine's CPUs worked",
    "host_memory_usage": "memory in use, share of this machine's",
    "process_memory_bytes": "resident memory of this process",
    "live_array_bytes": "live JAX arrays of this process",
}
_SLOW = 1.0  # seconds between readings of what takes long to read


@dataclass(frozen=True)
class Reading:
    """Metrics at one time; None with a reason where a metric is not reported.

    Attributes:
      time: seconds since 1970.
      values: by the names of :data:`METRICS`.
      reasons: why a value is None.
    """

    time: float
    values: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)


class Source(Protocol):
    """Something that can be read again and again."""

    def read(self) -> Reading:
        """The metrics now."""
        ...


class MachineSource:
    """The devices of JAX, once a program uses them, and this machine.

    Args:
      clock: monotonic seconds. now: seconds since 1970.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, now: Callable[[], float] = time.time
    ) -> None:
        self._clock, self._now = clock, now
        self._times: CpuTimes | None = cpu_times()
        self._busy: float | None = None
        self._total = _machine_memory()
        self._slow_at: float | None = None
        self._slow: dict[str, float | None] = {}
        self._why: dict[str, str] = {}

    def read(self) -> Reading:
        """The metrics now. What takes long to read is read once a second."""
        at = self._clock()
        if self._slow_at is None or at - self._slow_at >= _SLOW:
            self._slow_at = at
            self._slow, self._why = {}, {}
            self._read_slow()
        values = dict(self._slow)
        reasons = dict(self._why)
        times = cpu_times()
        if times is not None and self._times is not None:
            busy = times.utilization_since(self._times)
            if busy is not None:  # there are enough ticks between them
                self._busy, self._times = busy, times
        values["host_cpu"] = self._busy
        if self._busy is None:
            reasons["host_cpu"] = "the operating system does not say yet for how long CPUs have worked"
        if "utilization" not in values:
            values["utilization"] = self._busy
            if self._busy is None:
                reasons["utilization"] = reasons["host_cpu"]
        return Reading(self._now(), {name: values.get(name) for name in METRICS}, reasons)

    def _read_slow(self) -> None:
        own = host_memory().in_use
        self._slow["process_memory_bytes"] = own
        if own is None:
            self._why["process_memory_bytes"] = "the operating system does not report this process's memory"
        free = available_memory()
        share = None if free is None or not self._total else 1 - free / self._total
        self._slow["host_memory_usage"] = share
        if share is None:
            self._why["host_memory_usage"] = "the operating system does not report the machine's memory"
        devices: Sequence[Any] = ()
        if backends_started():
            import jax

            devices = jax.local_devices()
            self._slow["live_array_bytes"] = live_array_bytes(exact=False)
        else:
            self._slow["live_array_bytes"] = None
            self._why["live_array_bytes"] = "JAX has not started its devices in this process"
        if not devices or devices[0].platform == "cpu":
            # "utilization" is that of the CPUs, which is read more often.
            self._slow["memory_usage"] = share
            if share is None:
                self._why["memory_usage"] = self._why["host_memory_usage"]
            warm = read_temperatures(devices[:1] or (_Cpu(),))
        else:
            self._accelerators(devices)
            warm = read_temperatures(devices)
        known = [one.celsius for one in warm.values() if one.celsius is not None]
        self._slow["temperature"] = max(known, default=None)
        if not known:
            self._why["temperature"] = next((one.reason for one in warm.values()), "no device")

    def _accelerators(self, devices: Sequence[Any]) -> None:
        used = [
            one.in_use / one.limit for one in device_memory(devices) if one.in_use is not None and one.limit
        ]
        self._slow["memory_usage"] = max(used, default=None)
        if not used:
            self._why["memory_usage"] = "the devices' allocators report no use and limit"
        busy, why = _duty_cycle(devices[0].platform)
        self._slow["utilization"] = busy
        if busy is None:
            self._why["utilization"] = why


@dataclass(frozen=True)
class _Cpu:
    """Stands for the processor where JAX has not started."""

    platform: str = "cpu"
    id: int = 0


def _machine_memory() -> int | None:
    from pathlib import Path

    try:
        found = re.search(r"^MemTotal:\s*(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


def _duty_cycle(platform: str) -> tuple[float | None, str]:
    """Mean share of the time in which the accelerators of this host worked, or None and the reason."""
    try:
        if platform == "tpu":
            monitoring = importlib.import_module("libtpu.sdk").tpumonitoring
            values = [float(value) for value in monitoring.get_metric("duty_cycle_pct").data()]
        else:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            values = [
                float(nvml.nvmlDeviceGetUtilizationRates(nvml.nvmlDeviceGetHandleByIndex(index)).gpu)
                for index in range(nvml.nvmlDeviceGetCount())
            ]
    except ImportError as error:
        package = "libtpu" if platform == "tpu" else "nvidia-ml-py"
        return None, f"{error}: pip install {package}"
    except Exception as error:
        # Libraries of vendors without a stated interface of errors: whatever they raise is the reason.
        return None, f"{type(error).__name__}: {error}"[:300]
    if not values:
        return None, "the vendor's library reports no device now"
    return sum(values) / len(values) / 100, ""
