"""Describe the machine on which a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

from capibara.hardware.processor import cpu_name

__all__ = ["format_machine", "machine_description"]

_PACKAGES = ("capibara-jax", "jax", "jaxlib", "numpy", "torch")


def machine_description(*, devices: bool = True) -> dict[str, Any]:
    """Processor, cores, memory, load, system, versions and JAX devices of this machine, ready for JSON.

    Args:
      devices: whether to ask JAX for its devices (which starts its backend).

    Returns:
      A dictionary; ``load`` is the one-minute load average (None if unavailable), which shows whether the machine was
      busy.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # not installed: it has no version to report
            continue
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        memory = None
    description: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": cores,
        "memory_bytes": memory,
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": versions,
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    if devices:
        import jax

        description["devices"] = [str(d.device_kind) for d in jax.local_devices()]
    return description


def format_machine(description: dict[str, Any]) -> str:
    """A :func:`machine_description` as one line, for use below a table."""
    memory = description.get("memory_bytes")
    parts = [
        f"{description['cores']} cores of {description['cpu']}",
        f"{memory / 1024**3:.0f} GiB" if memory else "",
        f"load {description['load']:.1f}" if description.get("load") is not None else "",
        ", ".join(f"{name} {version}" for name, version in description["versions"].items()),
        f"devices {', '.join(dict.fromkeys(description['devices']))}" if description.get("devices") else "",
    ]
    return "; ".join(part for part in parts if part)


if __name__ == "__main__":
    sys.stdout.write(format_machine(machine_description()) + "\n")
