"""One thing that slows a program down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["KINDS", "Bottleneck"]

KINDS = (
    "recompilation",
    "idle",
    "dispatch",
    "unfused",
    "small_products",
    "padded",
    "float64",
    "float32",
    "communication",
    "callback",
    "copies",
)


@dataclass(frozen=True)
class Bottleneck:
    """Something that slows a program down.

    Attributes:
      kind: one of :data:`KINDS`.
      description: what was found, with figures.
      suggestion: what to do.
      evidence: the figures.
      predicted_gain: the part of the time that the remedy would save, 0 to 1, computed from them.
    """

    kind: str
    description: str
    suggestion: str
    evidence: Mapping[str, Any]
    predicted_gain: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return f"  {100 * self.predicted_gain:4.1f} %  {self.description}\n          {self.suggestion}"
