"""Freeing device memory until no more than a target is in use, or saying why that is impossible.

In this order: what nobody can reach any more (reference cycles, which only the garbage collector finds), then what
caches and callbacks give away. Whether it helped is measured, not assumed: an evicted array that a variable still holds
frees nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from capibara.measure.sizes import size_text
from capibara.memory.budget import MemoryBudget
from capibara.memory.errors import DeviceMemoryError
from capibara.memory.holders import memory_holders

__all__ = ["free_until", "pressure_error"]


def free_until(budget: MemoryBudget, target: int, releases: Iterable[Callable[[int], Any]]) -> int:
    """Free memory until at most ``target`` bytes are in use on the device, as far as possible.

    Args:
      budget: of the device.
      target: bytes.
      releases: each is called with the bytes that are still to be freed, until enough are.

    Returns:
      The bytes that are in use less now.
    """
    before = used = int(budget.in_use())
    if used > target:
        gc.collect()
        used = int(budget.in_use())
    for release in releases:
        if used <= target:
            break
        release(used - target)
        used = int(budget.in_use())
    return before - used


def pressure_error(
    budget: MemoryBudget, purpose: str, label: Callable[[Any], str | None] | None = None
) -> DeviceMemoryError:
    """The error that says who holds the memory.

    Args:
      budget: of the device.
      purpose: what could not be done, as the beginning of a sentence.
      label: names arrays that have an owner.
    """
    used = budget.in_use()
    return DeviceMemoryError(
        f"{purpose}: {size_text(used)} of {size_text(budget.limit)} are in use on {budget.device} ({used.source}; "
        f"limit: {budget.limit.source}), and nothing more can be freed. Delete arrays, or let the limit be larger. "
        "The memory is held by:",
        memory_holders(budget.device, label=label),
    )
