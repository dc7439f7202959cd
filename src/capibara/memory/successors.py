"""Which key comes next: the one that followed last time.

A first-order Markov predictor (Joseph and Grunwald, "Prefetching using Markov predictors", 1997) that keeps one
successor for each key: it learns loops over layers or batches in one turn, and costs one dict entry a key.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

__all__ = ["Successors"]


class Successors:
    """Learns from a sequence of keys; each thread has its own sequence, what they teach is shared."""

    def __init__(self) -> None:
        self._next: dict[Hashable, Hashable] = {}
        self._here = threading.local()

    def note(self, key: Hashable) -> None:
        """``key`` is asked for now."""
        before = getattr(self._here, "key", None)
        if before is not None and before[0] != key:
            self._next[before[0]] = key
        self._here.key = (key,)

    def after(self, key: Hashable, depth: int) -> list[Hashable]:
        """The keys that are expected next, up to ``depth``, without ``key``."""
        found: list[Hashable] = []
        current = key
        while len(found) < depth and current in self._next:
            current = self._next[current]
            if current == key or current in found:
                break
            found.append(current)
        return found

    def forget(self, key: Hashable) -> None:
        """The key no longer exists."""
        self._next.pop(key, None)
