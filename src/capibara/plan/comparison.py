"""``plan_slices``: the cheapest slice for a deadline, or the fastest for a budget.

Each slice is planned on its own (:func:`capibara.plan.plan`); what is compared are their best layouts, with the hours
and dollars that the whole job takes on each (:class:`capibara.plan.cost.TpuCostOptimizer`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from capibara.config import ModularModelConfig
from capibara.plan.candidate import Candidate
from capibara.plan.cost.choices import Considered, NothingAffordableError
from capibara.plan.cost.operations import checked_number
from capibara.plan.cost.optimizer import CostTarget, TpuCostOptimizer
from capibara.plan.cost.ranking import rounded_up, sufficient
from capibara.plan.errors import CompilerMissingError, DoesNotFitError, PlanError
from capibara.plan.gpus import GpuHost, is_gpu_name
from capibara.plan.planning import Progress, as_work, plan
from capibara.plan.result import Plan
from capibara.plan.several import Several
from capibara.plan.slices import Slice, parse_slice
from capibara.plan.work import Work
from capibara.sharding import Layout

__all__ = ["SliceRow", "SlicesPlan", "plan_slices"]

Goal = Literal["cheapest", "fastest"]
_TARGETS: dict[Goal, CostTarget] = {"cheapest": "cost_efficiency", "fastest": "speed"}
# The limits of a job are those of its hours and of its price; none per hour.
_ANY_HOURLY = 1e12
_ADVISED = 4
_LIMITS = {"max_hours": "a deadline of {:,.2f} hours", "max_cost": "a budget of ${:,.2f}"}


@dataclass(frozen=True)
class SliceRow:
    """One slice.

    Attributes:
      target: the slice.
      plan: its plan; None if nothing fits on it.
      hours, dollars: of the whole job; None if its size or the price is not known.
      usd_per_hour: of the slice.
      reason: why it is ruled out; empty if it is within the limits.
      over: the limits that it exceeds (``"max_hours"``, ``"max_cost"``), each with the value that would allow it.
    """

    target: Slice
    plan: Plan | None = field(default=None, repr=False)
    hours: float | None = None
    dollars: float | None = None
    usd_per_hour: float | None = None
    reason: str = ""
    over: tuple[tuple[str, float], ...] = ()

    @property
    def candidate(self) -> Candidate | None:
        """The best layout on it."""
        return None if self.plan is None else self.plan.best

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        own = None if self.plan is None else self.plan.own
        return {
            "topology": self.target.text,
            "slice": self.target.slice_name,
            "view": self.target.view,
            "chips": self.target.num_chips,
            "fits": self.plan is not None,
            "reason": self.reason or None,
            "over": dict(self.over),
            "hours": self.hours,
            "usd": self.dollars,
            "usd_per_hour": self.usd_per_hour,
            "candidate": None if self.candidate is None else self.candidate.to_json(),
            "own": None if own is None else own.to_json(self.candidate),
        }


@dataclass(frozen=True)
class SlicesPlan:
    """Several slices, and the choice between them.

    Attributes:
      work: a one-line description.
      rows: the chosen slice first, then the others within the limits, the best first, then those that are ruled out.
      goal: what is looked for within the limits: the ``"cheapest"`` slice, or the ``"fastest"``.
      tokens: of the whole job, or None. deadline_hours, budget: its limits, in hours and US dollars, or None.
      advice: which values would suffice, if no slice is within the limits.
      notes: caveats.
    """

    work: str
    rows: tuple[SliceRow, ...]
    goal: Goal = "cheapest"
    tokens: float | None = None
    deadline_hours: float | None = None
    budget: float | None = None
    advice: str = ""
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> SliceRow | None:
        """The best slice within the limits; None if there is none."""
        return self.rows[0] if self.rows and not self.rows[0].reason else None

    @property
    def fits(self) -> bool:
        """Whether a slice is within the limits."""
        return self.chosen is not None

    def to_json(self) -> dict[str, Any]:
        """Plain data: that of the chosen slice's plan, which ``capibara train --plan`` reads, and ``slices``."""
        own = {} if self.chosen is None or self.chosen.plan is None else self.chosen.plan.to_json()
        return {
            **own,
            "work": self.work,
            "goal": self.goal,
            "tokens": self.tokens,
            "deadline_hours": self.deadline_hours,
            "budget_usd": self.budget,
            "advice": self.advice or None,
            "notes": list(self.notes),
            "slices": [row.to_json() for row in self.rows],
        }

    def __str__(self) -> str:
        from capibara.plan.report.slices import slices_text

        return slices_text(self)


def plan_slices(
    work: ModularModelConfig | Work | str | os.PathLike[str],
    topologies: Iterable[str | Slice],
    *,
    tokens: float | None = None,
    deadline_hours: float | None = None,
    budget: float | None = None,
    view: str | None = None,
    memory_limit_gb: float | None = None,
    compile: bool | None = None,
    max_compiles: int = 8,
    top: int = 5,
    keep: Iterable[str] = (),
    layout: Layout | str | os.PathLike[str] | Iterable[str] | None = None,
    choose_settings: bool = False,
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    on_slice: Callable[[Slice], None] | None = None,
) -> SlicesPlan:
    """Plan a step on several slices, and choose one.

    With a deadline the cheapest slice that meets it (and the budget, if there is one), with a budget alone the fastest
    one within it, without limits the cheapest for the same work. A slice on which nothing fits, or without a price, is
    a row with the reason.

    Args:
      work: as for :func:`plan`.
      topologies: the slices, as ``["v4-32", "v5e-64"]``.
      tokens: of the whole job; needed for a limit.
      deadline_hours: the hours it may take. budget: the US dollars it may cost.
      max_compiles: maximum number of layouts to compile, for each slice.
      on_slice: called with each slice before it is planned.
      Others: as for :func:`plan`.

    Raises:
      PlanError: no slice, a limit without ``tokens``, a number that is not above 0, or what is wrong with the work on
        every slice. Others as :func:`plan`, but for DoesNotFitError.
    """
    for name, value, unit in (
        ("tokens", tokens, ""),
        ("deadline_hours", deadline_hours, "hours"),
        ("budget", budget, "US dollars"),
    ):
        if value is not None:
            checked_number(name, value, positive=True, unit=unit)
    if tokens is None and (deadline_hours is not None or budget is not None):
        raise PlanError("deadline_hours and budget limit a whole job: give its tokens, too")
    targets = _targets(topologies, view)
    goal: Goal = "fastest" if budget is not None and deadline_hours is None else "cheapest"
    chooser = TpuCostOptimizer(
        _ANY_HOURLY, "tpu_pricing", _TARGETS[goal], region=region, term=term, prices=prices
    )
    plans: list[Plan] = []
    refused: list[SliceRow] = []
    wrong: list[PlanError] = []
    for target in targets:
        if on_slice is not None:
            on_slice(target)
        try:
            plans.append(
                plan(
                    work,
                    target,
                    memory_limit_gb=memory_limit_gb,
                    compile=compile,
                    max_compiles=max_compiles,
                    top=top,
                    keep=keep,
                    layout=layout,
                    choose_settings=choose_settings,
                    region=region,
                    term=term,
                    prices=prices,
                    cache=cache,
                    workers=workers,
                    progress=progress,
                )
            )
        except CompilerMissingError:
            raise
        except PlanError as error:
            refused.append(SliceRow(target, reason=str(error)))
            wrong += [] if isinstance(error, DoesNotFitError) else [error]
    if len(wrong) == len(targets):  # it is not the slices that are wrong
        raise wrong[0]
    considered: tuple[Considered, ...] = ()
    if plans:
        try:
            considered = chooser.choose(
                plans, total_tokens=tokens, max_hours=deadline_hours, max_cost=budget
            ).considered
        except NothingAffordableError as error:
            considered = error.considered
    rows = (*map(_row, considered), *refused)
    return SlicesPlan(
        work=plans[0].work if plans else as_work(work).title,
        rows=rows,
        goal=goal,
        tokens=tokens,
        deadline_hours=deadline_hours,
        budget=budget,
        advice="" if any(not row.reason for row in rows) else _advice(considered),
        notes=tuple(dict.fromkeys(note for each in plans for note in each.notes)),
    )


def _targets(topologies: Any, view: str | None) -> list[Slice]:
    if isinstance(topologies, str | Slice):
        topologies = [topologies]
    if not isinstance(topologies, Iterable):
        raise PlanError(
            f"topologies: got {topologies!r:.100}, expected names of slices, as ['v4-32', 'v5e-64']"
        )
    topologies = list(topologies)
    for each in topologies:
        if isinstance(each, str) and Several.read(each, view) is not None:
            raise PlanError(f"topologies: {each!r} is several slices of one kind, which are planned alone")
        if isinstance(each, GpuHost) or is_gpu_name(each):
            raise PlanError(
                f"topologies: {each} is a host of GPUs, and only slices of TPUs are compared. Plan it alone, without "
                "other topologies, a deadline or a budget"
            )
    found = list(dict.fromkeys(parse_slice(each, view) for each in topologies))
    if not found:
        raise PlanError("topologies: got no slice, expected at least one, as ['v4-32', 'v5e-64']")
    return found


def _row(each: Considered) -> SliceRow:
    found: Plan = each.candidate
    assert isinstance(found.target, Slice)  # it was asked for
    return SliceRow(
        found.target,
        found,
        hours=each.hours,
        dollars=each.dollars,
        usd_per_hour=each.dollars_per_hour,
        reason=each.refused or "",
        over=each.over,
    )


def _advice(considered: Iterable[Considered]) -> str:
    """Which values would suffice: of one limit alone or, where no single one does, of all of them together."""
    over = [each for each in considered if each.over]
    found = [((name, value),) for name, value, _ in sufficient(over)]
    names = [which for *_, which in sufficient(over)]
    if not found:
        # Not of slices beside which another one takes less of everything.
        best = [each for each in over if not any(_less(other, each) for other in over)]
        best.sort(key=lambda each: [value for _, value in each.over])
        found = [tuple((name, rounded_up(value)) for name, value in each.over) for each in best]
        names = [each.name for each in best]
    said = [" and ".join(_LIMITS[name].format(value) for name, value in limits) for limits in found]
    return "; ".join(
        f"{limits} would allow {which}" for limits, which in zip(said[:_ADVISED], names, strict=False)
    )


def _less(one: Considered, other: Considered) -> bool:
    """Whether a slice is enough where another one would be, and not the other way round."""
    mine, theirs = dict(one.over), dict(other.over)
    return mine != theirs and all(mine.get(name, math.inf) <= value for name, value in theirs.items())
