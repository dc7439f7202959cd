"""Checks of the plain values that blocks are made with: each error names the argument and what it may be."""

from __future__ import annotations

import math
import re
from typing import Any

from capibara.compose.errors import WiringError
from capibara.errors import did_you_mean

__all__ = ["MOST_PORTS", "choice", "identifier", "items", "number", "several", "whole"]

MOST_PORTS = 4096


def whole(name: str, value: Any, low: int | None = 1, *, optional: bool = False) -> None:
    """``value`` is an integer of at least ``low`` (None: any), or None if it is ``optional``.

    Raises:
        WiringError: it is not.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or (low is not None and value < low):
        least = "" if low is None else f" of at least {low}"
        raise WiringError(f"{name}={value!r} must be an integer{least}" + (" or None" if optional else ""))


def several(name: str, value: Any) -> None:
    """``value`` is how many ports a block has: from 1 to :data:`MOST_PORTS`.

    Raises:
        WiringError: it is not.
    """
    whole(name, value)
    if value > MOST_PORTS:
        raise WiringError(f"{name}={value!r:.40}: a block has at most {MOST_PORTS} ports")


def number(
    name: str,
    value: Any,
    low: float = 0.0,
    high: float = math.inf,
    *,
    above: bool = False,
    below: bool = False,
    optional: bool = False,
) -> None:
    """``value`` is a number from ``low`` (``above``: excluded) to ``high`` (``below``: excluded).

    Raises:
        WiringError: it is not.
    """
    if optional and value is None:
        return
    fits = not isinstance(value, bool) and isinstance(value, int | float) and low <= value <= high
    # (abs() and not math.isinf(), which no large integer survives)
    if not fits or (above and value == low) or (below and value == high) or abs(value) > 1e308:
        text = f"{'above' if above else 'at least'} {low:g}"
        if not math.isinf(high):
            text += f" and {'below' if below else 'at most'} {high:g}"
        raise WiringError(f"{name}={value!r} must be a number {text}" + (" or None" if optional else ""))


def items(name: str, value: Any) -> tuple[Any, ...]:
    """``value`` as a tuple.

    Raises:
        WiringError: it is one thing, or text.
    """
    try:
        if not isinstance(value, str | bytes):
            return tuple(value)
    except TypeError:
        pass
    raise WiringError(f"{name}={value!r:.80} must be a tuple")


def choice(name: str, value: Any, options: tuple[str, ...], *, optional: bool = False) -> None:
    """``value`` is one of ``options``, or None if it is ``optional``.

    Raises:
        WiringError: it is not.
    """
    if optional and value is None:
        return
    if not isinstance(value, str) or value not in options:
        raise WiringError(
            f"{name}={value!r} must be one of {', '.join(map(repr, options))}{' or None' if optional else ''}."
            f"{did_you_mean(str(value), options)}"
        )


def flag(name: str, value: Any) -> None:
    """``value`` is True or False.

    Raises:
        WiringError: it is not.
    """
    if not isinstance(value, bool):
        raise WiringError(f"{name}={value!r} must be True or False")


def identifier(value: Any, what: str) -> None:
    """``value`` can stand in generated source as a name.

    Raises:
        WiringError: it cannot.
    """
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", value):
        raise WiringError(f"{what}: use letters, digits and '_', starting with a letter")
