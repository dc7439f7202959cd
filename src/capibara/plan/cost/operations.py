"""The price of work given by its FLOPs, memory and time.

Three figures determine the number of chips: the memory must fit, and the FLOPs must be done in the given time at the
given share of the chips' peak. Then ``dollars = chips × hours × price of a chip for an hour``.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from capibara.hardware import Chip, Price, get_chip, get_price
from capibara.plan.errors import PlanError

__all__ = ["OperationCost", "checked_number", "estimate_operation_cost", "operation_cost", "usable_bytes"]


# Beyond which a float does not count singly: an error in a unit.
_MOST_CHIPS = 2.0**53


@dataclass(frozen=True)
class OperationCost:
    """The chips, time and price of a piece of work.

    Attributes:
      chips: the greater of ``chips_for_memory`` and ``chips_for_flops``, at least 1.
      seconds: the rental time.
      utilization: share of these chips' peak that the work uses in that time.
      dollars: ``chips × seconds / 3600 × price``.
    """

    chip: str
    chips: int
    chips_for_memory: int
    chips_for_flops: int
    seconds: float
    utilization: float
    price: Price
    dollars: float

    def __str__(self) -> str:
        why = "their memory" if self.chips_for_memory >= self.chips_for_flops else "their arithmetic"
        many = f"{self.chips} chips (for {why})" if self.chips > 1 else "1 chip"
        return (
            f"${self.dollars:.4f}: {many} of {self.chip} for {self.seconds:g} s, {self.utilization:.2%} of their peak; "
            f"{self.price}"
        )


def checked_number(name: str, value: Any, *, positive: bool = False, unit: str = "") -> float:
    """``value`` as a float, if it is a finite number of at least 0 (or above 0).

    Raises:
      PlanError: it is not.
    """
    try:
        number = math.nan if isinstance(value, bool | str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0 or (positive and number == 0):
        least = "above 0" if positive else "of at least 0"
        raise PlanError(f"{name}={value!r}: expected a finite number {least}{', in ' + unit if unit else ''}")
    return number


def _count(name: str, value: float, chips: float) -> int:
    """Whole chips.

    Raises:
      PlanError: more than can be counted.
    """
    if chips > _MOST_CHIPS:
        many = f"{chips:.3g}" if math.isfinite(chips) else "infinitely many"
        raise PlanError(
            f"{name}={value:g} takes {many} chips in the given time: check the units of it and of duration_seconds"
            if name == "operation_flops"
            else f"{name}={value:g} takes {many} chips: check its unit, GiB"
        )
    return math.ceil(chips)


def checked_share(name: str, value: Any) -> float:
    """A share of the peak, above 0 and at most 1."""
    share = checked_number(name, value, positive=True)
    if share > 1:
        hint = f"; for {value} % give {share / 100:g}" if share <= 100 else ""
        raise PlanError(f"{name}={value!r}: expected a share of the peak, above 0 and at most 1{hint}")
    return share


def usable_bytes(chip: Chip) -> int:
    """Bytes of memory available to programs on a chip: what the compiler leaves, if known, otherwise all.

    Raises:
      PlanError: not known.
    """
    usable = chip.usable_hbm_bytes
    if usable is None and chip.usable_hbm_bytes_core is not None and chip.view == "chip":
        usable = chip.usable_hbm_bytes_core * (chip.cores_per_chip or 1)
    usable = usable or chip.hbm_bytes
    if usable is None:
        raise PlanError(f"chip={chip.name!r}: its memory is not known")
    return usable


def operation_cost(
    operation_flops: float,
    memory_gb: float,
    duration_seconds: float,
    tpu_utilization: float = 1.0,
    *,
    chip: str | Chip = "tpu-v4",
    dtype: str = "bfloat16",
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
) -> OperationCost:
    """:func:`estimate_operation_cost` with its inputs; printed, it shows the limiting factor and the price."""
    flops = checked_number("operation_flops", operation_flops)
    memory = checked_number("memory_gb", memory_gb, unit="GiB")
    seconds = checked_number("duration_seconds", duration_seconds, unit="seconds")
    share = checked_share("tpu_utilization", tpu_utilization)
    device = get_chip(chip)
    if flops and not seconds:
        raise PlanError(
            f"duration_seconds=0 with operation_flops={flops:g}: no number of chips does arithmetic in no time"
        )
    peak = device.peak(dtype)
    for_memory = _count("memory_gb", memory, memory / (usable_bytes(device) / 2**30))
    reached = seconds * peak * share
    for_flops = _count("operation_flops", flops, flops / reached if reached else math.inf) if flops else 0
    chips = max(1, for_memory, for_flops)
    price = get_price(device, region=region, term=term, path=prices)
    used = flops / (seconds * peak * chips) if flops else 0.0
    # A core is half of a chip that is rented whole.
    rented = chips / (device.cores_per_chip or 1) if device.view == "core" else chips
    dollars = price.cost(math.ceil(rented), seconds / 3600)
    return OperationCost(device.name, chips, for_memory, for_flops, seconds, used, price, dollars)


def estimate_operation_cost(
    operation_flops: float,
    memory_gb: float,
    duration_seconds: float,
    tpu_utilization: float = 1.0,
    *,
    chip: str | Chip = "tpu-v4",
    dtype: str = "bfloat16",
    region: str | None = None,
    term: str = "on-demand",
    prices: str | os.PathLike[str] | None = None,
) -> float:
    """US dollars for a piece of work that takes ``duration_seconds``.

    Computed as::

        for memory  = ⌈memory_gb · 2³⁰ / usable memory of a chip⌉
        for flops   = ⌈operation_flops / (duration_seconds · peak of a chip · tpu_utilization)⌉
        chips       = max(1, for memory, for flops)
        dollars     = chips · duration_seconds / 3600 · price of a chip for an hour

    So more work than one chip can do in the time means more chips, not a longer time; less work leaves the chips idle
    at the same price, since the time is rented anyway. ``operation_cost`` shows which of these was limiting and the
    share of the peak that is used. Chips are counted individually; slices come in fixed sizes
    (:meth:`TpuCostOptimizer.cheapest_slice`).

    Args:
      operation_flops: total floating-point operations, a multiply-add counted as 2.
      memory_gb: total GiB (2**30 bytes) that the work needs.
      duration_seconds: wall time of the work.
      tpu_utilization: share of the peak reached while it runs, above 0 and at most 1.
      chip: name in the catalogue. dtype: of the products, for the peak.
      region, term, prices: which price (``"on-demand"``, ``"spot"``, ``"committed-1y"``, ``"committed-3y"``), and a
        price file of your own; see :func:`capibara.hardware.get_price`.

    Raises:
      PlanError: a number is negative, not finite or out of range, or the time is zero or too short for any number of
        chips.
      UnknownPriceError: the price is not known. ChipError: an unknown chip, or its peak in ``dtype`` is not known.
    """
    return operation_cost(
        operation_flops,
        memory_gb,
        duration_seconds,
        tpu_utilization,
        chip=chip,
        dtype=dtype,
        region=region,
        term=term,
        prices=prices,
    ).dollars
