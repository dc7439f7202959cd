"""The timeline of a profile, against intervals counted point by point, and against work whose times are known."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData

from capibara.observe.profile import Profile, ProfileError, Timeline, TpuPerformanceProfiler, Track
from capibara.observe.profile import capture as capture_module
from capibara.observe.profile import events as events_module
from capibara.observe.profile.result import KINDS
from capibara.observe.profile.timeline import BINS, MOST_TRACKS, covered_until, edges_of, host_track
from capibara.observe.profile.trace import REGION, _device, find_trace, read_trace

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "_measured", lambda dtype: (1e11, 1e10))


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 25), st.integers(1, len(KINDS))), max_size=14
)


@given(intervals, st.integers(1, 9), st.integers(0, 30), st.integers(1, 80))
@settings(max_examples=300, deadline=None)
def test_shares_are_those_of_points(given: list[tuple[int, int, int]], bins: int, begin: int, length: int):
    """Each point of the time belongs to the first of the kinds that ran then."""
    starts, lengths, kinds = np.array(given, np.int64).reshape(-1, 3).T
    edges = edges_of(begin, length, bins)
    shares, busy, exposed = _device(starts, lengths, kinds, edges)
    first: dict[int, int] = {}
    for start, long, kind in given:
        for at in range(start, start + long):
            first[at] = min(kind, first.get(at, kind))
    assert busy == len(first)
    assert exposed == sum(kind == len(KINDS) for kind in first.values())
    for number, kind in enumerate(KINDS, 1):
        for place, (low, high) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
            exact = sum(first.get(at) == number for at in range(low, high)) / max(1, high - low)
            assert shares.get(kind, (0,) * bins)[place] == pytest.approx(1000 * exact, abs=1.01)
    sums = np.sum(np.array([*shares.values(), (0,) * bins]), axis=0)
    assert sums.max() <= 1000


@given(intervals, st.lists(st.integers(-5, 100), min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_what_is_covered_before_a_time(given: list[tuple[int, int, int]], times: list[int]):
    rows = np.array(sorted(given), np.int64).reshape(-1, 3)
    points = {at for start, length, _ in given for at in range(start, start + length)}
    found = covered_until(rows[:, 0], rows[:, 1], np.array(times, np.int64))
    assert found.tolist() == [sum(at < time for at in points) for time in times]


TWO_DEVICES = """
planes { name: "/device:TPU:0"
  event_metadata { key: 1 value { id: 1 name: "jit_step(42)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.1 = bf16[8]{0} fusion(%a)" } }
  event_metadata { key: 3 value { id: 3 name: "%all-reduce.2 = bf16[8]{0} all-reduce(%b)" } }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 0 duration_ps: 600000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 0 duration_ps: 300000000 }
    events { metadata_id: 3 offset_ps: 150000000 duration_ps: 300000000 } } }
planes { name: "/device:TPU:1"
  event_metadata { key: 1 value { id: 1 name: "jit_step(42)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.1 = bf16[8]{0} fusion(%a)" } }
  lines { name: "XLA Modules" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 0 duration_ps: 600000000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 300000000 duration_ps: 300000000 } } }
"""

MARKED = """
planes { name: "/host:CPU"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "program_id" } }
  event_metadata { key: 1 value { id: 1 name: "REGION" } }
  lines { name: "python" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: OFFSET duration_ps: 5
      stats { metadata_id: 1 str_value: "REGION" } stats { metadata_id: 2 int64_value: 0 } } } }
""".replace("REGION", REGION)

OPERATIONS = {42: {"fusion.1": "compute", "all-reduce.2": "collective"}}


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return path


@pytest.mark.usefixtures("reader")
def test_devices_of_a_trace(tmp_path: Path):
    """600 µs in 600 parts: 300 µs of work, then 150 µs of the collective alone; the other device after it."""
    found = read_trace(written(tmp_path, TWO_DEVICES), OPERATIONS, 600e-6).timeline
    assert found is not None
    first, second = found.tracks
    assert (first.name, second.name) == ("tpu:0", "tpu:1")
    assert first.shares == {
        "compute": (1000,) * 300 + (0,) * 300,
        "collective": (0,) * 300 + (1000,) * 150 + (0,) * 150,
    }
    assert second.shares == {"compute": (0,) * 300 + (1000,) * 300}
    assert read_trace(written(tmp_path, TWO_DEVICES), OPERATIONS).timeline is None


@pytest.mark.usefixtures("reader")
def test_the_mark_is_where_the_region_begins(tmp_path: Path):
    path = written(tmp_path, TWO_DEVICES + MARKED.replace("OFFSET", "60000000"))
    trace = read_trace(path, OPERATIONS, 600e-6)
    assert trace.runs == {42: 2}  # the mark is not a run
    assert trace.events == 3
    assert trace.timeline is not None
    assert [one.name for one in trace.timeline.tracks] == ["tpu:0", "tpu:1"]
    # 60 of the 300 µs lie before it.
    assert sum(trace.timeline.tracks[0].shares["compute"]) == 240_000
    assert trace.timeline.tracks[0].shares["compute"][:241] == (1000,) * 240 + (0,)


def test_a_clock_of_its_own_is_put_to_the_end(tmp_path: Path):
    far = TWO_DEVICES.replace("timestamp_ns: 1000", "timestamp_ns: 7000000000")
    found = read_trace(written(tmp_path, far + MARKED.replace("OFFSET", "0")), OPERATIONS, 1200e-6).timeline
    assert found is not None
    assert found.tracks[1].shares["compute"] == (0,) * 450 + (1000,) * 150


def test_more_devices_than_are_kept(tmp_path: Path):
    plane = TWO_DEVICES[TWO_DEVICES.index('planes { name: "/device:TPU:1"') :]
    many = "".join(plane.replace("TPU:1", f"TPU:{number}") for number in range(MOST_TRACKS + 3))
    found = read_trace(written(tmp_path, many), OPERATIONS, 600e-6).timeline
    assert found is not None
    assert (len(found.tracks), found.left_out) == (MOST_TRACKS, 3)


def test_compiling_lies_over_tracing():
    spans = [("tracing", 0, 300), ("compiling", 100, 100), ("tracing", 500, 100), ("compiling", 900, 400)]
    track = host_track(spans, 1000, 10)
    assert track.shares == {
        "compiling": (0, 1000, 0, 0, 0, 0, 0, 0, 0, 1000),
        "tracing": (1000, 0, 1000, 0, 0, 1000, 0, 0, 0, 0),
    }
    assert host_track([], 1000, 10).shares == {}


@pytest.mark.usefixtures("reader")
def test_the_timeline_of_a_region(tmp_path: Path):
    """Nothing, then compiling, then work: in this order, and as long as the profile's own figures say."""
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 40, lambda _, h: jnp.tanh(h @ x), x))
    x = jnp.ones((256, 256))
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    with profiler.profile_context("ordered"):
        began = time.perf_counter()
        time.sleep(0.15)
        asleep = time.perf_counter() - began
        product(x).block_until_ready()
    found = profiler.profile()
    assert found.timeline is not None
    host, device = found.timeline.tracks
    assert (host.name, device.name) == ("host", "cpu:0")
    part = found.wall_seconds / BINS
    idle = int(asleep / part) - 1
    for shares in (*host.shares.values(), *device.shares.values()):
        assert sum(shares[:idle]) == 0
    compiling = np.flatnonzero(host.shares["compiling"])
    working = np.flatnonzero(device.shares["compute"])
    assert idle < compiling[0] < working[0]
    assert compiling[-1] <= working[0] + 1
    assert sum(host.shares["compiling"]) * part / 1000 == pytest.approx(found.compile_seconds, abs=2 * part)
    assert sum(map(sum, device.shares.values())) * part / 1000 == pytest.approx(
        found.busy_seconds, abs=2 * part
    )
    assert Profile.from_json((tmp_path / "ordered" / "profile.json").read_text()) == found


def test_without_a_trace_there_is_no_timeline(tmp_path: Path):
    from capibara.observe.profile.plot import plot_profile

    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    with profiler.profile_context("plain"):
        pass
    assert profiler.profile().timeline is None
    plot_profile(profiler.profile(), tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


tracks = st.builds(
    Track,
    st.sampled_from(["host", "cpu:0", "tpu:12"]),
    st.dictionaries(st.sampled_from([*KINDS, "compiling"]), st.just((0, 100, 200)), max_size=5),
)
timelines = st.builds(
    Timeline,
    st.floats(1e-9, 1e6),
    st.just(3),
    st.lists(tracks, max_size=MOST_TRACKS + 1).map(tuple),
    st.integers(0, 2**31),
)


@given(timelines)
@settings(max_examples=100, deadline=None)
def test_timelines_come_back(given: Timeline):
    assert Timeline.from_data(json.loads(json.dumps(given.to_data()))) == given


GOOD: dict[str, Any] = Timeline(1.0, 3, (Track("host", {"compiling": (0, 500, 1000)}),), 2).to_data()


def row(text: Any) -> list[dict[str, Any]]:
    return [{"name": "host", "shares": {"compiling": text}}]


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0},
        {"seconds": True},
        {"seconds": float("nan")},
        {"seconds": "1"},
        {"bins": 0},
        {"bins": 10**9},
        {"bins": 2},
        {"bins": 3.0},
        {"left_out": -1},
        {"more": 1},
        {"tracks": 3},
        {"tracks": GOOD["tracks"] * (MOST_TRACKS + 2)},
        {"tracks": [3]},
        {"tracks": [{"name": "host"}]},
        {"tracks": [{"name": 3, "shares": {}}]},
        {"tracks": [{"name": "\x1b[31m", "shares": {}}]},
        {"tracks": [{"name": "host", "shares": 3}]},
        {"tracks": [{"name": "host", "shares": {f"kind {n}": "0 0 0" for n in range(20)}}]},
        {"tracks": [{"name": "host", "shares": {"a": "600 0 0", "b": "500 0 0"}}]},
        {"tracks": row(3)},
        {"tracks": row("1 2")},
        {"tracks": row("1 2 3 4")},
        {"tracks": row("1 2 -3")},
        {"tracks": row("1 2 x")},
        {"tracks": row("1 2 1001")},
        {"tracks": row("1 2 ²")},
        {"tracks": row("9" * 10_000)},
    ],
)
def test_a_timeline_with_nonsense_is_refused(change: dict[str, Any]):
    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    with profiler.profile_context("x"):
        pass
    data = json.loads(profiler.profile().to_json())
    assert Profile.from_json(json.dumps({**data, "timeline": GOOD})).timeline is not None
    with pytest.raises(ProfileError, match="is not a profile"):
        Profile.from_json(json.dumps({**data, "timeline": {**GOOD, **change}}))


def test_the_figure_of_many_devices(tmp_path: Path):
    from capibara.observe.profile.plot import plot_profile

    profiler = TpuPerformanceProfiler(
        capture_flops=False, capture_communication=False, capture_kernel_details=False
    )
    with profiler.profile_context("x"):
        pass
    rows = {kind: tuple(int(200 * (place % 2)) for place in range(BINS)) for kind in KINDS}
    many = tuple(Track(f"tpu:{number}", rows) for number in range(MOST_TRACKS))
    host = Track(r"$\x{$", {"compiling": (1000,) * BINS, "unheard of": (0,) * BINS})
    for seconds in (1e-5, 0.1, 100.0):
        timeline = Timeline(seconds, BINS, (host, *many), 5)
        plot_profile(replace(profiler.profile(), timeline=timeline), tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_the_mark_is_found_in_a_real_trace(tmp_path: Path):
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    with profiler.profile_context("marked"):
        jnp.ones(8).block_until_ready()
    table = events_module.read_events(find_trace(tmp_path))
    marks = table.rows["op"] == table.texts.index(REGION)
    assert marks.sum() == 1
