"""Accelerators as their vendors' libraries report them: NVML for NVIDIA's GPUs, libtpu's monitoring for TPUs.

Neither needs JAX. NVML also reports on devices that another process uses;
libtpu only if that process shares its metrics.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["DeviceReading", "Nvml", "accelerators_present", "machine_accelerators", "tpu_values"]

# PCI devices of Google (vendor 0x1ae0) that are TPUs, as in JAX's hardware_utils; its network cards are others.
_TPU_IDS = frozenset({"0x0027", "0x0056", "0x005e", "0x0062", "0x0063", "0x006f", "0x0076"})
_NO_TPU_TEMPERATURE = "libtpu reports no temperature"


@dataclass(frozen=True)
class DeviceReading:
    """One accelerator at one time; None with a reason where a figure is not reported.

    Attributes:
      name: such as ``TPU_0``. kind: the model, as the vendor names it.
      memory_in_use, memory_limit: bytes.
      utilization: share of the time in which it worked, 0 to 1.
      temperature: °C.
      reasons: why a figure is None, by ``memory_usage``, ``utilization`` and ``temperature``.
    """

    name: str
    kind: str
    memory_in_use: int | None = None
    memory_limit: int | None = None
    utilization: float | None = None
    temperature: float | None = None
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_usage(self) -> float | None:
        """Share of its memory that is in use, 0 to 1."""
        if self.memory_in_use is None or not self.memory_limit:
            return None
        return self.memory_in_use / self.memory_limit

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kind": self.kind,
            "memory_usage": self.memory_usage,
            "memory_in_use_bytes": self.memory_in_use,
            "memory_limit_bytes": self.memory_limit,
            "utilization": self.utilization,
            "temperature": self.temperature,
            "reasons": dict(self.reasons),
        }


def said(error: BaseException) -> str:
    """An error of a vendor's library as a reason."""
    return f"{type(error).__name__}: {error}"[:300]


def accelerators_present(root: str | os.PathLike[str] = "/") -> tuple[int, int]:
    """How many TPU chips and NVIDIA GPUs the operating system shows, whoever uses them.

    Args:
      root: of the file system in which they are looked for.
    """
    tpus = 0
    for folder in Path(root).glob("sys/bus/pci/devices/*"):
        if _text(folder / "vendor") == "0x1ae0" and _text(folder / "device") in _TPU_IDS:
            tpus += 1
    return tpus, len(list(Path(root).glob("dev/nvidia[0-9]*")))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


class Nvml:
    """NVIDIA's management library, through the package ``nvidia-ml-py``; started once.

    Raises:
      ImportError: the package is not installed. Whatever it raises if the library cannot be started.
    """

    def __init__(self) -> None:
        self._library = importlib.import_module("pynvml")
        self._library.nvmlInit()

    def all(self) -> tuple[DeviceReading, ...]:
        """Every GPU of this machine."""
        library = self._library
        return tuple(
            self._read(f"GPU_{index}", library.nvmlDeviceGetHandleByIndex(index))
            for index in range(library.nvmlDeviceGetCount())
        )

    def utilization(self, device: Any) -> float:
        """Share of the time in which a GPU of JAX's worked; 0 to 1."""
        return self._busy(self._handle(device))

    def temperature(self, device: Any) -> tuple[float, float | None]:
        """°C of a GPU of JAX's, and from which it slows down (None if the library does not say)."""
        handle = self._handle(device)
        celsius = float(self._library.nvmlDeviceGetTemperature(handle, 0))
        try:
            slows = float(self._library.nvmlDeviceGetTemperatureThreshold(handle, 1))
        except Exception:  # NVMLError: not every GPU has such a bound
            slows = 0.0
        return celsius, slows or None

    def _handle(self, device: Any) -> Any:
        """JAX counts the GPUs that it is allowed to see, NVML those of the machine."""
        number = getattr(device, "local_hardware_id", None)
        index = device.id if number is None else number
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        names = [name.strip() for name in visible if name.strip()]
        name = names[index] if index < len(names) else str(index)
        if name.isdecimal():
            return self._library.nvmlDeviceGetHandleByIndex(int(name))
        return self._library.nvmlDeviceGetHandleByUUID(name)

    def _busy(self, handle: Any) -> float:
        return float(self._library.nvmlDeviceGetUtilizationRates(handle).gpu) / 100

    def _read(self, name: str, handle: Any) -> DeviceReading:
        library = self._library
        reasons: dict[str, str] = {}

        def ask(metric: str, function: Callable[[], Any]) -> Any:
            try:
                return function()
            except Exception as error:  # NVMLError, and others in other versions
                reasons[metric] = said(error)
                return None

        memory = ask("memory_usage", lambda: library.nvmlDeviceGetMemoryInfo(handle))
        kind = ask("kind", lambda: library.nvmlDeviceGetName(handle))
        return DeviceReading(
            name,
            kind.decode(errors="replace") if isinstance(kind, bytes) else str(kind or "GPU"),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            ask("utilization", lambda: self._busy(handle)),
            ask("temperature", lambda: float(library.nvmlDeviceGetTemperature(handle, 0))),
            reasons,
        )


def tpu_values(metric: str) -> tuple[list[float], str]:
    """A metric of libtpu's for each chip of this host; an empty list and the reason where it reports none."""
    try:
        monitoring = importlib.import_module("libtpu.sdk").tpumonitoring
        values = [float(value) for value in monitoring.get_metric(metric).data()]
    except ImportError as error:
        return [], f"{error}: pip install libtpu"
    except Exception as error:
        # A library of the vendor's without a stated interface of errors: whatever it raises is the reason.
        return [], said(error)
    if not values or not all(map(math.isfinite, values)):
        return [], f"libtpu reports no {metric} now: a program that uses the TPU has to share its metrics"
    return values, ""


def machine_accelerators(
    nvml: Callable[[], Nvml], root: str | os.PathLike[str] = "/"
) -> tuple[DeviceReading, ...]:
    """Every TPU chip and NVIDIA GPU of this machine, also those that another process uses.

    libtpu is not imported where there is no TPU.

    Args:
      nvml: makes or returns the library. root: of the file system.
    """
    tpus, gpus = accelerators_present(root)
    return (*(_tpus(tpus) if tpus else ()), *(_gpus(gpus, nvml) if gpus else ()))


def _gpus(count: int, nvml: Callable[[], Nvml]) -> Sequence[DeviceReading]:
    try:
        return nvml().all()
    except ImportError as error:
        why = f"{error}: pip install nvidia-ml-py"
    except Exception as error:
        why = said(error)
    return [_unknown(f"GPU_{index}", "NVIDIA GPU", why) for index in range(count)]


def _unknown(name: str, kind: str, why: str) -> DeviceReading:
    return DeviceReading(
        name, kind, reasons=dict.fromkeys(("memory_usage", "utilization", "temperature"), why)
    )


def _tpus(count: int) -> Sequence[DeviceReading]:
    used, no_use = tpu_values("hbm_capacity_usage")
    limit, no_limit = tpu_values("hbm_capacity_total")
    busy, no_busy = tpu_values("duty_cycle_pct")
    found = []
    for chip in range(max(count, len(used), len(busy))):
        missing = "libtpu reports fewer chips than this machine has"
        reasons = {"temperature": _NO_TPU_TEMPERATURE}
        if chip >= min(len(used), len(limit)):
            reasons["memory_usage"] = no_use or no_limit or missing
        if chip >= len(busy):
            reasons["utilization"] = no_busy or missing
        found.append(
            DeviceReading(
                f"TPU_{chip}",
                "TPU",
                int(used[chip]) if chip < len(used) else None,
                int(limit[chip]) if chip < len(limit) else None,
                busy[chip] / 100 if chip < len(busy) else None,
                reasons=reasons,
            )
        )
    return found
