"""Arrays in large pages on Linux CPUs.

A step that reads all weights once reads them at the speed of memory. In pages of 4 KiB, address translation (TLB
misses) takes 5 to 30 % of that time; in pages of 2 MiB next to nothing. Linux mostly gives large pages only on request.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import jax

__all__ = ["ask_for_large_pages", "spans_of"]

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# <sys/mman.h>: from now on, and of what is there already (Linux 6.1).
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def spans_of(tree: Any) -> set[tuple[int, int]]:
    """Addresses and bytes of arrays on CPU devices that fill large pages, for :func:`ask_for_large_pages`.

    Only of what is a ``jax.Array`` with all its shards here; those that lie side by side are one. To move a gigabyte
    takes between a quarter of a second and, where memory is in pieces or a guest's, four seconds; addresses and values
    stay. Of arrays over a mapped file the system decides.

    Args:
      tree: nested arrays.
    """
    if not (size := _large_page()):
        return set()
    # By address, not as arrays of NumPy: those of 4 bits would be copied, and those of PRNG keys are refused.
    spans = sorted(
        (shard.data.unsafe_buffer_pointer(), shard.data.nbytes)
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        for shard in jax.block_until_ready(leaf).addressable_shards
        if shard.device.platform == "cpu"
    )
    found: list[tuple[int, int]] = []
    for start, length in spans:
        begin, there = found[-1] if found else (0, 0)
        if begin + there >= start:
            found[-1] = begin, max(there, start + length - begin)
        else:
            found.append((start, length))
    return {(start, length) for start, length in found if length >= size}


def ask_for_large_pages(start: int, length: int, *, move: bool = False) -> bool:
    """Ask the system for large pages where memory of the process lies.

    Args:
      start, length: address and bytes; what is left of a large page at either end stays as it is.
      move: also move what is there already.

    Returns:
        Whether it agrees. What it refuses stays as it is.
    """
    if not (size := _large_page()):
        return False
    begin, end = -(-start // size) * size, (start + length) // size * size
    if begin >= end:
        return False
    advise = ctypes.CDLL(None).madvise
    asked = (_MADV_HUGEPAGE, _MADV_COLLAPSE) if move else (_MADV_HUGEPAGE,)
    place = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    return not [each for each in asked if advise(*place, ctypes.c_int(each))]


@cache
def _large_page() -> int:
    """Bytes of a large page; 0 where there are none, or where the administrator has turned them off.

    ``MADV_COLLAPSE`` disregards that setting (madvise(2)).
    """
    try:
        off = "[never]" in (_SETTINGS / "enabled").read_text()
        return 0 if off else int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0
