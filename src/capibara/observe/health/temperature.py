"""Temperatures of devices: NVIDIA's management library, libtpu's monitoring, the sensors of the Linux kernel."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from capibara.observe.health.results import Temperature

__all__ = ["ReadTemperatures", "read_temperatures"]

ReadTemperatures = Callable[[Sequence[Any]], Mapping[int, Temperature]]
"""Devices → temperatures by ``device.id``."""

# Degrees Celsius from which a sensor without a limit of its own is too warm.
_CPU_LIMIT, _GPU_LIMIT = 95.0, 90.0
# Sensors of processors, by the kernel's names for thermal zones and for drivers of hwmon.
_CPU_SENSORS = re.compile(r"x86_pkg_temp|cpu|soc|coretemp|k10temp|zenpower", re.IGNORECASE)


def read_temperatures(devices: Sequence[Any], system: str = "/") -> dict[int, Temperature]:
    """The temperature of each device, or why it is not known.

    Args:
      devices: of this process.
      system: the root of the file system in which the kernel's sensors are looked for.
    """
    found: dict[int, Temperature] = {}
    for platform in {device.platform for device in devices}:
        those = [device for device in devices if device.platform == platform]
        if platform == "cpu":
            one = _processor(Path(system))
            found |= {device.id: one for device in those}
        elif platform == "tpu":
            found |= _tpus(those)
        else:
            found |= _nvidia(those)
    return found


def _processor(root: Path) -> Temperature:
    readings = [each for each in (*_zones(root), *_hwmon(root)) if 0 < each[0] < 150]
    if not readings:
        return Temperature(None, reason="this system shows no temperature sensor of the processor")
    # The one that is nearest to its limit.
    celsius, limit, name = max(readings, key=lambda each: each[0] - each[1])
    return Temperature(celsius < limit, celsius, limit, f"sensor {name}")


def _zones(root: Path) -> Iterator[tuple[float, float, str]]:
    for zone in sorted(root.glob("sys/class/thermal/thermal_zone*")):
        kind, celsius = _text(zone / "type"), _degrees(zone / "temp")
        if celsius is None or not _CPU_SENSORS.search(kind):
            continue
        limits = [
            limit
            for point in zone.glob("trip_point_*_type")
            if _text(point) in ("hot", "critical")
            and (limit := _degrees(point.with_name(point.name.replace("_type", "_temp")))) is not None
            and limit > 0
        ]
        yield celsius, min(limits, default=_CPU_LIMIT), kind


def _hwmon(root: Path) -> Iterator[tuple[float, float, str]]:
    for folder in sorted(root.glob("sys/class/hwmon/hwmon*")):
        name = _text(folder / "name")
        if not _CPU_SENSORS.search(name):
            continue
        for sensor in sorted(folder.glob("temp*_input")):
            stem = sensor.name.removesuffix("_input")
            if (celsius := _degrees(sensor)) is None:
                continue
            label = _text(folder / f"{stem}_label") or stem
            limit = _degrees(folder / f"{stem}_crit")
            yield celsius, limit if limit and limit > 0 else _CPU_LIMIT, f"{name} {label}"


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _degrees(path: Path) -> float | None:
    """Millidegrees of a file of the kernel's, as degrees."""
    try:
        return int(_text(path)) / 1000
    except ValueError:
        return None


def _tpus(devices: Sequence[Any]) -> dict[int, Temperature]:
    """libtpu reports no temperatures, but by how much each chip is throttled, from 0 (not) to 10."""
    try:
        monitoring = importlib.import_module("libtpu.sdk").tpumonitoring
        values = [str(value) for value in monitoring.get_metric("tpu_throttle_score").data()]
        scores = [int(re.findall(r"\d+", value)[-1]) for value in values]
    except Exception as error:
        # A library of the vendor's without a stated interface of errors: whatever it raises is the reason.
        reason = (
            f"libtpu reports no temperature, and no throttle score here ({type(error).__name__}: {error})"
        )
        return {device.id: Temperature(None, reason=reason[:300]) for device in devices}
    found = {}
    for place, device in enumerate(devices):
        chip = place * len(scores) // len(devices) if scores else 0
        if chip >= len(scores):
            reason = "libtpu reports no temperature, and no throttle score now"
            found[device.id] = Temperature(None, reason=reason)
        else:
            found[device.id] = Temperature(
                scores[chip] == 0,
                reason=f"libtpu reports no temperature; throttle score {scores[chip]} of 10",
            )
    return found


def _nvidia(devices: Sequence[Any]) -> dict[int, Temperature]:
    def unknown(reason: str) -> dict[int, Temperature]:
        return {device.id: Temperature(None, reason=reason) for device in devices}

    if any("nvidia" not in device.device_kind.lower() for device in devices):
        return unknown(f"no source of temperatures for {devices[0].device_kind}")
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return unknown("NVIDIA's management library (libnvidia-ml.so.1) is not installed")
    if library.nvmlInit_v2():
        return unknown("NVIDIA's management library cannot be started")
    try:
        return {device.id: _nvidia_one(library, device) for device in devices}
    finally:
        library.nvmlShutdown()


def _nvidia_one(library: Any, device: Any) -> Temperature:
    handle = ctypes.c_void_p()
    number = getattr(device, "local_hardware_id", None)
    index = device.id if number is None else number
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = names[index] if index < len(names) else str(index)
    if name.isdecimal():
        failed = library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        failed = library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    celsius, limit = ctypes.c_uint(), ctypes.c_uint()
    if failed or library.nvmlDeviceGetTemperature(handle, 0, ctypes.byref(celsius)):
        return Temperature(None, reason=f"NVML does not report the temperature of GPU {name}")
    # 1: the threshold at which the GPU slows down.
    known = not library.nvmlDeviceGetTemperatureThreshold(handle, 1, ctypes.byref(limit)) and limit.value > 0
    most = float(limit.value) if known else _GPU_LIMIT
    return Temperature(celsius.value < most, float(celsius.value), most, f"NVML, GPU {name}")
