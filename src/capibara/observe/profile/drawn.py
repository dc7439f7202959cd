"""Random numbers that Python draws: a program would keep those that were drawn while it was traced."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

__all__ = ["DrawnNumbers", "refuse_random_numbers"]


class DrawnNumbers(ValueError):
    """Python drew random numbers where a program was traced."""


@contextlib.contextmanager
def refuse_random_numbers() -> Iterator[None]:
    """Within it, no number may be drawn from the generators of ``random`` and ``numpy.random``.

    Both are left as they were, so that a script that is tried as a program goes on with the numbers that it had drawn
    without it. Generators that a script makes itself are not seen; what other threads draw meanwhile is drawn again.

    Raises:
      DrawnNumbers: at the end, if a number was drawn.
    """
    import numpy as np  # not before: the script may set its variables first

    read, write = np.random.get_state, np.random.set_state
    python, legacy = random.getstate(), read(legacy=False)
    try:
        yield
        drawn = random.getstate() != python or not _same(read(legacy=False), legacy)
    finally:
        random.setstate(python)
        write(legacy)
    if drawn:
        raise DrawnNumbers("random numbers that Python draws would be the same each time")


def _same(state: Any, other: Any) -> bool:
    """Whether two states of a generator of NumPy, nested dicts of numbers and arrays, are equal."""
    import numpy as np

    if isinstance(state, dict):
        return state.keys() == other.keys() and all(_same(state[key], other[key]) for key in state)
    return np.array_equal(state, other)
