"""Traces of jax.profiler as operations and times: of CPUs, GPUs, TPUs; real and written by hand, whole and damaged."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.profiler import ProfileData
from other_process import run_apart

from capibara.observe.profile import ProfileError, TpuPerformanceProfiler
from capibara.observe.profile import capture as capture_module
from capibara.observe.profile import events as events_module
from capibara.observe.profile import trace as trace_module
from capibara.observe.profile.trace import covered, find_trace, read_trace

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")


@pytest.fixture(autouse=True)
def quick_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "_measured", lambda dtype: (1e11, 1e10))


def layers(x, weights):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def test_a_field_without_a_number_is_not_an_end(tmp_path: Path):
    if events_module._compiled() is None:
        pytest.skip("the native library is not built")
    path = tmp_path / "x.xplane.pb"
    content = ProfileData.text_proto_to_serialized_xspace(TPU)
    for odd in (content + bytes(2), bytes(1000)):
        path.write_bytes(odd)
        with pytest.raises(ProfileError, match="is not a trace"):
            read_trace(path, {})


def test_an_event_of_a_negative_length(tmp_path: Path):
    if events_module._compiled() is None:
        pytest.skip("the native library is not built")
    path = tmp_path / "x.xplane.pb"
    text = TPU.replace("duration_ps: 40000", "duration_ps: -5")
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    with pytest.raises(ProfileError, match="is damaged"):
        read_trace(path, {})


@pytest.mark.usefixtures("reader")
def test_a_damaged_trace(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(b"\xff" * 100)
    with pytest.raises(ProfileError, match="is not a trace"):
        read_trace(path, {})


TPU = """
planes { name: "/device:TPU:0"
  event_metadata { key: 1 value { id: 1 name: "jit_step(42)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.1 = bf16[8]{0} fusion(%a)" } }
  event_metadata { key: 3 value { id: 3 name: "%all-reduce.2 = bf16[8]{0} all-reduce(%b)" } }
  event_metadata { key: 4 value { id: 4 name: "%while.9 = (s32[]) while(%c)" } }
  lines { name: "XLA Modules" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 0 duration_ps: 100000 }
    events { metadata_id: 1 offset_ps: 200000 duration_ps: 100000 } }
  lines { name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 4 offset_ps: 0 duration_ps: 90000 }
    events { metadata_id: 2 offset_ps: 0 duration_ps: 40000 }
    events { metadata_id: 3 offset_ps: 40000 duration_ps: 30000 }
    events { metadata_id: 2 offset_ps: 200000 duration_ps: 50000 }
    events { metadata_id: 3 offset_ps: 240000 duration_ps: 30000 }
    events { metadata_id: 2 offset_ps: 400000 duration_ps: 50000 } } }
"""


@pytest.mark.usefixtures("reader")
def test_a_trace_of_a_tpu(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(TPU))
    trace = read_trace(path, {42: {"fusion.1": "compute", "all-reduce.2": "collective"}})
    # The last one lies in no module; the loop's time is that of what it contains.
    assert trace.counts == {(42, "fusion.1"): (2, 90.0), (42, "all-reduce.2"): (2, 60.0)}
    assert trace.runs == {42: 2}
    assert trace.busy_ns == 140
    assert trace.exposed_ns == 50  # 10 of the second collective lie beside a fusion


GPU = """
planes { name: "/device:GPU:0"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "program_id" } }
  stat_metadata { key: 3 value { id: 3 name: "hlo_module" } }
  stat_metadata { key: 4 value { id: 4 name: "correlation_id" } }
  event_metadata { key: 1 value { id: 1 name: "ampere_sgemm_128x64" } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 0
    events { metadata_id: 1 offset_ps: 0 duration_ps: 70000
      stats { metadata_id: 1 str_value: "dot.3" } stats { metadata_id: 2 int64_value: 5 }
      stats { metadata_id: 3 str_value: "jit_f" } stats { metadata_id: 4 int64_value: 11 } }
    events { metadata_id: 1 offset_ps: 90000 duration_ps: 10000 } } }
"""


@pytest.mark.usefixtures("reader")
def test_a_trace_of_a_gpu(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(GPU))
    trace = read_trace(path, {5: {"dot.3": "kernel"}})
    assert trace.counts == {(5, "dot.3"): (1, 70.0)}
    assert trace.runs == {5: 1}
    assert trace.busy_ns == 70


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12))
@settings(max_examples=200, deadline=None)
def test_union_of_intervals(intervals: list[tuple[int, int]]):
    points = {at for start, length in intervals for at in range(start, start + length)}
    starts, lengths = np.array(intervals, np.int64).reshape(-1, 2).T
    assert covered(starts, lengths) == len(points)


def test_both_readers_see_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if events_module._compiled() is None:
        pytest.skip("the native library is not built")
    compiled = jax.jit(jax.grad(lambda x, w: layers(x, w).sum()))
    arguments = jnp.ones((16, 48)), jnp.ones((5, 48, 48))
    jax.block_until_ready(compiled(*arguments))
    profiler = TpuPerformanceProfiler(trace_dir=tmp_path)
    with profiler.profile_context("both"):
        jax.block_until_ready([compiled(*arguments) for _ in range(3)])
    path = find_trace(tmp_path)
    native = events_module.read_events(path)
    monkeypatch.setattr(events_module, "_compiled", lambda: None)
    plain = events_module.read_events(path)
    assert len(native.rows) > 0
    assert native.lines == plain.lines
    for name in ("program", "run", "line", "device"):
        assert np.array_equal(native.rows[name], plain.rows[name])
    for name in ("name", "op"):
        words = [[table.texts[at] for at in table.rows[name]] for table in (native, plain)]
        assert words[0] == words[1]
    # JAX's reader tells times as float64 since 1970, which has steps of 256 ns.
    for name in ("start_ps", "duration_ps"):
        first, other = (table.rows[name] - table.rows[name][0] for table in (native, plain))
        assert np.abs(first - other).max() <= 600_000


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_trace_with_other_bytes_is_read_or_refused(data: st.DataObject):
    if events_module._compiled() is None:
        pytest.skip("the native library is not built")
    kind = data.draw(st.sampled_from([TPU, GPU]))
    content = bytearray(ProfileData.text_proto_to_serialized_xspace(kind))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))]
    with tempfile.NamedTemporaryFile(suffix=".xplane.pb") as file:
        file.write(content)
        file.flush()
        with contextlib.suppress(ProfileError):
            trace = read_trace(file.name, {42: {"fusion.1": "compute"}, 5: {"dot.3": "kernel"}})
            assert trace.events <= 6


def test_what_waited_for_an_operation_is_not_part_of_it():
    """The thread that ends it runs that first, and then marks the end: that of the same run and device."""
    #         begins, span, program, run, flow, line, name, op, device
    first = (100, 10, 7, 1, 1, 0, 0, 0, 0)
    nexts = {
        "what waited": ((300, 150, 7, 1, 2, 1, 1, 1, 0), 200),
        "within the span": ((105, 345, 7, 1, 2, 1, 1, 1, 0), 10),
        "before it": ((90, 360, 7, 1, 2, 1, 1, 1, 0), 360),
        "another run": ((300, 150, 7, 2, 2, 1, 1, 1, 0), 360),
        "another program": ((300, 150, 8, 1, 2, 1, 1, 1, 0), 360),
        "another device": ((300, 150, 7, 1, 2, 1, 1, 1, 1), 360),
    }
    for words, (after, length) in nexts.items():
        rows = np.array([first, after], events_module._ROW)
        trace_module._end(rows, np.array([(460, 1, 0, 1)], events_module._MARK))
        assert rows["duration_ps"].tolist() == [length, after[1]], words


# Threads of a pool, as (name, begins, ends, run, flow): of a row its operation, of a mark the one that ends.
THREADS = (
    (
        ("product", 100, 200, 1, 11),  # gives its parts away
        ("ThreadpoolListener::StartRegion", 250, 250, 0, 0),
        ("ThreadpoolListener::StopRegion", 480, 480, 0, 0),
    ),
    (
        ("sum", 40, 60, 1, 10),
        ("ThreadpoolListener::StartRegion", 210, 210, 0, 0),  # of the product's parts, the last to end
        ("tanh", 500, 600, 1, 12),
        ("ThreadpoolListener::StartRegion", 520, 520, 0, 0),  # another task is done meanwhile
        ("other", 530, 540, 2, 20),
        ("ThreadpoolListener::StopRegion", 550, 550, 0, 0),
        ("exchange", 610, 900, 1, 13),
        ("end: product", 910, 910, 0, 11),
        ("ThreadpoolListener::StopRegion", 920, 920, 0, 0),
        ("ThreadpoolListener::StopRegion", 930, 930, 0, 0),  # one that began before the trace
        ("end: exchange", 940, 940, 0, 13),  # in no task: after the first row of this run that is in none
    ),
)


def threads() -> bytes:
    """A trace of XLA on a CPU."""
    names = sorted({event[0] for thread in THREADS for event in thread})
    stats = ["hlo_op", "program_id", "run_id", "device_ordinal", "_p", "_c"]
    lines = []
    for number, thread in enumerate(THREADS):
        events = []
        for name, begins, ends, run, flow in thread:
            about = [f"stats {{ metadata_id: {6 if run else 5} int64_value: {flow} }}"] if flow else []
            if run:
                about += [
                    f'stats {{ metadata_id: 1 str_value: "{name}" }}',
                    "stats { metadata_id: 2 int64_value: 7 }",
                    f"stats {{ metadata_id: 3 int64_value: {run} }}",
                    "stats { metadata_id: 4 int64_value: 0 }",
                ]
            times = f"offset_ps: {begins * 1000_000} duration_ps: {(ends - begins) * 1000_000}"
            events.append(f"events {{ metadata_id: {1 + names.index(name)} {times} {' '.join(about)} }}")
        lines.append(f'lines {{ name: "pool/{number}" timestamp_ns: 1000 {" ".join(events)} }}')
    kinds = [
        f'{kind}_metadata {{ key: {at} value {{ id: {at} name: "{name}" }} }}'
        for kind, every in (("event", names), ("stat", stats))
        for at, name in enumerate(every, 1)
    ]
    return ProfileData.text_proto_to_serialized_xspace(
        f'planes {{ name: "/host:CPU" {" ".join(lines)} {" ".join(kinds)} }}'
    )


@pytest.mark.usefixtures("reader")
def test_the_end_of_an_operation_is_where_the_next_begins_on_the_thread_that_ends_it(tmp_path: Path):
    path = tmp_path / "x.xplane.pb"
    path.write_bytes(threads())
    kinds = {"product": "compute", "sum": "compute", "tanh": "compute", "other": "compute"}
    trace = read_trace(path, {7: {**kinds, "exchange": "collective"}})
    times = {name: round(spent / 1000) for (_, name), (_, spent) in trace.counts.items()}
    # The product's mark stands at 910; its own span, of giving its parts away, ends at 200.
    assert times == {"product": 400, "sum": 20, "tanh": 100, "other": 10, "exchange": 330}
    assert round(trace.exposed_ns / 1000) == 330


@pytest.mark.usefixtures("reader")
def test_operations_one_after_the_other_take_no_more_than_the_whole():
    """Each hands its parts to a pool, and what comes next is run by whoever does the last of them."""

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            moved = sum(jnp.roll(x, by, axis) for by in (1, -1) for axis in (0, 1))
            return jnp.tanh(x @ x * 1e-3) + moved / 4, None

        return jax.lax.scan(turn, x, None, 12)[0]

    x = jnp.ones((1000, 1000))
    jax.block_until_ready(run(x))
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("loop"):
        jax.block_until_ready(run(x))
    found = profiler.profile()
    busy = found.busy_seconds
    assert busy is not None
    # A few run side by side; where the ends were those of the marks it was half as much again.
    assert busy <= sum(one.seconds for one in found.operations) * 1.001 <= 1.25 * busy


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),  # operation
            st.integers(0, 3),  # device
            st.integers(0, 1000),  # begins
            st.integers(0, 50),  # its span
            st.none() | st.integers(0, 500),  # how much later the mark of its end stands
        ),
        max_size=30,
    )
)
def test_operations_end_where_their_marks_stand(some: list[tuple[int, int, int, int, int | None]]):
    """Against intervals, one by one; and their union, against single picoseconds."""
    rows = np.zeros(len(some), events_module._ROW)
    marks = []
    for place, (op, device, begins, span, later) in enumerate(some):
        rows[place] = (begins, span, 7, 0, place + 1, 0, 0, op, device)
        if later is not None:
            marks.append((begins + later, place + 1, op, -1))
    longer = trace_module._end(rows, np.array(marks, events_module._MARK), step=4)
    lengths = [max(span, later or 0) for *_, span, later in some]
    assert rows["duration_ps"].tolist() == lengths
    assert longer.tolist() == sorted({op for op, _, _, span, later in some if (later or 0) > span})
    united = trace_module._united(rows, rows["op"], np.arange(len(rows)))
    expected = dict.fromkeys((op for op, *_ in some), 0)
    for op in expected:
        points = {
            (device, at)
            for (one, device, begins, *_), length in zip(some, lengths, strict=True)
            if one == op
            for at in range(begins, begins + length)
        }
        expected[op] = len(points)
    assert united == expected


TEN_MILLIONS = """
import json, sys, tempfile, threading, time
from pathlib import Path
import jax, jax.numpy as jnp
from capibara.observe.profile import TpuPerformanceProfiler
from capibara.observe.profile.trace import find_trace, read_trace

def held():  # without the file's pages, which the system may take back
    (line,) = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

with tempfile.TemporaryDirectory() as folder:
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 20_000, lambda i, h: jnp.sort(jnp.tanh(h @ h) + i), x))
    step(jnp.ones((4, 4))).block_until_ready()
    profiler = TpuPerformanceProfiler(trace_dir=folder)
    with profiler.profile_context("one"):
        step(jnp.ones((4, 4))).block_until_ready()
    profile = profiler.profile()
    # Messages one after the other are one that has the items of all.
    once, times = find_trace(folder).read_bytes(), -(-10_000_000 // profile.events)
    big = Path(folder) / "big.xplane.pb"
    with big.open("wb") as file:
        for _ in range(times):
            file.write(once)
    kinds = {one.name: one.kind for one in profile.operations}

    class Every(dict):
        def get(self, key, default=None):
            return kinds

    most, ended = [0], threading.Event()

    def watch():
        while not ended.wait(0.01):
            most[0] = max(most[0], held())

    thread = threading.Thread(target=watch)
    thread.start()
    spent = time.process_time()
    trace = read_trace(big, Every(), profile.wall_seconds)
    spent = time.process_time() - spent
    ended.set()
    thread.join()
print("RESULT" + json.dumps([profile.events * times, trace.events, spent, most[0]]))
"""


@pytest.mark.slow  # a file of a gigabyte
@pytest.mark.skipif(events_module._compiled() is None, reason="the native library is not built")
def test_ten_million_events():
    """In less than 30 s of the processor and 1.5 GB, with what JAX and the process itself take."""
    expected, seen, seconds, memory = run_apart(TEN_MILLIONS)
    print(f"{seen:,} operations in {seconds:.1f} s of the processor, {memory / 1e9:.2f} GB")
    assert seen == expected >= 10_000_000
    assert seconds < 30
    assert memory < 1.5e9
