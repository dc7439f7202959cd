"""Which batch a step trains on, after some were left out.

The order of batches is a function of their numbers, and steps take them one after another. A batch that is left out
moves all later ones forward by one, so a run that is resumed needs no more than the numbers of those that were.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Skips"]


class Skips:
    """Numbers of batches that no step trains on.

    Args:
      numbers: of those left out so far, from 0.
    """

    def __init__(self, numbers: Iterable[int] = ()) -> None:
        self._numbers = sorted(set(numbers))

    def number(self, step: int) -> int:
        """The number of the batch that the step after ``step`` others trains on."""
        found = step
        for skipped in self._numbers:
            if skipped > found:
                break
            found += 1
        return found

    def skip(self, step: int) -> int:
        """Leave out the batch of a step, for which the next one takes its place; returns its number."""
        number = self.number(step)
        self._numbers = sorted([*self._numbers, number])
        return number

    def before(self, step: int) -> tuple[int, ...]:
        """Those left out before the batch of a step: what a checkpoint of that step has to know."""
        end = self.number(step)
        return tuple(number for number in self._numbers if number < end)

    @property
    def numbers(self) -> tuple[int, ...]:
        """All, in order."""
        return tuple(self._numbers)
