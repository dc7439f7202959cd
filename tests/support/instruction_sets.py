"""The instruction sets of the native library that this processor has."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import pytest

__all__ = ["instruction_sets"]


def instruction_sets() -> list[Any]:
    """A parameter for each. Those between the first and the one that is chosen here are slow."""
    if platform.machine() == "aarch64":
        return ["neon"]
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = ["baseline", *(n for n, f in (("avx2", " avx2 "), ("avx512", " avx512dq ")) if f in flags)]
    return [names[0], *(pytest.param(n, marks=pytest.mark.slow) for n in names[1:-1]), *names[1:][-1:]]
