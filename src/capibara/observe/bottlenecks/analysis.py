"""The rules over a profile, and what they find together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capibara.observe.bottlenecks.finding import Bottleneck
from capibara.observe.bottlenecks.rules import RULES
from capibara.observe.profile import Profile

__all__ = ["Bottleneck", "PerformanceAnalysis", "find_bottlenecks"]


@dataclass(frozen=True)
class PerformanceAnalysis:
    """What slows a program down.

    Attributes:
      profile: that was analysed.
      bottlenecks: by the time that their remedies would save.
    """

    profile: Profile
    bottlenecks: tuple[Bottleneck, ...]

    @property
    def has_bottlenecks(self) -> bool:
        """Whether there is any."""
        return bool(self.bottlenecks)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            "profile": self.profile.name,
            "wall_seconds": self.profile.wall_seconds,
            "has_bottlenecks": self.has_bottlenecks,
            "bottlenecks": [one.to_dict() for one in self.bottlenecks],
        }

    def __str__(self) -> str:
        if not self.bottlenecks:
            return f"{self.profile.name}: no bottleneck was found"
        return "\n".join([f"{self.profile.name}:", *map(str, self.bottlenecks)])


def find_bottlenecks(profile: Profile) -> PerformanceAnalysis:
    """Look for what slows a program down.

    Args:
      profile: of a region that ran warm, with all that :class:`~capibara.observe.profile.TpuPerformanceProfiler`
        captures: a rule whose figures are missing finds nothing.
    """
    found = [one for rule in RULES if (one := rule(profile)) is not None]
    return PerformanceAnalysis(profile, tuple(sorted(found, key=lambda one: -one.predicted_gain)))
