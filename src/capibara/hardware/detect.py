"""Detect the chip of this machine, as reported by JAX and the operating system."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from capibara.hardware.catalogue import chip_for_device_kind, get_chip
from capibara.hardware.chip import Chip, Source
from capibara.hardware.processor import cpu_name

__all__ = ["detect_chip"]


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # no such figure on this system
        return None


def _cpu_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_chip(name: str, board: str) -> Chip:
    lowered = name.lower()
    if "neoverse v2" in lowered and "google" in board.lower():
        base = get_chip("arm-axion")
        name = f"{base.title}"
    elif "amd" in lowered:
        base = get_chip("cpu-amd")
    elif "intel" in lowered:
        base = get_chip("cpu-intel")
    elif lowered.startswith("arm") or "aarch64" in lowered:
        base = get_chip("cpu-arm")
    else:
        base = Chip(name="cpu", title=name, vendor="unknown", kind="cpu")
    return replace(
        base,
        title=name,
        hbm_bytes=_memory_bytes(),
        cores_per_chip=_cpu_count(),
        sources=(*base.sources, ("hbm_bytes", Source("this machine's operating system"))),
    )


def detect_chip(device: Any = None, *, rates: Mapping[str, float] | None = None) -> Chip:
    """Describe the chip behind a JAX device (the default one, if none is given).

    For a TPU or GPU in the catalogue, its entry (or one core of it, if the device is one core); for others, what the
    device itself reports, with the rest None. For a CPU, its name, cores and memory; no vendor publishes its
    matrix-multiply rate, so its peaks are ``rates``, if given. ``capibara.measure.measured_chip()`` measures them and
    calls this.

    Args:
      device: a ``jax.Device``.
      rates: measured FLOP/s by dtype; they replace the catalogue's peaks, and ``measured`` is set.

    Returns:
      The chip.
    """
    import jax

    device = jax.devices()[0] if device is None else device
    if device.platform == "cpu":
        board = Path("/sys/class/dmi/id/sys_vendor")
        chip = _cpu_chip(cpu_name(), board.read_text(errors="replace") if board.exists() else "")
    else:
        kind = "tpu" if device.platform == "tpu" else "gpu"
        known = chip_for_device_kind(device.device_kind)
        chip = known or Chip(name=device.device_kind, title=device.device_kind, vendor="unknown", kind=kind)
        one_core = getattr(device, "num_cores", None) == 1
        if known is not None and one_core and (known.cores_per_chip or 1) > 1:
            chip = known.core_view()
    if rates:
        measured = (("peak_flops", Source("measured on this machine")), *chip.sources)
        chip = replace(chip, peaks=tuple(rates.items()), measured=True, sources=measured)
    return chip
