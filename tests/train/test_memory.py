"""Freed buffers stay in the process: counted in page faults, which do not depend on how fast the machine is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from capibara.train import memory

SCRIPT = """
import ctypes, resource, sys
from capibara.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 96 << 20
def touch():
    at = libc.malloc(size)
    ctypes.memset(at, 1, size)
    libc.free(at)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
def test_buffers_are_reused_without_new_pages() -> None:
    def faults(mode: str) -> int:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, mode], capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert faults("keep") < 100 < faults("leave")


def test_other_systems_are_left_alone(monkeypatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory.keep_freed_memory() is False
