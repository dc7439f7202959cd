"""Several traces of one region as one: times, sums and timelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.observe.errors import ProfileError
from capibara.observe.profile import Profile
from capibara.observe.profile.joined import RegionClock, join_timelines, join_traces
from capibara.observe.profile.result import TracedPart
from capibara.observe.profile.timeline import Timeline, Track
from capibara.observe.profile.trace import Trace

KINDS = ("compute", "collective")


def test_time_stands_still_between_the_parts():
    clock = RegionClock([(10.0, 2.0), (15.0, 1.0), (20.0, 4.0)])
    times = {
        9.0: 0.0,
        10.0: 0.0,
        11.5: 1.5,
        12.0: 2.0,
        14.0: 2.0,
        15.25: 2.25,
        16.0: 3.0,
        22.0: 5.0,
        99.0: 7.0,
    }
    assert {time: clock.at(time) for time in times} == pytest.approx(times)
    assert RegionClock([]).at(3.0) == 0.0


def test_sums_and_means():
    first = Trace({(1, "a"): (2, 10.0)}, {1: 2}, 1, 8.0, 1.0, 2, wall_seconds=1.0, within_ns=4.0)
    second = Trace(
        {(1, "a"): (1, 5.0), (2, "b"): (4, 8.0)},
        {1: 1, 2: 4},
        4,
        6.0,
        2.0,
        5,
        wall_seconds=0.5,
        within_ns=2.0,
    )
    joined = join_traces([first, second])
    assert joined.counts == {(1, "a"): (3, 15.0), (2, "b"): (4, 8.0)}
    assert (joined.runs, joined.events, joined.devices, joined.wall_seconds) == ({1: 3, 2: 4}, 7, 4, 1.5)
    # One of four devices was at work for 8 ns, and then each for 6.
    assert joined.busy_ns == pytest.approx((8.0 + 4 * 6.0) / 4)
    assert joined.within_ns == pytest.approx((4.0 + 4 * 2.0) / 4)
    # Emulated devices: the time in which any was at work.
    emulated = join_traces([replace(one, emulated=True) for one in (first, second)])
    assert emulated.busy_ns == pytest.approx(14.0)
    assert join_traces([first]) is first


@given(
    st.lists(
        st.tuples(
            st.floats(0.01, 10.0),
            st.integers(1, 40),
            st.dictionaries(st.sampled_from(KINDS), st.lists(st.integers(0, 500), min_size=40, max_size=40)),
        ),
        min_size=1,
        max_size=4,
    )
)
def test_a_joined_timeline_has_the_time_of_its_parts(parts: list[tuple[float, int, dict[str, list[int]]]]):
    timelines = [
        Timeline(seconds, bins, (Track("cpu:0", {kind: tuple(row[:bins]) for kind, row in rows.items()}),))
        for seconds, bins, rows in parts
    ]
    joined = join_timelines(timelines, bins=200)
    assert joined is not None
    assert joined.seconds == pytest.approx(sum(one.seconds for one in timelines))
    if len(timelines) == 1:
        assert joined is timelines[0]
        return
    for kind in KINDS:
        spent = sum(
            sum(one.tracks[0].shares.get(kind, ())) * one.seconds / one.bins / 1000 for one in timelines
        )
        again = sum(joined.tracks[0].shares.get(kind, ())) * joined.seconds / joined.bins / 1000
        assert again == pytest.approx(spent, abs=1e-3 * joined.seconds)
    assert np.sum(list(joined.tracks[0].shares.values()) or [np.zeros(200)], axis=0).max() <= 1000
    assert join_timelines([]) is None


BASE = Profile(
    name="s.py",
    platform="cpu",
    chip="cpu",
    devices=1,
    wall_seconds=1.0,
    flops=1,
    bytes=1,
    busy_seconds=0.5,
    communication_seconds=0.0,
    peak_memory_bytes=None,
    peak_flops=None,
    peak_bandwidth=None,
    compiled=0,
    compile_seconds=0.0,
    events=1,
    perturbation=0.0,
    traces=(
        TracedPart(0.0, 0.4),
        TracedPart(0.6, 0.5, "/tmp/mine"),
        TracedPart(1.5, 0.1, "/tmp/mine", "too little"),
    ),
)


def test_the_parts_are_kept_and_said():
    assert Profile.from_json(BASE.to_json()) == BASE
    text = str(BASE)
    assert "own traces     1 that the program took (500.00 ms) were read: /tmp/mine" in text
    assert "left out       100.00 ms, from 1.50 s on: too little" in text
    assert "between them   600.00 ms" in text
    assert "own traces" not in str(replace(BASE, traces=()))


@pytest.mark.parametrize(
    "traces",
    [
        [{"began": -1.0, "seconds": 1.0}],
        [{"began": 0.0, "seconds": "1"}],
        [{"began": 0.0, "seconds": 1.0, "folder": "\x1b[31m"}],
        [{"began": 0.0, "seconds": 1.0, "folder": 3}],
        [{"began": 0.0, "seconds": 1.0, "more": 1}],
        [{"began": 0.0, "seconds": 1.0}] * 20_000,
        3,
    ],
    ids=lambda one: repr(one)[:40],
)
def test_parts_with_nonsense_are_refused(traces: Any):
    import json

    data = json.loads(BASE.to_json())
    data["traces"] = traces
    with pytest.raises(ProfileError):
        Profile.from_json(json.dumps(data))
