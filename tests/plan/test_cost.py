"""Dollars: the formula by hand, what the limits do, and what is said of bad numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.hardware import ChipError, UnknownPriceError
from capibara.hardware.prices import PriceError
from capibara.plan.cost import (
    NothingAffordableError,
    TpuCostOptimizer,
    estimate_operation_cost,
    operation_cost,
)
from capibara.plan.errors import PlanError

PEAK, USABLE = 275e12, 30.75  # a v4 chip: Google's peak, GiB that the compiler leaves


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    """Round prices of one's own: $2 and $3 a chip-hour, spot a tenth."""
    rows = [("tpu-v4", "on-demand", 2.0), ("tpu-v4", "spot", 0.2), ("tpu-v6e", "on-demand", 3.0)]
    rows += [("tpu-v5e", "on-demand", 1.0), ("tpu-v5p", "on-demand", 4.0)]
    path = tmp_path / "prices.toml"
    path.write_text(
        "".join(
            f'[[price]]\nchip = "{chip}"\nregion = "here"\nterm = "{term}"\nusd_per_chip_hour = {usd}\n'
            'as_of = 2026-10-01\nsource = "our contract"\n'
            for chip, term, usd in rows
        )
    )
    return path


# ---- one operation --------------------------------------------------------------------------------------------


def test_one_chip_for_an_hour(prices: Path) -> None:
    assert estimate_operation_cost(1e12, 16.0, 3600.0, 0.8, prices=prices) == 2.0
    assert estimate_operation_cost(1e12, 16.0, 36.0, 0.8, prices=prices) == pytest.approx(0.02)
    assert estimate_operation_cost(0, 0, 3600.0, prices=prices) == 2.0
    assert estimate_operation_cost(1e12, 16.0, 3600.0, term="spot", prices=prices) == pytest.approx(0.2)
    assert estimate_operation_cost(1e12, 16.0, 3600.0, chip="v6e", prices=prices) == 3.0


def test_chips_follow_from_memory_or_arithmetic(prices: Path) -> None:
    by_memory = operation_cost(1.0, 4 * USABLE + 0.01, 3600.0, prices=prices)
    assert (by_memory.chips, by_memory.chips_for_memory, by_memory.chips_for_flops) == (5, 5, 1)
    assert by_memory.dollars == 10.0
    assert operation_cost(1.0, 4 * USABLE, 3600.0, prices=prices).chips == 4
    by_work = operation_cost(7.5 * PEAK * 10 * 0.5, 1.0, 10.0, 0.5, prices=prices)
    assert (by_work.chips, by_work.chips_for_memory, by_work.chips_for_flops) == (8, 1, 8)
    assert by_work.dollars == pytest.approx(8 * 10 / 3600 * 2.0)
    assert by_work.utilization == pytest.approx(0.5 * 7.5 / 8)
    assert "8 chips (for their arithmetic)" in str(by_work)
    assert "5 chips (for their memory)" in str(by_memory)
    assert "2026-10-01" in str(by_memory)


def test_a_core_is_rented_with_its_chip(prices: Path) -> None:
    one = operation_cost(1.0, 1.0, 3600.0, chip="tpu-v4-core", prices=prices)
    assert (one.chips, one.dollars) == (1, 2.0)
    three = operation_cost(1.0, 3 * 15.25, 3600.0, chip="tpu-v4-core", prices=prices)
    assert (three.chips, three.dollars) == (3, 4.0)


@settings(deadline=None)
@given(
    st.floats(0, 1e22),
    st.floats(0, 1e5),
    st.floats(1e-3, 1e6),
    st.floats(0.01, 1.0),
)
def test_the_price_is_that_of_the_chips_for_the_time(
    flops: float, memory: float, seconds: float, share: float
) -> None:
    found = operation_cost(flops, memory, seconds, share)
    assert found.chips * USABLE >= memory * (1 - 1e-12)
    assert found.chips * PEAK * share * seconds >= flops * (1 - 1e-9)
    if found.chips > 1:
        fewer = found.chips - 1
        assert fewer * USABLE < memory or fewer * PEAK * share * seconds < flops
    assert found.dollars == pytest.approx(found.chips * seconds / 3600 * found.price.usd_per_chip_hour)
    assert estimate_operation_cost(flops, memory, seconds, share) == found.dollars


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"operation_flops": -1}, "operation_flops=-1"),
        ({"operation_flops": math.nan}, "operation_flops=nan"),
        ({"memory_gb": -0.5}, "memory_gb=-0.5"),
        ({"memory_gb": "16"}, "memory_gb='16'"),
        ({"duration_seconds": math.inf}, "duration_seconds=inf"),
        ({"duration_seconds": 0}, "no number of chips does arithmetic in no time"),
        ({"duration_seconds": 1e-320}, r"operation_flops=1e\+12 takes infinitely many chips"),
        ({"operation_flops": 1e300}, r"operation_flops=1e\+300 takes 4.55e\+284 chips"),
        ({"memory_gb": 1e300}, r"memory_gb=1e\+300 takes 3.25e\+298 chips: check its unit, GiB"),
        ({"memory_gb": 1.7e308}, "memory_gb=.*check its unit"),
        ({"tpu_utilization": 1e-320}, "infinitely many chips"),
        ({"tpu_utilization": 0}, "tpu_utilization=0"),
        ({"tpu_utilization": 80}, "for 80 % give 0.8"),
        ({"tpu_utilization": True}, "tpu_utilization=True"),
    ],
)
def test_numbers_out_of_range(change: dict[str, Any], match: str) -> None:
    given = {"operation_flops": 1e12, "memory_gb": 16.0, "duration_seconds": 10.0, "tpu_utilization": 0.8}
    with pytest.raises(PlanError, match=match):
        estimate_operation_cost(**{**given, **change})


def test_what_is_not_known_is_an_error() -> None:
    with pytest.raises(UnknownPriceError, match="committed-1y"):
        estimate_operation_cost(1e12, 1, 1, term="committed-1y")
    with pytest.raises(PriceError, match="Did you mean 'spot'"):
        estimate_operation_cost(1e12, 1, 1, term="spott")
    with pytest.raises(ChipError):
        estimate_operation_cost(1e12, 1, 1, chip="tpu-v99")


# ---- plans ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    name: str
    chip: str = "v4"
    num_chips: int = 16
    step_seconds: float = 1.0
    tokens_per_step: float | None = 1e6
    fits: bool = True


SMALL = Made("small", num_chips=8, step_seconds=3.0)  # $16 an hour, 24 chip-seconds a step
WIDE = Made("wide", num_chips=32, step_seconds=0.9)  # $64, 28.8
BEST = Made("best", num_chips=16, step_seconds=1.2)  # $32, 19.2
CRAMPED = Made("cramped", num_chips=4, step_seconds=0.1, fits=False)


@pytest.mark.parametrize(
    ("target", "expected"), [("cost_efficiency", BEST), ("speed", WIDE), ("lowest_price", SMALL)]
)
def test_each_target_takes_its_plan(prices: Path, target: Any, expected: Made) -> None:
    chosen = TpuCostOptimizer(100.0, optimization_target=target, prices=prices).choose(
        [SMALL, WIDE, BEST, CRAMPED]
    )
    assert chosen.candidate is expected
    assert [c.name for c in chosen.considered][-1] == "cramped"
    assert "does not fit the memory" in str(chosen)


def test_steps_that_are_not_of_tokens(prices: Path) -> None:
    plans = [replace(p, tokens_per_step=None) for p in (SMALL, WIDE, BEST)]
    for target, expected in (("cost_efficiency", "best"), ("speed", "wide"), ("lowest_price", "small")):
        optimizer = TpuCostOptimizer(100.0, optimization_target=target, prices=prices)  # pyright: ignore
        assert optimizer.choose(plans).best.name == expected


def test_the_figures_of_a_plan(prices: Path) -> None:
    best = TpuCostOptimizer(100.0, prices=prices).choose([BEST], total_tokens=3e9).best
    assert best.dollars_per_hour == 32.0
    assert best.dollars_per_step == pytest.approx(32.0 / 3600 * 1.2)
    assert best.dollars_per_billion_tokens == pytest.approx(32.0 / 3600 * 1.2 * 1000)
    assert best.tokens_per_second == pytest.approx(1e6 / 1.2)
    assert best.hours == pytest.approx(1.0)
    assert best.dollars == pytest.approx(32.0)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_step_seconds": 1.0}, WIDE),
        ({"total_tokens": 4e9, "max_hours": 1.0}, WIDE),
        ({"total_tokens": 3e9, "max_cost": 35.0}, BEST),
    ],
)
def test_limits_rule_plans_out(prices: Path, limits: dict[str, float], expected: Made) -> None:
    optimizer = TpuCostOptimizer(100.0, prices=prices)
    assert optimizer.choose([SMALL, WIDE, BEST], **limits).candidate is expected


def test_the_price_of_an_hour_is_a_limit(prices: Path) -> None:
    plans = [SMALL, WIDE, BEST]
    assert TpuCostOptimizer(20.0, optimization_target="speed", prices=prices).choose(plans).candidate is SMALL
    assert TpuCostOptimizer(32.0, optimization_target="speed", prices=prices).choose(plans).candidate is BEST
    with pytest.raises(NothingAffordableError, match=r"small costs \$16\.00 an hour, more than \$10\.00"):
        TpuCostOptimizer(10.0, prices=prices).choose(plans)


def test_chips_of_another_cost_model_are_refused(prices: Path) -> None:
    other = replace(BEST, name="other", chip="v6e", num_chips=4)
    with pytest.raises(NothingAffordableError, match="tpu-v6e is not in cost_model='tpu_v4_pricing'"):
        TpuCostOptimizer(100.0, prices=prices).choose([other])
    assert TpuCostOptimizer(100.0, "tpu_pricing", prices=prices).choose([BEST, other]).candidate is other


@given(
    st.lists(st.tuples(st.integers(1, 64), st.floats(0.01, 10), st.floats(1e3, 1e6)), min_size=1, max_size=8)
)
def test_nothing_else_is_better(rows: list[tuple[int, float, float]]) -> None:
    plans = [Made(str(i), "v4", n, s, t) for i, (n, s, t) in enumerate(rows)]
    for target, figure in (
        ("cost_efficiency", lambda p: p.num_chips * p.step_seconds / (p.tokens_per_step or 1)),
        ("speed", lambda p: -(p.tokens_per_step or 0) / p.step_seconds),
        ("lowest_price", lambda p: p.num_chips),
    ):
        optimizer = TpuCostOptimizer(1e6, optimization_target=target)  # pyright: ignore[reportArgumentType]
        best = optimizer.choose(plans).candidate
        assert figure(best) == pytest.approx(min(map(figure, plans)))


@pytest.mark.parametrize(
    ("plans", "limits", "match"),
    [
        ([], {}, "no plan to choose from"),
        (None, {}, "candidates is NoneType, expected several plans"),
        (3, {}, "candidates is int"),
        (BEST, {}, r"expected several plans: give a list, \[plan\]"),
        ([replace(BEST, num_chips=10**5000)], {}, "num_chips=more, expected"),
        ([replace(BEST, tokens_per_step=1e-300)], {"total_tokens": 1e300}, "total_tokens=1e\\+300 at 1e-300"),
        ([object()], {}, r"candidates\[0\] is a object without 'num_chips'"),
        ([replace(BEST, num_chips=0)], {}, "num_chips=0"),
        ([replace(BEST, step_seconds=-1.0)], {}, "step_seconds=-1.0"),
        ([BEST], {"max_hours": 2.0}, "total_tokens"),
        ([BEST, replace(WIDE, tokens_per_step=None)], {}, "same kind"),
        ([replace(BEST, tokens_per_step=None)], {"total_tokens": 1e9}, "tokens_per_step is None"),
        ([BEST], {"max_step_seconds": 0}, "max_step_seconds=0"),
    ],
)
def test_bad_plans(plans: Any, limits: dict[str, float], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        TpuCostOptimizer(100.0).choose(plans, **limits)


def test_real_plans(prices: Path) -> None:
    """A :class:`capibara.plan.Plan` is what `choose` asks for, and one that nothing fits is refused."""
    from capibara.plan import Candidate, Plan, parse_slice
    from capibara.plan.time import StepTime
    from capibara.sharding import Layout

    def plan_of(slice_name: str, seconds: float | None) -> Plan:
        target = parse_slice(slice_name)
        layout = Layout(mesh=(("data", target.num_devices),))
        found: tuple[Candidate, ...] = ()
        if seconds is not None:
            time = StepTime(seconds, seconds, seconds, seconds, 0.0, 0.0, 0.0, (), ())
            best = Candidate(
                layout=layout,
                target=target,
                memory={"parameters": 2**30},
                memory_source="analytic",
                time=time,
                tokens=1_000_000,
            )
            found = (best,)
        return Plan("a step", target, target.usable_hbm_bytes, found)

    plans = [plan_of("v4-32", 1.0), plan_of("v4-64", 0.6), plan_of("v4-8", None)]
    chosen = TpuCostOptimizer(100.0, prices=prices).choose(plans)
    assert chosen.candidate is plans[0]
    assert chosen.best.name == "v4:2x2x4 (16 chips, v4-32)"
    assert chosen.best.dollars_per_billion_tokens == pytest.approx(16 * 2.0 / 3600 * 1000)
    quick = TpuCostOptimizer(100.0, optimization_target="speed", prices=prices).choose(plans)
    assert quick.candidate is plans[1]
    assert quick.considered[-1].refused == "does not fit the memory"


# ---- slices ---------------------------------------------------------------------------------------------------


def test_the_smallest_slice_with_the_memory(prices: Path) -> None:
    optimizer = TpuCostOptimizer(1e4, prices=prices)
    for memory, chips in ((1.0, 4), (4 * USABLE, 4), (4 * USABLE + 1, 8), (60 * USABLE, 64)):
        chosen = optimizer.cheapest_slice(0, memory, 10.0)
        assert chosen.candidate.num_chips == chips
        assert chosen.best.dollars == pytest.approx(chips * 2.0 * 10.0)
    assert chosen.candidate.generation == "v4"
    assert chosen.best.name == "v4-128"


def test_the_deadline_decides(prices: Path) -> None:
    work = PEAK * 0.5 * 3600 * 100  # a hundred chip-hours at half of the peak
    optimizer = TpuCostOptimizer(1e4, prices=prices)
    chosen = optimizer.cheapest_slice(work, 1.0, 4.0)
    assert chosen.candidate.num_chips == 32  # 25 would do; slices have 16 or 32
    assert chosen.best.hours == pytest.approx(100 / 32)
    assert chosen.best.dollars == pytest.approx(200.0)
    assert optimizer.cheapest_slice(work, 1.0, 25.0).candidate.num_chips == 4  # exactly
    assert optimizer.cheapest_slice(work, 1.0, 4.0, utilization=0.25).candidate.num_chips == 64
    quick = TpuCostOptimizer(200.0, optimization_target="speed", prices=prices).cheapest_slice(work, 1.0, 4.0)
    assert quick.candidate.num_chips == 64  # 100 would cost $200 an hour; slices have 64 or 128
    low = TpuCostOptimizer(1e4, optimization_target="lowest_price", prices=prices).cheapest_slice(
        work, 1.0, 4.0
    )
    assert low.candidate.num_chips == 32


def test_over_all_tpus_the_price_of_arithmetic_decides(prices: Path) -> None:
    chosen = TpuCostOptimizer(1e5, "tpu_pricing", prices=prices).cheapest_slice(1e21, 10.0, 100.0)
    # Dollars for 10²¹ operations at half of the peak: $3 at 918, $1 at 197, $2 at 275, $4 at 459 TFLOP/s.
    assert chosen.best.chip == "tpu-v6e"
    assert chosen.best.dollars == pytest.approx(1e21 / (918e12 * 0.5) / 3600 * 3.0)


def test_what_would_be_enough_is_said_and_is(prices: Path) -> None:
    work = PEAK * 0.5 * 3600 * 100
    with pytest.raises(NothingAffordableError) as caught:
        TpuCostOptimizer(60.0, prices=prices).cheapest_slice(work, 200.0, 4.0)
    text = str(caught.value)
    assert "max_cost_per_hour=64.00 would allow v4-64" in text
    assert "hours=6.25 would allow v4-32" in text
    assert "v4-8 has 123 GiB of the 200 needed" in text
    assert TpuCostOptimizer(64.0, prices=prices).cheapest_slice(work, 200.0, 4.0).best.name == "v4-64"
    assert TpuCostOptimizer(60.0, prices=prices).cheapest_slice(work, 200.0, 6.25).best.name == "v4-32"


def test_no_slice(prices: Path) -> None:
    with pytest.raises(NothingAffordableError, match="no slice keeps to the limits: v4-8"):
        TpuCostOptimizer(10.0, prices=prices).cheapest_slice(1e24, 1.0, 1.0)
    with pytest.raises(NothingAffordableError, match="committed-3y"):
        TpuCostOptimizer(10.0, term="committed-3y", prices=prices).cheapest_slice(1e18, 1.0, 1.0)
    with pytest.raises(PlanError, match="utilization=50"):
        TpuCostOptimizer(10.0, prices=prices).cheapest_slice(1e18, 1.0, 1.0, utilization=50)
    with pytest.raises(PlanError, match=r"utilization=.*in any time"):
        TpuCostOptimizer(10.0, prices=prices).cheapest_slice(1e18, 1.0, 1.0, utilization=1e-320)
    with pytest.raises(NothingAffordableError, match=r"123 GiB of the 1e\+308 needed"):
        TpuCostOptimizer(10.0, prices=prices).cheapest_slice(1e18, 1e308, 1e9)
    with pytest.raises(PlanError, match="hours=0"):
        TpuCostOptimizer(10.0, prices=prices).cheapest_slice(1e18, 1.0, 0)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"max_cost_per_hour": 0}, "max_cost_per_hour=0"),
        ({"cost_model": "tpu_v4_price"}, "Did you mean 'tpu_v4_pricing'"),
        ({"optimization_target": "cost_efficient"}, "Did you mean 'cost_efficiency'"),
    ],
)
def test_bad_settings(change: dict[str, Any], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        TpuCostOptimizer(**{"max_cost_per_hour": 100.0, **change})


def test_the_limit_that_would_have_to_give_way_has_the_name_of_the_argument():
    plan = SimpleNamespace(name="a", chip="v4", num_chips=8, step_seconds=3.0, tokens_per_step=1e6, fits=True)
    with pytest.raises(NothingAffordableError, match=r"max_hours=833\.34 would allow a"):
        TpuCostOptimizer(1e6).choose([plan], total_tokens=1e12, max_hours=1)
    with pytest.raises(NothingAffordableError, match=r"[ ;]hours=\d"):
        TpuCostOptimizer(100.0).cheapest_slice(1e23, 1, 1)
    with pytest.raises(PlanError, match="max_cost_per_hour=1000"):
        TpuCostOptimizer(10**400)
