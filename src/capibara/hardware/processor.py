"""The name of this machine's processor, as the operating system reports it."""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["cpu_name"]

# Arm's part numbers (Arm "Main ID Register" documentation; also in Linux's arch/arm64/include/asm/cputype.h).
_ARM_PARTS = {"0xd0c": "Neoverse N1", "0xd40": "Neoverse V1", "0xd49": "Neoverse N2", "0xd4f": "Neoverse V2"}


def cpu_name(cpuinfo: str | None = None) -> str:
    """The processor's name, from ``/proc/cpuinfo`` (or its text, if given)."""
    if cpuinfo is None:
        path = Path("/proc/cpuinfo")
        cpuinfo = path.read_text(errors="replace") if path.exists() else ""
    if match := re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE):
        return match[1].strip()
    if match := re.search(r"^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE):
        return f"Arm {_ARM_PARTS.get(match[1], 'CPU part ' + match[1])}"
    return platform.processor() or platform.machine() or "unknown CPU"
