"""``TpuCostOptimizer``: choose a slice or a plan by price."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

from capibara.errors import did_you_mean
from capibara.hardware import Chip, Price, UnknownPriceError, get_chip, get_price, load_prices
from capibara.plan.cost.choices import Considered, CostChoice, NothingAffordableError
from capibara.plan.cost.operations import checked_number, checked_share, usable_bytes
from capibara.plan.cost.ranking import PLAN_ORDER, SLICE_ORDER, what_would
from capibara.plan.errors import PlanError
from capibara.plan.grids import grid_text, rented_grids
from capibara.plan.slices import GENERATIONS, Slice, parse_slice

__all__ = ["CostTarget", "TpuCostOptimizer"]

CostTarget = Literal["cost_efficiency", "speed", "lowest_price"]
_ALL = "tpu_pricing"
_SHOWN = 8
_MOST_CHIPS = 10**9


class TpuCostOptimizer:
    """Chooses plans and slices by price, within limits.

    ``optimization_target``:

    * ``"cost_efficiency"``: the lowest price for the work (a billion tokens, or the whole job); * ``"speed"``: the
    most tokens per second, or the shortest job, within the limits; * ``"lowest_price"``: the lowest price per hour.

    Args:
      max_cost_per_hour: maximum price of all chips together, in US dollars per hour.
      cost_model: whose prices: ``"tpu_v4_pricing"``, ``"tpu_v5e_pricing"``, ``"tpu_v5p_pricing"``,
        ``"tpu_v6e_pricing"`` …, one for each TPU that has a price, or ``"tpu_pricing"`` for all of them. Chips of
        another model are refused.
      region, term, prices: see :func:`capibara.hardware.get_price`; ``prices`` is a price file of your own.

    Raises:
      PlanError: an unknown target or cost model (the text gives the nearest), or a limit that is not a number above 0.
    """

    def __init__(
        self,
        max_cost_per_hour: float,
        cost_model: str = "tpu_v4_pricing",
        optimization_target: CostTarget = "cost_efficiency",
        *,
        region: str | None = None,
        term: str = "on-demand",
        prices: str | os.PathLike[str] | None = None,
    ) -> None:
        self.max_cost_per_hour = checked_number(
            "max_cost_per_hour", max_cost_per_hour, positive=True, unit="US dollars"
        )
        if optimization_target not in get_args(CostTarget):
            known = get_args(CostTarget)
            raise PlanError(
                f"optimization_target={optimization_target!r} must be one of {', '.join(map(repr, known))}."
                + did_you_mean(str(optimization_target), known)
            )
        self.optimization_target: CostTarget = optimization_target
        self.region, self.term, self.prices = region, term, prices
        priced = dict.fromkeys(p.chip for p in load_prices(prices) if p.chip.startswith("tpu-"))
        models: dict[str, tuple[str, ...]] = {f"{name.replace('-', '_')}_pricing": (name,) for name in priced}
        models[_ALL] = tuple(priced)
        if cost_model not in models:
            raise PlanError(
                f"cost_model={cost_model!r} must be one of {', '.join(map(repr, models))}, the TPUs that have a price."
                + did_you_mean(str(cost_model), models)
            )
        self.cost_model = cost_model
        self.chips: tuple[str, ...] = models[cost_model]
        self._prices: dict[str, Price] = {}

    def price(self, chip: str | Chip) -> Price:
        """The price of a chip in this optimiser's region and term; looked up once.

        Raises:
          PlanError: the chip is not of the cost model. UnknownPriceError: no such price is known.
        """
        name = get_chip(chip).name.removesuffix("-core")
        if name not in self.chips:
            raise PlanError(
                f"{name} is not in cost_model={self.cost_model!r} ({', '.join(self.chips)}); {_ALL!r} has all TPUs"
            )
        if name not in self._prices:
            self._prices[name] = get_price(name, region=self.region, term=self.term, path=self.prices)
        return self._prices[name]

    # ---- plans --------------------------------------------------------------------------------------------

    def choose(
        self,
        candidates: Iterable[Any],
        *,
        total_tokens: float | None = None,
        max_hours: float | None = None,
        max_step_seconds: float | None = None,
        max_cost: float | None = None,
    ) -> CostChoice:
        """Choose the best of several plans that fits its devices and the limits.

        Args:
          candidates: plans, or anything with ``chip`` (a name or a ``hardware.Chip``), ``num_chips``,
            ``step_seconds``, ``tokens_per_step`` and ``fits``; a ``name``, if any, is used in messages. If
            ``tokens_per_step`` is None in all of them, their steps are assumed to do the same work.
          total_tokens: of the whole job. max_hours, max_cost: its longest time and highest price (need
            ``total_tokens``).
          max_step_seconds: the longest step.

        Raises:
          NothingAffordableError: none of them does; the message gives the reason for each.
          PlanError: there are no candidates, one lacks a figure, or a limit is not a number above 0.
        """
        limits = {
            "total_tokens": total_tokens,
            "max_hours": max_hours,
            "max_step_seconds": max_step_seconds,
            "max_cost": max_cost,
        }
        for name, value in limits.items():
            if value is not None:
                checked_number(name, value, positive=True)
        if total_tokens is None and (max_hours is not None or max_cost is not None):
            raise PlanError("max_hours and max_cost limit the whole job: give its total_tokens too")
        if not isinstance(candidates, Iterable):
            hint = ": give a list, [plan]" if hasattr(candidates, "step_seconds") else ""
            raise PlanError(f"candidates is {type(candidates).__name__}, expected several plans{hint}")
        listed = list(candidates)
        if not listed:
            raise PlanError("candidates: there is no plan to choose from")
        priced = [self._plan(i, each, total_tokens) for i, each in enumerate(listed)]
        counted = {c.tokens_per_second is not None for c in priced if c.refused is None}
        if len(counted) > 1:
            raise PlanError(
                "candidates: some have tokens_per_step and some have none: only steps of the same kind can be compared"
            )
        checked = [self._limited(c, max_hours, max_step_seconds, max_cost) for c in priced]
        return self._chosen(checked, PLAN_ORDER[self.optimization_target], "plan")

    def _plan(self, number: int, plan: Any, total_tokens: float | None) -> Considered:
        where = f"candidates[{number}]"

        def figure(key: str) -> Any:
            try:
                return getattr(plan, key)
            except AttributeError:
                raise PlanError(
                    f"{where} is a {type(plan).__name__} without {key!r}: a plan has chip, num_chips, step_seconds, "
                    "tokens_per_step and fits"
                ) from None

        chips = figure("num_chips")
        if isinstance(chips, bool) or not isinstance(chips, int) or not 1 <= chips <= _MOST_CHIPS:
            shown = "more" if isinstance(chips, int) and chips > _MOST_CHIPS else repr(chips)
            raise PlanError(f"{where}: num_chips={shown}, expected an integer from 1 to {_MOST_CHIPS}")
        chip = get_chip(figure("chip")).name.removesuffix("-core")
        name = (
            getattr(plan, "name", None)
            or getattr(plan, "target", None)
            or f"{chips} × {chip} (plan {number})"
        )
        name = str(name)
        if not figure("fits"):
            return Considered(plan, name, chip, chips, refused="does not fit the memory")
        seconds = checked_number(
            f"{where}: step_seconds", figure("step_seconds"), positive=True, unit="seconds"
        )
        tokens = figure("tokens_per_step")
        if tokens is not None:
            tokens = checked_number(f"{where}: tokens_per_step", tokens, positive=True)
        try:
            price = self.price(chip)
        except (PlanError, UnknownPriceError) as error:
            return Considered(plan, name, chip, chips, step_seconds=seconds, refused=str(error))
        per_step = price.cost(chips, seconds / 3600)
        hours = None
        if total_tokens is not None:
            if tokens is None:
                raise PlanError(
                    f"{where}: tokens_per_step is None, so that total_tokens says nothing of its hours"
                )
            hours = total_tokens / tokens * (seconds / 3600)
            if not math.isfinite(hours):
                raise PlanError(
                    f"{where}: total_tokens={total_tokens:g} at {tokens:g} tokens_per_step take forever: check "
                    "the units"
                )
        return Considered(
            plan,
            name,
            chip,
            chips,
            dollars_per_hour=price.cost(chips, 1),
            hours=hours,
            dollars=None if hours is None else price.cost(chips, hours),
            step_seconds=seconds,
            tokens_per_second=None if tokens is None else tokens / seconds,
            dollars_per_step=per_step,
            dollars_per_billion_tokens=None if tokens is None else per_step / tokens * 1e9,
            price=str(price),
        )

    # ---- slices -------------------------------------------------------------------------------------------

    def cheapest_slice(
        self,
        flops: float,
        memory_gb: float,
        hours: float,
        *,
        utilization: float = 0.5,
        dtype: str = "bfloat16",
        max_cost: float | None = None,
    ) -> CostChoice:
        """Choose the slice with enough memory that does the work in time and is best by the target.

        A slice of n chips needs ``flops / (n · peak · utilization)`` seconds, and is rented for that time; without
        FLOPs (``flops=0``) for all of ``hours``. All slices with a usual grid of every TPU of the cost model are
        considered. Each is assumed to reach the same share of its peak, which large ones do not: a plan is more
        accurate.

        Args:
          flops: floating-point operations of the whole job, a multiply-add counted as 2.
          memory_gb: total GiB (2**30 bytes) that it needs, over all chips.
          hours: the longest it may take.
          utilization: share of the peak that is reached, above 0 and at most 1.
          dtype: of the products. max_cost: US dollars that the job may cost in all.

        Returns:
          A choice whose ``candidate`` is a :class:`~capibara.plan.slices.Slice`.

        Raises:
          NothingAffordableError: no slice is within the limits; the message says which limit stops the nearest.
          PlanError: a number is out of range.
        """
        work = checked_number("flops", flops)
        size = checked_number("memory_gb", memory_gb, unit="GiB")
        limit = checked_number("hours", hours, positive=True, unit="hours")
        share = checked_share("utilization", utilization)
        if max_cost is not None:
            checked_number("max_cost", max_cost, positive=True, unit="US dollars")
        found = []
        unpriced = []
        for name in self.chips:
            generation = name.removeprefix("tpu-")
            if generation not in GENERATIONS:
                continue
            try:
                price = self.price(name)
            except UnknownPriceError as error:
                unpriced.append(str(error))
                continue
            chip = get_chip(name)
            for each in _slices(generation):
                n = each.num_chips
                needed = work / (n * chip.peak(dtype) * share) / 3600 if work else limit
                if not math.isfinite(needed):
                    raise PlanError(
                        f"utilization={utilization:g}: at that share no slice does flops={work:g} in any time"
                    )
                considered = Considered(
                    each,
                    each.slice_name,
                    name,
                    n,
                    dollars_per_hour=price.cost(n, 1),
                    hours=needed,
                    dollars=price.cost(n, needed),
                    price=str(price),
                )
                have = n * usable_bytes(chip) / 2**30
                if have < size:
                    considered = replace(considered, refused=f"has {have:,.4g} GiB of the {size:,.4g} needed")
                found.append(self._limited(considered, limit, None, max_cost, "hours"))
        if not found:
            raise NothingAffordableError(f"no slice has a price: {'; '.join(unpriced)}")
        return self._chosen(found, SLICE_ORDER[self.optimization_target], "slice")

    # ---- both ---------------------------------------------------------------------------------------------

    def _limited(
        self,
        each: Considered,
        max_hours: float | None,
        max_step_seconds: float | None,
        max_cost: float | None,
        hours: str = "max_hours",
    ) -> Considered:
        """The same, refused if it passes a limit."""
        if each.refused is not None:
            return each
        passed = []
        for name, value, limit, text in (
            (
                "max_cost_per_hour",
                each.dollars_per_hour,
                self.max_cost_per_hour,
                "costs ${:,.2f} an hour, more than ${:,.2f}",
            ),
            (
                "max_step_seconds",
                each.step_seconds,
                max_step_seconds,
                "takes {:.4g} s a step, more than {:.4g}",
            ),
            (hours, each.hours, max_hours, "takes {:,.4g} hours, more than {:,.4g}"),
            ("max_cost", each.dollars, max_cost, "costs ${:,.2f} in all, more than ${:,.2f}"),
        ):
            # A slice that is needed for exactly the hours there are must not fail by a rounding.
            if value is not None and limit is not None and value > limit * (1 + 1e-12):
                passed.append((name, value, text.format(value, limit)))
        if not passed:
            return each
        over = tuple((name, value) for name, value, _ in passed)
        return replace(each, refused=passed[0][2], over=over)

    def _chosen(
        self, considered: Sequence[Considered], order: Callable[[Considered], Any], what: str
    ) -> CostChoice:
        allowed = sorted((c for c in considered if c.refused is None), key=order)
        refused = [c for c in considered if c.refused is not None]
        if not allowed:
            shown = "; ".join(f"{c.name} {c.refused}" for c in refused[:_SHOWN])
            more = f"; and {len(refused) - _SHOWN} more" if len(refused) > _SHOWN else ""
            error = NothingAffordableError(
                f"no {what} keeps to the limits: {shown}{more}.{what_would(refused)}"
            )
            error.considered = tuple(refused)
            raise error
        return CostChoice(allowed[0], (*allowed, *refused), self.optimization_target)

    def __repr__(self) -> str:
        return (
            f"TpuCostOptimizer(max_cost_per_hour={self.max_cost_per_hour:g}, cost_model={self.cost_model!r}, "
            f"optimization_target={self.optimization_target!r})"
        )


def _slices(generation: str) -> list[Slice]:
    """Slices of a generation that Google rents and names."""
    return [parse_slice(grid_text(generation, grid)) for grid in rented_grids(generation)]
