"""Temperatures of devices: NVIDIA's management library, libtpu's monitoring, the sensors of the Linux kernel."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from capibara.hardware.accelerators import Nvml, said
from capibara.observe.health.arguments import is_number
from capibara.observe.health.errors import HealthError
from capibara.observe.health.results import Temperature

__all__ = ["ReadTemperatures", "checked_temperatures", "read_temperatures"]

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


def checked_temperatures(readings: object, devices: Sequence[Any]) -> dict[Any, Temperature]:
    """The temperature of each device, from what a function read; it is unknown where the function has none.

    Args:
      readings: what a :data:`ReadTemperatures` returned.
      devices: those that it was called with.

    Raises:
      HealthError: it is not a mapping from ``device.id`` to :class:`Temperature`.
    """
    expected = "expected a mapping from device.id to Temperature. Return {device.id: Temperature(True, 60.0, 95.0), …}."
    if not isinstance(readings, Mapping):
        raise HealthError(f"temperatures: returned {readings!r:.200}, {expected}")
    found = {}
    for device in devices:
        reading = readings.get(
            device.id, Temperature(None, reason="temperatures: returned none of this device")
        )
        if not isinstance(reading, Temperature):
            raise HealthError(f"temperatures: returned {reading!r:.200} for {device}, {expected}")
        found[device] = _checked(reading, device)
    return found


def _checked(reading: Temperature, device: Any) -> Temperature:
    for name in ("celsius", "limit"):
        value = getattr(reading, name)
        if value is None:
            continue
        if not is_number(value):
            raise HealthError(
                f"temperatures: returned {name}={value!r:.200} for {device}, expected a number or None. "
                "Return degrees Celsius."
            )
        if not math.isfinite(value):
            return Temperature(
                None, reason=f"temperatures: returned {name}={value}, which is not a temperature"
            )
        reading = replace(reading, **{name: float(value)})
    if reading.normal is not None and not isinstance(reading.normal, bool | np.bool_):
        raise HealthError(
            f"temperatures: returned normal={reading.normal!r:.200} for {device}, expected a boolean or None. "
            "Return None where it cannot be known."
        )
    return replace(reading, normal=None if reading.normal is None else bool(reading.normal))


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
        nvml = Nvml()
    except ImportError as error:
        return unknown(f"{error}: pip install nvidia-ml-py")
    except Exception as error:  # NVMLError: no driver
        return unknown(said(error))
    return {device.id: _nvidia_one(nvml, device) for device in devices}


def _nvidia_one(nvml: Nvml, device: Any) -> Temperature:
    try:
        celsius, slows = nvml.temperature(device)
    except Exception as error:  # NVMLError, and others in other versions
        return Temperature(None, reason=said(error))
    most = slows or _GPU_LIMIT
    return Temperature(celsius < most, celsius, most, f"NVML, {device}")
