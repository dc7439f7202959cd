"""When a run takes fewer or more chips: within its limits, with patience, and not back and forth."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.errors import ConfigError
from capibara.sharding import Layout, mesh_sizes, resized
from capibara.train.errors import ScalingError
from capibara.train.scaling.meter import StepMeter
from capibara.train.scaling.rules import Load, ScalingDecision, ScalingRules

COUNTS = (1, 2, 4, 8, 16, 32)
POLICIES = ("cost_aware", "performance", "utilization")


def rules(**options: Any) -> ScalingRules:
    given = {"min_chips": 1, "max_chips": 32, "target_utilization": 0.8, "usd_per_chip_hour": 3.0}
    return ScalingRules(**{**given, "cooldown": 0.0, **options})


class Machine:
    """A run whose devices compute ``work`` chip-seconds a step, and whose host works ``host`` seconds beside them."""

    def __init__(
        self, rules: ScalingRules, chips: int, *, work: float, host: float, share: float = 1.0
    ) -> None:
        self.rules, self.chips, self.work, self.host, self.share = rules, chips, work, host, share
        self.now, self.step = 0.0, 0
        self.counts: tuple[int, ...] = COUNTS
        self.decisions: list[ScalingDecision] = []

    def load(self, noise: float = 1.0) -> Load:
        compute = (
            noise * self.work / self.chips**self.share
        )  # of a whole step, if it scales no better than that
        seconds = max(compute, self.host)
        return Load(self.step, self.chips, seconds, compute, min(self.host, seconds))

    def go(self, lost: int = 0, noise: float = 1.0, measured: bool = True) -> ScalingDecision | None:
        self.now, self.step = self.now + 10.0, self.step + 20
        load = self.load(noise) if measured else None
        found = self.rules.decide(
            now=self.now, step=self.step, chips=self.chips, counts=self.counts, lost=lost, load=load
        )
        if found is not None:
            assert found.before == self.chips
            self.decisions.append(found)
            self.chips = found.after
        return found

    def path(self, times: int) -> list[int]:
        for _ in range(times):
            self.go()
        return (
            [self.decisions[0].before, *(one.after for one in self.decisions)]
            if self.decisions
            else [self.chips]
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_it_grows_as_far_as_the_host_can_feed_the_devices(policy: Any) -> None:
    # On 8 chips a step computes for 1 s, on 16 for 0.5 s, and the host needs 0.7 s.
    assert Machine(rules(policy=policy), 2, work=8.0, host=0.7).path(30) == [2, 4, 8]


@pytest.mark.parametrize(
    ("policy", "path"), [("cost_aware", [32, 16, 8]), ("utilization", [32, 16, 8]), ("performance", [32])]
)
def test_it_shrinks_when_the_devices_wait(policy: Any, path: list[int]) -> None:
    assert Machine(rules(policy=policy), 32, work=8.0, host=1.0).path(30) == path


@pytest.mark.parametrize(
    ("policy", "share", "path"),
    [
        # Twice as many chips make steps 1.23 times as fast: less than 80 % of 2.
        ("cost_aware", 0.3, [2, 4, 2]),
        ("cost_aware", 0.9, [2, 4, 8, 16, 32]),
        ("performance", 0.3, [2, 4, 8, 16, 32]),
        ("performance", -0.1, [2, 4, 2]),
        ("utilization", -0.1, [2, 4, 8, 16, 32]),
    ],
)
def test_it_goes_back_once_when_growing_was_not_worth_it(policy: Any, share: float, path: list[int]) -> None:
    machine = Machine(rules(policy=policy), 2, work=1000.0, host=0.001, share=share)
    assert machine.path(60) == path


def test_what_was_in_vain_is_tried_again_when_there_is_more_to_compute() -> None:
    machine = Machine(rules(), 2, work=1000.0, host=0.001, share=0.3)
    assert machine.path(20) == [2, 4, 2]
    machine.work, machine.share = 8000.0, 1.0
    machine.decisions.clear()
    assert machine.path(20) == [2, 4, 8, 16, 32]


def test_a_change_is_asked_for_twice_and_waits_for_the_cooldown() -> None:
    machine = Machine(rules(cooldown=45.0), 2, work=8.0, host=0.6)  # 10 s between measurements
    assert [machine.go() is not None for _ in range(7)] == [False, True, False, False, False, False, True]
    machine = Machine(rules(patience=3), 4, work=8.0, host=0.6)
    assert machine.go() is None
    assert machine.go() is None
    machine.host = 2.2  # what was asked for is not, and then the opposite is
    assert machine.go() is None
    machine.host = 0.6
    assert [machine.go() is not None for _ in range(3)] == [False, False, True]


def test_devices_that_are_gone_are_left_at_once_and_taken_again() -> None:
    machine = Machine(rules(cooldown=25.0), 32, work=8.0, host=0.01)
    machine.counts = COUNTS[:-1]
    decision = machine.go(lost=16, measured=False)
    assert decision is not None
    assert (decision.action, decision.after, decision.usd_per_hour) == ("shrink", 16, 48.0)
    assert "16 of 32 devices are gone" in str(decision)
    machine.counts = COUNTS
    assert [machine.go(measured=False) is None for _ in range(2)] == [True, True]
    decision = machine.go(measured=False)
    assert decision is not None
    assert (decision.action, decision.after) == ("grow", 32)
    # One of the devices is gone, and there are others.
    decision = machine.go(lost=1, measured=False)
    assert decision is not None
    assert (decision.action, decision.after) == ("replace", 32)


def test_a_loss_while_fewer_than_wanted_are_there_forgets_nothing() -> None:
    machine = Machine(rules(), 32, work=8.0, host=0.01)
    machine.counts = COUNTS[:-1]
    machine.go(lost=16)
    machine.go(lost=2)
    machine.counts = COUNTS
    assert [one.after for one in (machine.go(measured=False), machine.go(measured=False)) if one] == [32]


@pytest.mark.parametrize(
    ("chips", "options", "after", "reason"),
    [
        (2, {"min_chips": 4}, 4, "min_chips=4"),
        (32, {"max_chips": 9}, 8, "max_chips=9"),
        (32, {"cost_limit_per_hour": 50.0}, 16, "cost_limit_per_hour=50"),
        (3, {}, 2, "cannot share a batch"),
    ],
)
def test_a_limit_holds_from_the_first_step(chips: int, options: Any, after: int, reason: str) -> None:
    decision = Machine(rules(**options), chips, work=1.0, host=0.1).go(measured=False)
    assert decision is not None
    assert decision.after == after
    assert reason in decision.reason


@pytest.mark.parametrize("policy", POLICIES)
def test_a_number_of_chips_that_is_no_longer_possible_is_not_gone_back_to(policy: Any) -> None:
    made = rules(policy=policy)

    def decide(step: int, chips: int, counts: tuple[int, ...], lost: int = 0, seconds: float = 0.0) -> Any:
        load = Load(step, chips, seconds, seconds, 1e-3) if seconds else None
        return made.decide(now=float(step), step=step, chips=chips, counts=counts, lost=lost, load=load)

    # A mesh of 4 devices along its other axes shrinks to two of them, which is measured, and comes back as 8.
    assert decide(0, 8, (4, 8)) is None
    assert decide(1, 8, (1, 2), lost=6).after == 2
    assert decide(2, 2, (1, 2), seconds=1.0) is None
    assert decide(3, 2, (4, 8)).after == 8
    assert [decide(step, 8, (4, 8), seconds=2.0) for step in range(4, 8)] == [None] * 4


def test_no_number_within_the_limits_is_an_error() -> None:
    machine = Machine(rules(min_chips=8, max_chips=16, cost_limit_per_hour=60.0), 8, work=1.0, host=0.1)
    machine.counts = (1, 2, 4)
    with pytest.raises(
        ScalingError, match=r"1, 2, 4 of the devices.*8 to 16 chips for at most \$60 per hour at \$3"
    ):
        machine.go(lost=4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_chips": 0}, "min_chips"),
        ({"min_chips": True}, "min_chips"),
        ({"max_chips": 2, "min_chips": 4}, "max_chips: got 2"),
        ({"target_utilization": 0}, "target_utilization"),
        ({"target_utilization": float("nan")}, "target_utilization"),
        ({"target_utilization": "high"}, "target_utilization"),
        ({"patience": 0}, "patience"),
        ({"cooldown": -1}, "cooldown"),
        ({"margin": "x"}, "margin"),
        (
            {"policy": "cost"},
            "scaling_policy: got 'cost', expected one of cost_aware, performance, utilization",
        ),
        ({"cost_limit_per_hour": 0}, "cost_limit_per_hour"),
        ({"cost_limit_per_hour": 5.0, "min_chips": 2}, r"less than what min_chips=2 cost: \$6.00"),
        ({"cost_limit_per_hour": 5.0, "usd_per_chip_hour": None}, "needs a price"),
    ],
)
def test_invalid_settings_name_themselves(options: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rules(**options)


@st.composite
def lives(draw: Any) -> tuple[ScalingRules, list[Any]]:
    least = draw(st.sampled_from((1, 2, 4)))
    limit = draw(st.one_of(st.none(), st.floats(3.0 * least, 120.0)))
    made = rules(
        min_chips=least,
        max_chips=draw(st.integers(least, 40)),
        cost_limit_per_hour=limit,
        policy=draw(st.sampled_from(POLICIES)),
        target_utilization=draw(st.floats(0.1, 1.0)),
        cooldown=draw(st.floats(0.0, 100.0)),
        patience=draw(st.integers(1, 3)),
    )
    seconds = st.floats(1e-3, 10.0)
    moment = st.tuples(st.floats(0.1, 60.0), st.integers(0, 40), st.booleans(), seconds, seconds, seconds)
    return made, draw(st.lists(moment, min_size=5, max_size=40))


@given(lives())
@settings(max_examples=60, deadline=None)
def test_the_limits_hold_and_changes_keep_their_distance(life: tuple[ScalingRules, list[Any]]) -> None:
    made, moments = life
    now, chips, last = 0.0, 4, None
    for number, (passed, there, measured, *times) in enumerate(moments):
        now += passed
        counts = [count for count in range(1, there + 1) if 96 % count == 0]
        lost = max(0, chips - there)
        load = Load(number, chips, *times) if measured else None
        limits_exceeded = lost or chips not in counts or not made.allows(chips)
        try:
            found = made.decide(now=now, step=number, chips=chips, counts=counts, lost=lost, load=load)
        except ScalingError:
            assert not any(map(made.allows, counts))
            continue
        if found is None:
            assert not limits_exceeded
            continue
        assert found.after in counts
        assert made.min_chips <= found.after <= made.max_chips
        if made.cost_limit is not None:
            assert found.usd_per_hour is not None
            assert found.usd_per_hour == found.after * 3.0 <= made.cost_limit
        if not limits_exceeded:
            assert found.after != chips
            assert last is None or now - last >= made.cooldown
        chips, last = found.after, now


@given(
    policy=st.sampled_from(POLICIES),
    work=st.floats(0.01, 100.0),
    host=st.floats(0.01, 2.0),
    share=st.floats(-0.2, 1.0),
    target=st.floats(0.3, 1.0),
    start=st.sampled_from(COUNTS),
    noises=st.lists(st.floats(0.99, 1.01), min_size=80, max_size=80),
)
@settings(max_examples=60, deadline=None)
def test_a_steady_load_ends_at_one_number(
    policy: Any, work: float, host: float, share: float, target: float, start: int, noises: list[float]
) -> None:
    machine = Machine(
        rules(policy=policy, target_utilization=target), start, work=work, host=host, share=share
    )
    for noise in noises:
        machine.go(noise=noise)
    # Up by steps and back by steps: never the same change again.
    assert len(machine.decisions) <= 2 * (len(COUNTS) - 1)
    changes = [(one.before, one.after) for one in machine.decisions]
    assert len(set(changes)) == len(changes)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("inline", [False, True])
def test_the_meter_tells_the_devices_time_from_the_hosts(inline: bool) -> None:
    clock = Clock()
    meter = StepMeter(4, inline=inline, clock=clock)

    def step(seconds: float) -> float:
        clock.now += seconds
        return seconds

    assert not meter.drains
    meter.run(step, 100.0)  # with its compilation
    assert meter.drains
    meter.run(step, 3.0)  # alone
    assert not meter.drains
    for number in range(4):
        clock.now += 0.5  # the host's work
        meter.run(step, 0.25)  # the call
        with meter.waiting():
            clock.now += 2.0
        if number == 1:
            meter.pause()
            clock.now += 50.0  # a validation
            meter.resume()
    assert meter.drains
    load = meter.take(7, 8)
    host = 0.5 if inline else 0.75
    assert load == Load(7, 8, 2.75, 3.0, host)
    assert meter.take(8, 8) is None
    assert meter.drains  # for the next step that is run alone


def layouts() -> Iterator[Layout]:
    for names, sizes in (
        (("data",), (8,)),
        (("data", "model"), (8, 4)),
        (("fsdp", "model"), (4, 2)),
        (("data", "fsdp", "model"), (2, 4, 2)),
        (("data", "expert", "context"), (2, 2, 2)),
        (("model",), (4,)),
    ):
        yield Layout(mesh=tuple(zip(names, sizes, strict=True)))


@pytest.mark.parametrize("layout", list(layouts()), ids=str)
def test_a_mesh_on_other_devices(layout: Layout) -> None:
    rows = 24
    fixed = {axis: size for axis, size in layout.mesh if axis not in ("data", "fsdp")}
    found = mesh_sizes(layout, rows, 64)
    for count in found:
        other = resized(layout, rows, count)
        sizes = other.axis_sizes
        assert other.num_devices == count
        assert rows % (sizes.get("data", 1) * sizes.get("fsdp", 1) * sizes.get("expert", 1)) == 0
        assert {axis: sizes[axis] for axis in fixed} == fixed
    base = layout.num_devices // (layout.axis_sizes.get("data", 1) * layout.axis_sizes.get("fsdp", 1))
    expert = layout.axis_sizes.get("expert", 1)
    assert found == tuple(base * k for k in range(1, 64 // base + 1) if rows % (k * expert) == 0)
    # With too few for the other axes these shrink.
    for count in mesh_sizes(layout, rows, base - 1):
        other = resized(layout, rows, count)
        assert other.num_devices == count < base
        assert all(fixed[axis] % size == 0 for axis, size in other.mesh if axis in fixed)
    for most, count in itertools.product((1, 7, 64), (5, 7, 11)):
        if count not in mesh_sizes(layout, rows, most):
            with pytest.raises(ConfigError, match=f"devices: got {count}"):
                resized(layout, rows, count)


def test_a_mesh_grows_along_its_own_axes() -> None:
    layout = Layout(mesh=(("data", 2), ("fsdp", 4), ("model", 2)))
    meshes = [resized(layout, 48, count).mesh for count in (2, 8, 12, 32)]
    assert [tuple(size for _, size in mesh) for mesh in meshes] == [
        (1, 1, 2),
        (1, 4, 2),
        (3, 2, 2),
        (4, 4, 2),
    ]
