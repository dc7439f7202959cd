"""How long a request will wait for a place among the texts that are written.

By Little's law (Little, Operations Research 9, 1961), places that are all taken become free at a rate of their number
divided by the mean time that a text holds one. That time is taken of the texts that ended last; it says nothing about
hours in which nobody asked, as the times between ends would.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Turns"]

_LAST = 64  # texts that the mean is of


class Turns:
    """Estimates waits; it is as good as the next texts are like the last ones."""

    def __init__(self) -> None:
        self._held: deque[float] = deque(maxlen=_LAST)

    def ended(self, held_s: float) -> None:
        """A text has ended that held its place for so many seconds."""
        self._held.append(held_s)

    def wait_s(self, ahead: int, places: int) -> float:
        """Seconds until a request gets a place; 0 while no text has ended.

        Args:
          ahead: requests that come before it. places: how many there are, all taken.
        """
        held = list(self._held)  # any thread may ask
        return sum(held) / len(held) * (ahead + 1) / max(1, places) if held else 0.0
