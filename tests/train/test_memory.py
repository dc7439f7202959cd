"""Freed buffers stay in the process: counted in page faults, which do not depend on how fast the machine is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


LARGE = """
import re, sys
from capibara.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
import jax.numpy as jnp
array = (jnp.arange(64 << 20, dtype=jnp.float32) + 1).block_until_ready()
at, total = array.unsafe_buffer_pointer(), 0
for one in re.split(r"\\n(?=[0-9a-f]+-[0-9a-f]+ )", open("/proc/self/smaps").read()):
    begin, end = (int(each, 16) for each in one.split(maxsplit=1)[0].split("-"))
    if begin < at + array.nbytes and at < end:
        total += 1024 * int(re.search(r"AnonHugePages: +(\\d+) kB", one)[1])
print(total)
"""
ON_REQUEST = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not ON_REQUEST.is_file() or "[madvise]" not in ON_REQUEST.read_text(),
    reason="needs a Linux that gives large pages to those who ask for them",
)
def test_buffers_lie_in_large_pages() -> None:
    def bytes_in_large_pages(mode: str) -> int:
        done = subprocess.run([sys.executable, "-c", LARGE, mode], capture_output=True, text=True, check=True)
        return int(done.stdout)

    # Of 256 MiB; where memory is scattered the system has fewer of them.
    assert bytes_in_large_pages("leave") < 32 << 20 < bytes_in_large_pages("keep")


def test_a_small_address_space_is_enough() -> None:
    """The heap cannot be extended by so much: it stays as it is."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\\n"
    script = limited.replace("\\n", "\n") + SCRIPT
    done = subprocess.run([sys.executable, "-c", script, "keep"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
