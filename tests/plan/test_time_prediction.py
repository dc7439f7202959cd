"""Seconds from facts: each figure against the formula that it should follow."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.plan import PlanError
from capibara.plan.program import Collective, Kernel, Piece, ProgramFacts, read_program
from capibara.plan.slices import parse_slice
from capibara.plan.time import Constants, Part, StepTime, predict_step
from capibara.plan.time.prediction import start_seconds

HLO = Path(__file__).parent / "hlo"
CUBE = parse_slice("v4:4x4x4")
LINK = CUBE.link_bandwidth
ONE = (("x", 64),)


def piece(
    cycles: int | None = 0, flops: int = 0, moved: int = 0, host: int = 0, dtype: str = "bf16"
) -> Piece:
    return Piece("p", "fusion", "", 1, cycles, flops, moved, host, dtype=dtype)


def exchange(kind: str, size: int, groups: Any, dims: int = 0) -> Collective:
    return Collective(kind, size, groups, len(groups[0]), 1, True, 0, "", ring_dims=dims)


def facts(
    schedule: Any, pieces: Any = (), collectives: Any = (), kernels: Any = (), devices: int = 64
) -> ProgramFacts:
    return ProgramFacts(
        "test", devices, 0, 0, 0, tuple(pieces), tuple(collectives), tuple(kernels), schedule, ()
    )


def seconds(*args: Any, slice=CUBE, mesh=ONE, hop_latency: float = 0.0, **options: Any) -> float:
    return predict_step(facts(*args), slice, mesh, hop_latency=hop_latency, **options).seconds


def test_cycles_are_the_clocks() -> None:
    assert CUBE.clock_hz == pytest.approx(1.05e9, rel=0.01)
    assert seconds((("piece", 0),), [piece(2100)]) == pytest.approx(2100 / CUBE.clock_hz)


def test_without_cycles_the_roofline_counts() -> None:
    peak, bandwidth = CUBE.chip.peak("bfloat16"), CUBE.chip.hbm_bandwidth
    assert bandwidth is not None
    assert seconds((("piece", 0),), [piece(None, 10**12, 1000)]) == pytest.approx(10**12 / peak)
    assert seconds((("piece", 0),), [piece(None, 1000, 10**9)]) == pytest.approx(10**9 / bandwidth)
    kernel = Kernel("tpu_custom_call", 1, 10**12, 1000, "")
    assert seconds((("kernel", 0),), (), (), [kernel]) == pytest.approx(10**12 / peak)


def test_cycles_can_be_left_out() -> None:
    peak = CUBE.chip.peak("bfloat16")
    work = (("piece", 0),), [piece(10**9, 10**12, 1000)]
    start = start_seconds(CUBE)
    assert start == pytest.approx(4000 / CUBE.clock_hz)
    assert seconds(*work, cycles=False) == pytest.approx(10**12 / peak + start)
    assert seconds(*work) == pytest.approx(10**9 / CUBE.clock_hz)
    copy = replace(work[1][0], opcode="copy-start")
    assert seconds((("piece", 0),), [copy], cycles=False) == pytest.approx(10**12 / peak)
    core = parse_slice("v4:2x2x1", view="core")
    assert start_seconds(core) == start / 2


@given(st.floats(0.1, 10), st.floats(0, 10), st.floats(0, 10), st.floats(0, 100))
def test_a_slower_time_has_more_work_on_the_device(
    compute: float, memory: float, links: float, asked: float
) -> None:
    parts = (
        Part("products", compute, "roofline"),
        Part("other", memory, "roofline"),
        Part("gather", links, "links"),
    )
    time = StepTime(compute + memory + links, 0.0, 50.0, compute, memory, links, 0.5, parts)
    slower = time.slower(asked)
    assert slower.seconds == pytest.approx(max(time.seconds, asked))
    assert sum(part.seconds for part in slower.parts) == pytest.approx(slower.seconds)
    assert slower.compute + slower.memory + slower.communication == pytest.approx(slower.seconds)
    assert (slower.communication, slower.hidden, slower.low) == (links, 0.5, 0.0)
    assert slower.high - slower.seconds == pytest.approx(time.high - time.seconds)


def test_loops_multiply() -> None:
    inner = (("piece", 0), ("loop", 3, (("piece", 0),)))
    assert seconds((("loop", 5, inner),), [piece(10**6)]) == pytest.approx(5 * 4 * 10**6 / CUBE.clock_hz)


EVERYONE = (tuple(range(64)),)
BYTES = 10**9


# A cube that closes along each axis: six links each way a chip; the formulas are those of ring algorithms.
@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("all-gather", 63 / 64 / 6),
        ("reduce-scatter", 63 / 64 / 6),
        ("all-reduce", 2 * 63 / 64 / 6),
        ("all-to-all", 4 / 8),
    ],
)
def test_collectives_over_a_cube(kind: str, share: float) -> None:
    got = seconds((("collective", 0),), (), [exchange(kind, BYTES, EVERYONE)])
    assert got == pytest.approx(share * BYTES / LINK)


def test_one_axis_has_two_links_a_line_one() -> None:
    groups = tuple(tuple(range(i, i + 4)) for i in range(0, 64, 4))
    cube = seconds(
        (("collective", 0),), (), [exchange("all-gather", BYTES, groups)], mesh=(("a", 16), ("b", 4))
    )
    assert cube == pytest.approx(3 / 4 * BYTES / (2 * LINK))
    flat = parse_slice("v5e:4x4")
    groups = tuple(tuple(range(i, i + 4)) for i in range(0, 16, 4))
    line = seconds(
        (("collective", 0),),
        (),
        [exchange("all-gather", BYTES, groups)],
        (),
        16,
        slice=flat,
        mesh=(("a", 4), ("b", 4)),
    )
    assert line == pytest.approx(3 / 4 * BYTES / flat.link_bandwidth)


def test_the_compilers_one_ring_through_two_axes_has_two_links() -> None:
    flat = parse_slice("v5e:16x16")
    everyone = (tuple(range(256)),)
    one = seconds(
        (("collective", 0),),
        (),
        [exchange("all-gather", BYTES, everyone, 1)],
        (),
        256,
        slice=flat,
        mesh=(("x", 256),),
    )
    assert one == pytest.approx(255 / 256 * BYTES / (2 * flat.link_bandwidth))


def test_latency_counts_by_the_link() -> None:
    got = seconds((("collective", 0),), (), [exchange("all-gather", 64, EVERYONE)], hop_latency=1e-6)
    assert got == pytest.approx(6e-6, rel=0.01)  # two links at most along each of three rings of 4


def test_a_permute_to_the_neighbour() -> None:
    pairs = tuple((i, i // 4 * 4 + (i + 1) % 4) for i in range(64))
    got = seconds(
        (("collective", 0),), (), [exchange("collective-permute", BYTES, pairs)], mesh=(("a", 16), ("b", 4))
    )
    assert got == pytest.approx(BYTES / LINK)


@pytest.mark.parametrize(("kind", "times"), [("all-gather", 1), ("reduce-scatter", 1), ("all-reduce", 2)])
def test_a_ring_over_cores_passes_each_cores_data_over_the_links(kind: str, times: int) -> None:
    """All eight cores of four chips: 7/8 of the bytes come to each; at best 3/4, once for both cores of a chip."""
    target = parse_slice("v4:2x2x1", "core")
    groups = (tuple(range(8)),)
    given = facts((("collective", 0),), (), [exchange(kind, BYTES, groups)], (), 8)
    got = predict_step(given, target, (("all", 8),), hop_latency=0.0)
    links = 2 * target.link_bandwidth  # one along each of two lines of two chips
    assert got.seconds == pytest.approx(times * 7 / 8 * BYTES / links)
    assert got.low == pytest.approx(times * 3 / 4 * BYTES / links)


def test_cores_of_a_chip_exchange_through_its_memory() -> None:
    target = parse_slice("v4:2x2x1", "core")
    groups = ((0, 1), (2, 3), (4, 5), (6, 7))
    got = seconds(
        (("collective", 0),),
        (),
        [exchange("all-gather", BYTES, groups)],
        (),
        8,
        slice=target,
        mesh=(("a", 4), ("b", 2)),
    )
    assert target.chip.hbm_bandwidth is not None
    assert got == pytest.approx(BYTES / target.chip.hbm_bandwidth)


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all"])
def test_cores_of_a_chip_share_its_links(kind: str) -> None:
    """Each core in a group of its own: twice the time of one group of chips."""
    apart = ((0, 2, 4, 6), (1, 3, 5, 7))
    chips = (tuple(range(4)),)
    cores = seconds(
        (("collective", 0),),
        (),
        [exchange(kind, BYTES, apart)],
        (),
        8,
        slice=parse_slice("v4:2x2x1", "core"),
        mesh=(("a", 4), ("b", 2)),
    )
    whole = seconds(
        (("collective", 0),),
        (),
        [exchange(kind, BYTES, chips)],
        (),
        4,
        slice=parse_slice("v4:2x2x1"),
        mesh=(("a", 4),),
    )
    assert cores == pytest.approx(2 * whole)


def test_chips_without_known_links_are_timed_as_long_as_nothing_is_exchanged() -> None:
    target = parse_slice("v7x:2x2x1")
    assert seconds((("piece", 0),), [piece(2200)], (), (), 8, slice=target, mesh=(("a", 8),)) > 0


def test_what_is_in_flight_costs_only_what_is_waited_for() -> None:
    gather = exchange("all-gather", BYTES, EVERYONE)
    alone = predict_step(facts((("collective", 0),), (), [gather]), CUBE, ONE).seconds
    work = int(0.25 * alone * CUBE.clock_hz)
    schedule = (("start", 0), ("piece", 0), ("done", 0))
    step = predict_step(facts(schedule, [piece(work, 1)], [gather]), CUBE, ONE)
    assert step.seconds == pytest.approx(alone)
    assert step.compute == pytest.approx(0.25 * alone, rel=1e-6)
    assert step.communication == pytest.approx(0.75 * alone, rel=1e-6)
    assert step.hidden == pytest.approx(0.25 * alone, rel=1e-6)
    assert step.high == pytest.approx(1.25 * alone, rel=1e-6)
    long = predict_step(facts(schedule, [piece(work * 8, 1)], [gather]), CUBE, ONE)
    assert long.communication == 0
    assert long.seconds == pytest.approx(2 * alone, rel=1e-6)


def test_exchanges_over_the_same_links_follow_one_another_others_do_not() -> None:
    mesh = (("a", 4), ("b", 4), ("c", 4))
    along = {
        name: tuple(
            tuple(i * 16 + j * 4 + k for i, j, k in itertools.product(*ranges))
            for ranges in itertools.product(
                *(
                    [[[n] for n in range(4)]] * axis
                    + [[list(range(4))]]
                    + [[[n] for n in range(4)]] * (2 - axis)
                )
            )
        )
        for axis, name in enumerate("abc")
    }
    both = [exchange("all-gather", BYTES, along["a"]), exchange("all-gather", BYTES, along["b"])]
    same = [exchange("all-gather", BYTES, along["a"]), exchange("all-gather", BYTES, along["a"])]
    one = seconds((("collective", 0),), (), both, mesh=mesh)
    schedule = (("start", 0), ("start", 1), ("done", 0), ("done", 1))
    assert seconds(schedule, (), both, mesh=mesh) == pytest.approx(one)
    assert seconds(schedule, (), same, mesh=mesh) == pytest.approx(2 * one)


def test_permutes_both_ways_around_a_ring_go_on_together() -> None:
    mesh = (("a", 16), ("b", 4))
    forth = tuple((i, i // 4 * 4 + (i + 1) % 4) for i in range(64))
    back = tuple((b, a) for a, b in forth)
    pair = [exchange("collective-permute", BYTES, forth), exchange("collective-permute", BYTES, back)]
    schedule = (("start", 0), ("start", 1), ("done", 0), ("done", 1))
    assert seconds(schedule, (), pair, mesh=mesh) == pytest.approx(BYTES / LINK)


def test_copies_go_on_beside_work() -> None:
    bandwidth = CUBE.chip.hbm_bandwidth
    assert bandwidth is not None
    copy = piece(None, 0, 10**9)
    schedule = (("copy", 0), ("piece", 1), ("copied", 0))
    assert seconds(schedule, [copy, piece(1000)]) == pytest.approx(10**9 / bandwidth)
    assert seconds(schedule, [copy, piece(10**9)]) == pytest.approx(10**9 / CUBE.clock_hz)


def test_copies_to_the_host_need_a_bandwidth_and_say_so() -> None:
    copy = piece(None, 0, 10**6, 10**9)
    schedule = (("copy", 0), ("copied", 0))
    without = predict_step(facts(schedule, [copy]), CUBE, ONE)
    assert any("host_bandwidth" in words for words in without.unknown)
    assert seconds(schedule, [copy], host_bandwidth=1e10) == pytest.approx(0.1)


def test_constants_are_shares_of_rates() -> None:
    schedule = (("piece", 0), ("collective", 0), ("kernel", 0))
    parts = [piece(10**6, 1)], [exchange("all-gather", BYTES, EVERYONE)], [Kernel("k", 1, 10**12, 0, "")]
    plain = predict_step(facts(schedule, *parts), CUBE, ONE, hop_latency=0)
    half = predict_step(
        facts(schedule, *parts),
        CUBE,
        ONE,
        hop_latency=0,
        constants=Constants(compute=0.5, links=0.5, kernels=0.5),
    )
    assert half.seconds == pytest.approx(2 * plain.seconds)
    assert half.communication == pytest.approx(2 * plain.communication)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**12), st.integers(0, 10**9)), max_size=6),
    st.lists(st.integers(1, 10**9), max_size=4),
    st.integers(1, 50),
)
def test_parts_sum_to_the_time_and_the_range_holds_it(pieces: list, gathers: list[int], turns: int) -> None:
    events: list[Any] = [("start", i) for i in range(len(gathers))]
    events += [("piece", i) for i in range(len(pieces))]
    events += [("done", i) for i in range(len(gathers))]
    step = predict_step(
        facts(
            (("loop", turns, tuple(events)),),
            [piece(*numbers) for numbers in pieces],
            [exchange("all-gather", size, EVERYONE) for size in gathers],
        ),
        CUBE,
        ONE,
    )
    assert step.low <= step.seconds <= step.high
    assert step.compute + step.memory + step.communication == pytest.approx(step.seconds)
    assert sum(part.seconds for part in step.parts) == pytest.approx(step.seconds)
    assert {part.source for part in step.parts} <= {"compiler cycles", "roofline", "links"}


def test_a_real_program_is_made_of_labelled_parts() -> None:
    program = read_program((HLO / "v4_async_gather.txt").read_text())
    step = predict_step(program, parse_slice("v4:2x2x2"), (("fsdp", 8),))
    products = 3 * 2 * 2 * 4096 * 1024 * 4096 / 8 / parse_slice("v4:2x2x2").chip.peak("bfloat16")
    assert products < step.compute < 2 * products  # 512 rows a device: half of what the chip can do
    labels = {part.label: part.source for part in step.parts}
    assert labels["matrix products"] == "compiler cycles"
    assert labels["all-gather over fsdp"] == "links"
    assert step.hidden > 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"mesh": (("x", 32),)}, "32 devices"),
        ({"slice": parse_slice("v4:2x2x2"), "mesh": (("x", 8),)}, "compiled for 64 devices"),
    ],
)
def test_what_does_not_fit_is_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        seconds((), **options)


@pytest.mark.parametrize("value", [0, -1, float("nan"), 11, "1"])
def test_constants_must_be_shares(value: Any) -> None:
    with pytest.raises(PlanError, match="links="):
        Constants(links=value)


@pytest.mark.parametrize("schedule", [(("piece", 3),), (("done", 0),), (("dance", 0),), (("collective", 9),)])
def test_facts_that_contradict_themselves_are_refused(schedule: Any) -> None:
    with pytest.raises(PlanError, match=r"contradict|not known"):
        seconds(schedule)


def test_a_program_for_one_device_on_a_slice_says_so() -> None:
    step = predict_step(facts((("piece", 0),), [piece(1000)], devices=1), CUBE, ONE)
    assert any("one device" in words for words in step.unknown)
