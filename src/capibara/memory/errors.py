"""Errors of the memory room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from capibara.errors import CapibaraError

if TYPE_CHECKING:
    from capibara.memory.holders import Holder

__all__ = [
    "CacheFullError",
    "DeviceMemoryError",
    "ItemTooLargeError",
    "MemoryPressureWarning",
    "MemorySettingError",
    "OffloadError",
]


class MemorySettingError(CapibaraError, ValueError):
    """An argument of a memory manager, monitor or cache is invalid."""


class ItemTooLargeError(MemorySettingError):
    """A value is larger than the cache that should hold it."""


class CacheFullError(CapibaraError, MemoryError):
    """A cache has no room, and nothing in it can be moved away."""


class OffloadError(CapibaraError, NotImplementedError):
    """The platform has no memory on the host that its devices read by themselves."""


class DeviceMemoryError(CapibaraError, MemoryError):
    """A device has too little memory left, and what could be freed was not enough.

    Attributes:
      holders: what holds the memory, the largest first.
    """

    def __init__(self, text: str, holders: Sequence[Holder] = ()) -> None:
        lines = [text, *(f"  {holder}" for holder in holders)]
        super().__init__("\n".join(lines))
        self.holders = tuple(holders)


class MemoryPressureWarning(UserWarning):
    """The threshold was exceeded for a while, and what could be freed was not enough to return below it."""
