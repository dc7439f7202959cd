"""Validation of the arguments that several classes here share."""

from __future__ import annotations

import math
from typing import Any

from capibara.memory.errors import MemorySettingError

__all__ = ["GIB", "bytes_of", "checked_choice", "checked_flag", "checked_fraction", "checked_positive"]

GIB = 2**30


def checked_positive(name: str, value: Any, *, unit: str = "") -> float:
    """A finite number above 0.

    Raises:
      MemorySettingError: it is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise MemorySettingError(
            f"{name}: got {value!r}, expected a number above 0{unit and f', in {unit}'}."
        )
    return value


def bytes_of(name: str, gib: Any) -> int:
    """Bytes of a size in GiB (2**30 bytes), at least one.

    Raises:
      MemorySettingError: it is not a finite number above 0.
    """
    return max(1, int(checked_positive(name, gib, unit="GiB") * GIB))


def checked_fraction(name: str, value: Any) -> float:
    """A number above 0, up to 1.

    Raises:
      MemorySettingError: it is not.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= 1:
        raise MemorySettingError(
            f"{name}: got {value!r}, expected a share above 0, at most 1 (0.85 is 85 %)."
        )
    return float(value)


def checked_flag(name: str, value: Any) -> bool:
    """A boolean.

    Raises:
      MemorySettingError: it is not.
    """
    if not isinstance(value, bool):
        raise MemorySettingError(f"{name}: got {value!r}, expected True or False.")
    return value


def checked_choice(name: str, value: Any, choices: tuple[str, ...]) -> str:
    """One of several words.

    Raises:
      MemorySettingError: it is not.
    """
    if value not in choices:
        raise MemorySettingError(f"{name}: got {value!r}, expected one of {', '.join(map(repr, choices))}.")
    return value
