"""How many devices there should be, by what describes the machine to its programs."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from capibara.hardware import TopologyError, chip_for_device_kind, parse_topology

__all__ = ["described_devices"]


def described_devices(
    environment: Mapping[str, str], devices: Sequence[Any], processes: int = 1, system: str = "/"
) -> tuple[int | None, str]:
    """The number of devices of all processes that the environment describes.

    Args:
      environment: variables, such as ``os.environ``.
      devices: those that JAX lists.
      processes: how many processes there are.
      system: the root of the file system in which device files are looked for.

    Returns:
      The number, and what says so; None where nothing does.
    """
    platform = devices[0].platform
    if platform == "tpu":
        chips, source = _tpu_chips(environment, processes)
        return (None, "") if chips is None else (chips * _devices_per_chip(devices[0]), source)
    if platform == "cpu":
        found = re.findall(r"--xla_force_host_platform_device_count=(\d+)", environment.get("XLA_FLAGS", ""))
        return (int(found[-1]) * processes, "XLA_FLAGS") if found else (None, "")
    if platform in ("gpu", "cuda") and "nvidia" in devices[0].device_kind.lower() and processes == 1:
        return _nvidia(environment, system)
    return None, ""


def _tpu_chips(environment: Mapping[str, str], processes: int) -> tuple[int | None, str]:
    own = _bounds(environment.get("TPU_CHIPS_PER_PROCESS_BOUNDS", ""))
    if own is not None:
        of_processes = _bounds(environment.get("TPU_PROCESS_BOUNDS", "")) or 1
        return own * of_processes, "TPU_CHIPS_PER_PROCESS_BOUNDS and TPU_PROCESS_BOUNDS"
    for name in ("TPU_VISIBLE_CHIPS", "TPU_VISIBLE_DEVICES"):
        chips = [each for each in environment.get(name, "").split(",") if each.strip()]
        if chips:
            return (len(chips), name) if processes == 1 else (None, "")
    slices = environment.get("MEGASCALE_NUM_SLICES", "")
    count = int(slices) if slices.isdecimal() and int(slices) else 1
    for name in ("TPU_TOPOLOGY", "TPU_ACCELERATOR_TYPE", "ACCELERATOR_TYPE"):
        if text := environment.get(name):
            try:
                return parse_topology(text).num_chips * count, name
            except TopologyError:
                continue
    chips, hosts = (
        _bounds(environment.get(name, "")) for name in ("TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
    )
    if chips is not None and hosts is not None:
        return chips * hosts * count, "TPU_CHIPS_PER_HOST_BOUNDS and TPU_HOST_BOUNDS"
    return None, ""


def _bounds(text: str) -> int | None:
    """The product of ``"2,2,1"``, or None."""
    parts = [part.strip() for part in text.split(",")]
    return math.prod(map(int, parts)) if all(part.isdecimal() for part in parts) else None


def _devices_per_chip(device: Any) -> int:
    chip = chip_for_device_kind(device.device_kind)
    if chip is None:
        return 1
    cores = getattr(device, "num_cores", None)
    return max(1, (chip.cores_per_chip or 1) // cores) if cores else chip.devices_per_chip


def _nvidia(environment: Mapping[str, str], system: str) -> tuple[int | None, str]:
    if "CUDA_VISIBLE_DEVICES" in environment:
        names = [name.strip() for name in environment["CUDA_VISIBLE_DEVICES"].split(",")]
        if any(name.startswith("MIG") for name in names):
            return None, ""
        count = len([name for name in names if name and name != "-1"])
        return (count, "CUDA_VISIBLE_DEVICES") if count else (None, "")
    try:
        names = os.listdir(os.path.join(system, "dev"))
    except OSError:
        return None, ""
    count = sum(re.fullmatch(r"nvidia\d+", name) is not None for name in names)
    return (count, "the device files /dev/nvidia*") if count else (None, "")
