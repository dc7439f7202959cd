"""Keeping freed memory in the process.

On CPU every step allocates and frees the same large buffers. glibc hands buffers of that size back to the
operating system when they are freed, so that each step pays again for mapping and zeroing their pages: 0.16 s of
0.89 s of processor time in a step of the demo (65,000 page faults). Told to keep them, it reuses them at once
(0.02 s, 6,500 faults).

Large pages are requested for that heap, which Linux mostly gives only on request: with pages of 4 KiB, address
translation (TLB misses) takes 2 to 6 % of a step of ``make bench``.
"""

from __future__ import annotations

import ctypes
import sys

from capibara.memory.large_pages import ask_for_large_pages

__all__ = ["keep_freed_memory"]

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_KEPT = 2**31 - 1  # bytes at the end of the heap; the largest that mallopt takes
# Bytes of the heap in large pages: with what it has already, less than what is kept.
_ASKED = _KEPT - (64 << 20)


def keep_freed_memory() -> bool:
    """Let the C library keep freed buffers for reuse, up to 2 GiB, for the rest of the process.

    To be called before threads start (before JAX is first used): heaps that exist already stay as they are.

    Returns:
        Whether it could be set: only glibc has the setting, and a process that uses another allocator
        (``LD_PRELOAD``) is left as it is.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version") or not hasattr(libc, "mallopt"):
        return False
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    if not _allocates(libc):
        return False
    # All three are needed: separately mapped buffers always go back, so does the free end of the heap, and the
    # heaps of other threads are too small for such buffers.
    wanted = ((_M_ARENA_MAX, 1), (_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _KEPT))
    done = [libc.mallopt(option, value) for option, value in wanted]
    if not all(done):
        return False
    _have_large_pages(libc)
    return True


def _allocates(libc: ctypes.CDLL) -> bool:
    """Whether the process's ``malloc`` is glibc's, which then counts what is allocated.

    Its ``mallopt`` is there with any allocator, and the address of ``malloc`` may be one in the program itself.
    """
    try:
        count = ctypes.CDLL("libc.so.6").mallinfo
    except (OSError, AttributeError):
        return False
    count.restype = _MallInfo
    size = 1 << 16
    before = count()
    place = libc.malloc(size)
    after = count()
    libc.free(place)
    return size <= (after.uordblks + after.hblkhd - before.uordblks - before.hblkhd) % 2**32 < 2 * size


class _MallInfo(ctypes.Structure):
    """``struct mallinfo`` of <malloc.h>: ``uordblks`` bytes allocated in heaps, ``hblkhd`` mapped on their own."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_int) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def _have_large_pages(libc: ctypes.CDLL) -> None:
    """Extend the heap once, without touching it, and ask for large pages there.

    glibc can ask for them itself, but only when it is told before the process starts (``GLIBC_TUNABLES``). Where the
    process's address space is limited nothing is done: what is reserved here, others could not map.
    """
    import resource  # not on Windows

    limits = [resource.getrlimit(which)[0] for which in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    if any(limit != resource.RLIM_INFINITY for limit in limits):
        return
    start = libc.malloc(_ASKED)
    if start is None:
        return  # the system promises no more than it has (vm.overcommit_memory)
    ask_for_large_pages(start, _ASKED)
    libc.free(start)
