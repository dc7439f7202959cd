"""Rank priced plans or slices, and determine which limits rule them out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from capibara.plan.cost.choices import Considered

__all__ = ["PLAN_ORDER", "SLICE_ORDER", "rounded_up", "sufficient", "what_would"]


def what_would(refused: Sequence[Considered]) -> str:
    """For each limit that alone rules out a candidate, the smallest value that would allow it."""
    said = [f"{name}={value:.2f} would allow {which}" for name, value, which in sufficient(refused)]
    return f" {'; '.join(said)}." if said else ""


def sufficient(refused: Sequence[Considered]) -> list[tuple[str, float, str]]:
    """The same as ``(limit, value, name of the candidate)``."""
    least: dict[str, tuple[float, str]] = {}
    for each in refused:
        if len(each.over) == 1:
            ((name, value),) = each.over
            least[name] = min(least.get(name, (math.inf, "")), (value, each.name))
    return [(name, rounded_up(value), which) for name, (value, which) in least.items()]


def rounded_up(value: float) -> float:
    """To cents: the value as it is printed has to be enough."""
    return math.ceil(value * 100) / 100


def _plan_dollars(c: Considered) -> tuple[float, float]:
    dollars = c.dollars_per_step if c.dollars_per_billion_tokens is None else c.dollars_per_billion_tokens
    return _known(dollars), _rate(c)


def _plan_speed(c: Considered) -> tuple[float, float]:
    return _rate(c), _known(c.dollars_per_step)


def _plan_price(c: Considered) -> tuple[float, float]:
    return _known(c.dollars_per_hour), _rate(c)


def _rate(c: Considered) -> float:
    """The less, the quicker."""
    return _known(c.step_seconds) if c.tokens_per_second is None else -c.tokens_per_second


def _slice_dollars(c: Considered) -> tuple[float, int]:
    # More chips for less time cost the same; equal prices are compared without their rounding.
    return float(f"{_known(c.dollars):.9g}"), c.num_chips


def _slice_speed(c: Considered) -> tuple[float, float]:
    return _known(c.hours), _known(c.dollars)


def _slice_price(c: Considered) -> tuple[float, float]:
    return _known(c.dollars_per_hour), _known(c.hours)


def _known(value: float | None) -> float:
    return math.inf if value is None else value


PLAN_ORDER: dict[str, Callable[[Considered], Any]] = {
    "cost_efficiency": _plan_dollars,
    "speed": _plan_speed,
    "lowest_price": _plan_price,
}
SLICE_ORDER: dict[str, Callable[[Considered], Any]] = {
    "cost_efficiency": _slice_dollars,
    "speed": _slice_speed,
    "lowest_price": _slice_price,
}
