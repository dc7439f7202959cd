"""The vendors' libraries of GPUs and TPUs, and devices of JAX, for machines that have none."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

__all__ = ["FakeDevice", "FakeNvml", "libtpu", "pci"]


def pci(root: Path, *devices: tuple[str, str]) -> None:
    for number, (vendor, device) in enumerate(devices):
        folder = root / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "device").write_text(f"{device}\n")


class FakeNvml(types.ModuleType):
    """Two GPUs as ``pynvml`` has them; the second does not report its utilization."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.started = 0

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-first": 0, "GPU-second": 1}[name]

    def nvmlDeviceGetName(self, handle: int) -> bytes | str:
        return b"NVIDIA A" if handle else "NVIDIA B"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return types.SimpleNamespace(used=(1 + handle) << 30, total=4 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        if handle:
            raise RuntimeError("Not Supported")
        return types.SimpleNamespace(gpu=40)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return 50 + handle


def libtpu(monkeypatch: pytest.MonkeyPatch, **metrics: list[str]) -> None:
    """``libtpu.sdk`` with metrics as its own descriptions say that they look."""
    sdk = types.ModuleType("libtpu.sdk")

    def get_metric(name: str) -> Any:
        return types.SimpleNamespace(data=lambda: metrics.get(name, []))

    vars(sdk)["tpumonitoring"] = types.SimpleNamespace(get_metric=get_metric)
    monkeypatch.setitem(sys.modules, "libtpu.sdk", sdk)
    monkeypatch.setitem(sys.modules, "libtpu", types.ModuleType("libtpu"))


class FakeDevice:
    def __init__(self, platform: str, number: int, kind: str, used: int) -> None:
        self.platform, self.id, self.device_kind = platform, number, kind
        self.local_hardware_id = number
        self._used = used

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_in_use": self._used, "bytes_limit": 100}
