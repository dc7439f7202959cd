"""The instruction sets of the native library that this processor has."""

from __future__ import annotations

import platform
from pathlib import Path

__all__ = ["instruction_sets"]


def instruction_sets() -> list[str]:
    if platform.machine() == "aarch64":
        return ["neon"]
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["baseline", *(n for n, f in (("avx2", " avx2 "), ("avx512", " avx512dq ")) if f in flags)]
