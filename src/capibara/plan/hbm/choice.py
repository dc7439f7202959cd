"""The result of :class:`~capibara.plan.hbm.optimizer.HBMOptimizer`: what was chosen, and what was considered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from capibara.measure.sizes import size_text

__all__ = ["Considered", "HBMChoice"]


@dataclass(frozen=True, kw_only=True)
class Considered:
    """One way of running the step, compiled.

    Attributes:
      remat: what blocks keep for the backward pass: one of :data:`capibara.memory.rematerialisation.REMAT`.
      bytes: memory of the device that the compiled program needs; None if it was not compiled, or was refused.
      host_bytes: memory of the host that it needs.
      flops, traffic: operations of one step, and bytes that it moves to and from the device's memory, by reading the
        program, loops multiplied out; None where that was not done.
      seconds: predicted for one step; None where the device's rate is not known (CPU).
      fits: whether it is within the limit.
      reason: why it was not chosen; empty for the one that was.
    """

    remat: str
    bytes: int | None = None
    host_bytes: int = 0
    flops: float | None = None
    traffic: float | None = None
    seconds: float | None = None
    fits: bool = False
    reason: str = ""

    def __str__(self) -> str:
        size = "not compiled" if self.bytes is None else size_text(self.bytes)
        host = f" and {size_text(self.host_bytes)} of the host" if self.host_bytes else ""
        time = "" if self.seconds is None else f", {self.seconds * 1e3:.3g} ms"
        return f"remat {self.remat}: {size}{host}{time}{self.reason and f' ({self.reason})'}"


@dataclass(frozen=True, kw_only=True)
class HBMChoice:
    """How to run a step within a limit.

    Attributes:
      remat: what blocks keep for the backward pass.
      donate_argnums: arguments whose memory the results reuse.
      not_donated: the other arguments that might have been donated, each with the reason.
      bytes: memory of the device that the compiled program needs.
      limit: bytes that it may need; limit_source: who says so.
      considered: every way that was looked at.
      step: the step function with that rematerialisation, not jitted.
      plan: the plan of a slice, if one was asked for.
    """

    remat: str
    donate_argnums: tuple[int, ...]
    not_donated: dict[int, str]
    bytes: int
    limit: int
    limit_source: str
    considered: tuple[Considered, ...]
    step: Callable[..., Any] = field(repr=False)
    plan: Any = field(default=None, repr=False)

    def jit(self, **options: Any) -> Any:
        """``jax.jit(self.step, donate_argnums=self.donate_argnums, **options)``."""
        import jax

        return jax.jit(self.step, donate_argnums=self.donate_argnums, **options)

    def __str__(self) -> str:
        donated = ", ".join(map(str, self.donate_argnums)) or "none"
        lines = [
            f"remat {self.remat}, donated arguments: {donated}: {size_text(self.bytes)} of {size_text(self.limit)} "
            f"({self.limit_source})"
        ]
        lines += [f"  argument {n} is not donated: {why}" for n, why in self.not_donated.items()]
        return "\n".join([*lines, *(f"  {each}" for each in self.considered)])
