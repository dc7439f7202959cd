"""Candidates with their prices, and the choice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from capibara.plan.errors import PlanError

__all__ = ["Considered", "CostChoice", "NothingAffordableError"]


class NothingAffordableError(PlanError):
    """No candidate is within the limits.

    Attributes:
      considered: all of them, with what rules each out.
    """

    considered: tuple[Considered, ...] = ()


@dataclass(frozen=True)
class Considered:
    """One plan or slice, priced.

    Attributes:
      candidate: the plan, or the :class:`~capibara.plan.slices.Slice`.
      hours, dollars: for the whole job, if its size is known.
      step_seconds, tokens_per_second, dollars_per_step, dollars_per_billion_tokens: of a plan.
      refused: why it was not considered further, or None.
      over: limits that it exceeds, each with the value that would allow it.
    """

    candidate: Any
    name: str
    chip: str
    num_chips: int
    dollars_per_hour: float | None = None
    hours: float | None = None
    dollars: float | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    dollars_per_step: float | None = None
    dollars_per_billion_tokens: float | None = None
    price: str = ""
    refused: str | None = None
    over: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        parts = []
        if self.dollars_per_hour is not None:
            parts.append(f"${self.dollars_per_hour:,.2f} an hour")
        if self.dollars_per_billion_tokens is not None:
            parts.append(f"${self.dollars_per_billion_tokens:,.2f} a billion tokens")
        if self.step_seconds is not None:
            parts.append(f"{self.step_seconds:.4g} s a step")
        if self.hours is not None and self.dollars is not None:
            parts.append(f"{self.hours:,.4g} hours, ${self.dollars:,.2f}")
        text = f"{self.name}: {', '.join(parts)}" if parts else self.name
        return f"{text}; {self.refused}" if self.refused else text


@dataclass(frozen=True)
class CostChoice:
    """The choice and all candidates, the best first and the refused last.

    Attributes:
      best: the chosen one; its plan or slice is :attr:`candidate`.
    """

    best: Considered
    considered: tuple[Considered, ...]
    optimization_target: str

    @property
    def candidate(self) -> Any:
        """The chosen plan or slice itself."""
        return self.best.candidate

    def __str__(self) -> str:
        lines = [f"for {self.optimization_target}: {self.best}", f"  at {self.best.price}"]
        lines += [f"  {each}" for each in self.considered[1:]]
        return "\n".join(lines)
