"""Freed buffers stay in the process: counted in page faults, which do not depend on how fast the machine is."""

from __future__ import annotations

import os
import shutil
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


LIMITED = """
import mmap, resource, sys
from capibara.train.memory import keep_freed_memory
resource.setrlimit(getattr(resource, sys.argv[1]), (3 << 30, 3 << 30))
assert keep_freed_memory()
mmap.mmap(-1, 2 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs glibc")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_limited_address_space_is_left_to_others(limit: str) -> None:
    """Threads and files are mapped there, too."""
    done = subprocess.run([sys.executable, "-c", LIMITED, limit], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# Takes memory from the system and gives none back; a block's size lies before it.
OTHER = """
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
static size_t most;
size_t most_bytes(void) { return most; }
void* aligned_alloc(size_t to, size_t size) {
  static char* at;
  static size_t left;
  static char busy;
  while (__atomic_test_and_set(&busy, __ATOMIC_ACQUIRE)) {}
  size_t room = size + to + 32;
  if (size > most) most = size;
  if (room > left) {
    left = room > (64 << 20) ? room : (64 << 20);
    at = mmap(0, left, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) __builtin_abort();
  }
  char* found = (char*)(((uintptr_t)at + 16 + to - 1) / to * to);
  left -= found + (size + 15) / 16 * 16 - at;
  at = found + (size + 15) / 16 * 16;
  ((size_t*)found)[-1] = size;
  __atomic_clear(&busy, __ATOMIC_RELEASE);
  return found;
}
void* memalign(size_t to, size_t size) { return aligned_alloc(to, size); }
int posix_memalign(void** found, size_t to, size_t size) { return *found = aligned_alloc(to, size), 0; }
void* malloc(size_t size) { return aligned_alloc(16, size); }
void free(void* block) { (void)block; }
void* calloc(size_t count, size_t size) { return malloc(count * size); }
void* realloc(void* block, size_t size) {
  void* found = malloc(size);
  size_t had = block ? ((size_t*)block)[-1] : 0;
  return memcpy(found, block, had < size ? had : size);
}
"""
ASKED = """
import ctypes
from capibara.train.memory import keep_freed_memory
most = ctypes.CDLL(None).most_bytes
most.restype = ctypes.c_size_t
print(keep_freed_memory(), most() < 1 << 30)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or shutil.which("gcc") is None, reason="needs glibc and gcc"
)
def test_other_allocators_are_left_alone(tmp_path: Path) -> None:
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", ASKED], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["False", "True"]


def test_a_small_address_space_is_enough() -> None:
    """The heap cannot be extended by so much: it stays as it is."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, 1 << 30))\n" + SCRIPT
    done = subprocess.run([sys.executable, "-c", script, "keep"], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
