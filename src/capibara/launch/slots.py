"""How many processes a group has when one of them cannot be replaced.

A group has a slot for each process that was asked for, with the devices of that slot. A process that fails is replaced
in its slot. If it fails there again, soon after it was started, something is wrong with the slot: it is left out for a
while, and the group goes on with fewer, so many that batches which all slots could share still can be shared: a
divisor of their number. What is wrong may pass, so the slot is tried again, after twice as long each time. Where too
few are left for a group, nothing is gained by leaving slots out, and all of them are tried again at once.
"""

from __future__ import annotations

import math

__all__ = ["Slots"]

_LONGEST = 16  # times the first wait


class Slots:
    """Which slots have a process.

    Args:
      count: slots. fewest: processes that a group needs.
      replacements: how often in a row a process that fails soon is replaced in its slot.
      soon: seconds from the start of a process. retry: seconds until a slot is tried again.
    """

    def __init__(self, count: int, fewest: int, *, replacements: int, soon: float, retry: float) -> None:
        self.count, self.fewest = count, fewest
        self._replacements, self._soon, self._retry = replacements, soon, retry
        self._failures = [0] * count
        self._times_out = [0] * count
        self._back_at = [-math.inf] * count

    def chosen(self, now: float) -> tuple[int, ...]:
        """The slots that have a process now; none if they would be too few."""
        good = [slot for slot in range(self.count) if self._back_at[slot] <= now]
        return tuple(good[: self._size(len(good))])

    def failed(self, slot: int, *, after: float, now: float) -> bool:
        """A process failed ``after`` so many seconds; whether its slot is left out now."""
        self._failures[slot] = self._failures[slot] + 1 if after < self._soon else 1
        if self._failures[slot] <= self._replacements:
            return False
        wait = self._retry * min(2 ** self._times_out[slot], _LONGEST)
        self._times_out[slot] += 1
        # The next failure counts as one more, not as a first one.
        self._failures[slot], self._back_at[slot] = self._replacements, now + wait
        return True

    def all_again(self) -> None:
        """Take all slots back, as if none had failed.

        So the next failure of each is not one of a trial (:meth:`on_trial`): who counts the others comes to an end.
        """
        self._failures = [0] * self.count
        self._times_out = [0] * self.count
        self._back_at = [-math.inf] * self.count

    def on_trial(self, slot: int, *, after: float) -> bool:
        """Whether a failure ``after`` so many seconds only says that what was wrong with a slot still is."""
        return self._times_out[slot] > 0 and after < self._soon

    def grows_at(self, now: float) -> float | None:
        """When there will be slots for more processes than now; None if there already are all."""
        size = len(self.chosen(now))
        out = sorted(at for at in self._back_at if at > now)
        good = self.count - len(out)
        for number, at in enumerate(out, start=1):
            if self._size(good + number) > size:
                return at
        return None

    def _size(self, good: int) -> int:
        fits = [size for size in range(self.fewest, good + 1) if self.count % size == 0]
        return fits[-1] if fits else 0
