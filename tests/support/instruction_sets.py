"""The instruction sets of the native library that this processor has."""

from __future__ import annotations

from pathlib import Path

__all__ = ["instruction_sets"]


def instruction_sets() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ["baseline", *(n for n, f in (("avx2", " avx2 "), ("avx512", " avx512dq ")) if f in flags)]
