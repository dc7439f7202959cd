"""How a process of its own gets several CPU devices."""

from __future__ import annotations

import os

__all__ = ["emulated"]


def emulated(devices: int, *, quick: bool = False) -> str:
    """``XLA_FLAGS`` with so many devices, and what the tests run with: ``make test`` compiles without optimizing.

    Args:
      devices: how many.
      quick: compile so in any case, for programs that are long to compile and short to run.
    """
    parts = [os.environ.get("XLA_FLAGS", ""), f"--xla_force_host_platform_device_count={devices}"]
    return " ".join([*parts, "--xla_backend_optimization_level=0"] if quick else parts)
