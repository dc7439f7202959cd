"""Which entry of a cache leaves first.

``lru``: the one not used for the longest time. ``lfu``: the one used least often since it came, and of several such
ones the one not used for the longest time. Both from the 1960s (Denning, "The working set model", 1968, for their
properties); a scan over more than fits defeats the first, a change of what is popular the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from capibara.memory.arguments import checked_choice

__all__ = ["POLICIES", "Used", "choose_victim"]


class Used(Protocol):
    """An entry of a cache."""

    uses: int


_Entry = TypeVar("_Entry", bound=Used)
POLICIES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "lru": lambda entries: next(iter(entries), None),
    "lfu": lambda entries: min(entries, key=lambda entry: entry.uses, default=None),
}


def choose_victim(policy: str, entries: Iterable[_Entry]) -> _Entry | None:
    """The entry that leaves first; None if there is none.

    Args:
      policy: ``"lru"`` or ``"lfu"``.
      entries: in the order of their last use, the longest ago first.
    """
    return POLICIES[checked_choice("policy", policy, tuple(POLICIES))](entries)
