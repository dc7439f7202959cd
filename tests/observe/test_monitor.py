"""The monitor: what it reads, alerts against a plain count, sinks that break, and a day of simulated time."""

from __future__ import annotations

import json
import logging
import math
import re
import sys
import threading
import time
import tracemalloc
import urllib.request
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import run_apart
from vendor_libraries import FakeDevice, FakeNvml, libtpu, pci

from capibara.hardware import telemetry
from capibara.observe import monitor as monitor_package
from capibara.observe.monitor import (
    DEFAULT_THRESHOLDS,
    METRICS,
    Alert,
    AlertRule,
    CallbackSink,
    DeviceReading,
    JsonLinesSink,
    LogSink,
    MachineSource,
    MonitorError,
    PrometheusSink,
    Reading,
    Sink,
    TpuRealTimeMonitor,
    sources,
)
from capibara.observe.monitor.monitor import next_due


class Trace:
    """A source that plays values of one metric, one a second; also the clock."""

    def __init__(self, values: Sequence[float | None], metric: str = "memory_usage") -> None:
        self.values, self.metric, self.at = values, metric, 0

    def read(self) -> Reading:
        value = self.values[self.at % len(self.values)]
        self.at += 1
        return Reading(float(self.at), {self.metric: value})

    def clock(self) -> float:
        return float(self.at)


def watching(trace: Trace, *rules: AlertRule, sinks: Sequence[Sink] = ()) -> TpuRealTimeMonitor:
    return TpuRealTimeMonitor(100, {}, rules=rules, sinks=sinks, source=trace, clock=trace.clock)


def played(values: Sequence[float | None], rule: AlertRule) -> TpuRealTimeMonitor:
    monitor = watching(Trace(values, rule.metric), rule)
    for _ in values:
        monitor.update()
    return monitor


def test_what_this_machine_reports():
    x = jnp.ones(1_000_000)
    x.block_until_ready()
    monitor = TpuRealTimeMonitor()
    before = monitor.get_current_metrics()
    assert set(METRICS) < set(before)
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    live = {
        shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards
    }  # several arrays may share a buffer
    assert before["live_array_bytes"] == pytest.approx(sum(live.values()), abs=1_000_000)
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = int(meminfo["MemTotal"]), int(meminfo["MemAvailable"])
    assert before["host_memory_usage"] == pytest.approx(1 - free / total, abs=0.05)
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE))
    resident = int(status["VmRSS"]) * 1024
    assert before["process_memory_bytes"] == pytest.approx(resident, rel=0.1)
    for name in METRICS:
        assert (before[name] is None) == (name in before["reasons"])


def test_an_allocation_is_seen():
    source = MachineSource(clock=iter(range(0, 10_000, 1000)).__next__)
    before = source.read().values["live_array_bytes"]
    x = jnp.ones(5_000_000).block_until_ready()
    after = source.read().values["live_array_bytes"]
    assert before is not None
    assert after is not None
    assert after - before == x.nbytes


def test_memory_of_the_host_is_seen():
    source = MachineSource(clock=iter(range(0, 10_000, 1000)).__next__)
    before = source.read().values["process_memory_bytes"]
    planted = np.ones(100_000_000, np.uint8)
    after = source.read().values["process_memory_bytes"]
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(planted.nbytes, rel=0.1)


def test_cpus_against_counts_of_the_system(monkeypatch: pytest.MonkeyPatch):
    seconds = iter(range(100))
    own = iter([1.0, 2.5])
    monkeypatch.setattr(time, "process_time", own.__next__)
    # user nice system idle iowait irq softirq steal guest: between them 30 of 100 ticks of work.
    stats = iter(
        ["cpu 100 0 50 800 50 0 0 0 40", "cpu 100 0 50 800 50 0 0 0 40", "cpu 120 0 60 860 60 0 0 0 55"]
    )
    monkeypatch.setattr(sources, "cpu_times", lambda: telemetry.cpu_times(next(stats)))
    source = MachineSource(clock=lambda: float(next(seconds)))
    first, second = source.read(), source.read()
    assert (first.values["host_cpu"], first.values["process_cpu"]) == (None, None)
    assert {"host_cpu", "process_cpu"} <= set(first.reasons)
    assert second.values["host_cpu"] == pytest.approx(0.3)
    assert second.values["process_cpu"] == 1.5  # seconds of the CPU in one second


APART = """
import json
from capibara.observe.monitor import TpuRealTimeMonitor
monitor = TpuRealTimeMonitor()
metrics = monitor.get_current_metrics()
print("RESULT", json.dumps([metrics["live_array_bytes"], metrics["reasons"]["live_array_bytes"]]))
"""


def test_jax_is_not_started():
    live, reason = run_apart(APART)
    assert live is None
    assert "has not started" in reason


def events(
    values: list[float | None], lasts: float, clears: float, below: bool
) -> tuple[list[tuple[float, float]], float | None]:
    """Begin and end of each event, and the begin of one that lasts, counted plainly with a value a second.

    A run of seconds in which the metric is beyond (or well again) is looked for backwards from each second.
    """

    def run(at: int, good: Callable[[float], bool], first: int) -> float | None:
        if (value := values[at]) is None or not good(value):
            return None
        begin = at
        while begin > first and (before := values[begin - 1]) is not None and good(before):
            begin -= 1
        return at - begin

    done: list[tuple[float, float]] = []
    begun, first = None, 0
    for at in range(len(values)):
        if begun is None:
            length = run(at, lambda v: v < 0.5 if below else v > 0.5, first)
            if length is not None and length >= lasts:
                begun, first = at + 1.0, at + 1
        else:
            length = run(at, lambda v: v >= 0.525 if below else v <= 0.475, first)
            if length is not None and length >= clears:
                done.append((begun, at + 1.0))
                begun, first = None, at + 1
    return done, begun


@given(
    st.lists(
        st.one_of(st.none(), st.floats(0, 1), st.sampled_from([0.475, 0.5, 0.525])), min_size=1, max_size=60
    ),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([0.0, 1.0, 2.0]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_an_alert_is_due_once_an_event(values: list[float | None], lasts: float, clears: float, below: bool):
    rule = AlertRule("memory_usage", 0.5, below=below, for_seconds=lasts, clear_seconds=clears)
    done, begun = events(values, lasts, clears, below)
    monitor = played(values, rule)
    assert [(a.began, a.ended) for a in monitor.history if a.ended is not None] == done
    assert [alert.began for alert in monitor.get_alerts()] == ([] if begun is None else [begun])
    assert len(monitor.history) == 2 * len(done) + (begun is not None)
    assert monitor.has_alerts() == (begun is not None)


@pytest.mark.parametrize("below", [False, True])
@pytest.mark.parametrize("bound", [0.0, 0.01, 0.98, 1.0])
def test_an_alert_on_a_share_can_end(bound: float, below: bool):
    rule = AlertRule("utilization", bound, below=below)
    assert rule.well(1.0 if below else 0.0)


def test_a_bound_below_zero():
    rule = AlertRule("temperature", -5.0, for_seconds=0.0)
    assert len(played([-4.0, -5.1, -6.0], rule).history) == 2  # -5.1 °C is not yet well


def test_the_time_of_day_does_not_count():
    trace = Trace([0.95, 0.95])
    monitor = TpuRealTimeMonitor(100, {"memory_usage": 0.9}, source=trace, clock=lambda: 7.0)
    for _ in range(100):  # seconds of the day, in which no time went by
        monitor.update()
    assert not monitor.has_alerts()


def test_time_without_a_value_does_not_count():
    rule = AlertRule("memory_usage", 0.9, for_seconds=5.0)
    assert not played([0.95, *[None] * 3600, 0.95], rule).history


def test_when_readings_are_due():
    due, asked = 0.0, []
    for late in (0.0, 0.03, 0.0, 0.25, 0.0, 1.0, 0.0):
        due = next_due(due, due + late, 0.1)
        asked.append(round(due, 6))
    # Missed ones are left out, and the others stay where they were.
    assert asked == [0.1, 0.2, 0.3, 0.6, 0.7, 1.7, 1.8]


def test_the_documented_thresholds():
    trace = Trace([0.1], "utilization")
    monitor = TpuRealTimeMonitor(source=trace, clock=trace.clock)
    for _ in range(10):
        monitor.update()
    assert not monitor.has_alerts()  # a program begins by compiling
    monitor.update()
    (alert,) = monitor.get_alerts()
    assert str(alert) == "utilization 10.0 % < 30.0 % for 10.0 s"
    assert not TpuRealTimeMonitor(100, None, source=trace)._states
    assert DEFAULT_THRESHOLDS == {"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3}


def test_a_day_does_not_grow_memory():
    monitor = watching(Trace([0.1] * 50 + [0.9] * 50), AlertRule("memory_usage", 0.5))
    for _ in range(120_000):
        monitor.update()
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(66_400):
            monitor.update()
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    for _ in range(864_000 - 120_000 - 66_400):  # with those before, as many as in 24 hours at 100 ms
        monitor.update()
    assert len(monitor.history) == 1000
    assert grown < 400_000  # the alerts that are kept, made anew


@pytest.mark.slow  # seconds of the processor
def test_watching_takes_a_hundredth_of_a_core(tmp_path: Path):
    """Ten readings a second of this machine's own sensors, with the default rules and lines of JSON."""
    monitor = TpuRealTimeMonitor(100, sinks=[JsonLinesSink(tmp_path / "readings.jsonl")])
    for _ in range(20):  # the first ones import and start what is needed
        monitor.update()
    spent, began = time.thread_time(), time.perf_counter()
    for _ in range(100):
        monitor.update()
        time.sleep(0.1)
    assert time.thread_time() - spent <= 0.01 * (time.perf_counter() - began)


def test_the_thread(caplog: pytest.LogCaptureFixture):
    seen: list[Reading] = []
    enough = threading.Event()

    def take(reading: Reading) -> None:
        seen.append(reading)
        if len(seen) > 5:
            enough.set()

    def broken(reading: Reading) -> None:
        raise KeyError("mine")

    sinks = [CallbackSink(on_reading=broken), CallbackSink(on_reading=take), LogSink()]
    with caplog.at_level(logging.WARNING):
        with TpuRealTimeMonitor(10, {}, rules=[AlertRule("memory_usage", 0.0)], sinks=sinks) as monitor:
            monitor.start_monitoring()  # is on already
            assert enough.wait(30)
            names = [thread.name for thread in threading.enumerate()]
            assert names.count("capibara-monitor") == 1
        assert "capibara-monitor" not in [thread.name for thread in threading.enumerate()]
    assert monitor.problems == {"CallbackSink": "KeyError: 'mine'"}
    assert len([record for record in caplog.records if "mine" in record.getMessage()]) == 1
    times = [reading.time for reading in seen]
    assert times == sorted(times)


def test_a_source_that_breaks_and_comes_back():
    class Broken(Trace):
        def read(self) -> Reading:
            reading = super().read()
            if 1 < self.at < 4:
                raise OSError("no sensor")
            return reading

    source = Broken([0.5])
    with TpuRealTimeMonitor(10, source=source) as monitor:
        deadline = time.monotonic() + 30
        while source.at < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert monitor.problems == {"Broken": "OSError: no sensor"}
    assert monitor.get_current_metrics()["time"] >= 5


def test_lines_of_json(tmp_path: Path):
    path = tmp_path / "monitor.jsonl"
    rule = AlertRule("memory_usage", 0.5, for_seconds=0)
    monitor = watching(Trace([0.1, 0.9, 0.9, 0.1]), rule, sinks=[JsonLinesSink(path, most_bytes=4096)])
    for _ in range(4):
        monitor.update()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["reading", "reading", "alert", "reading", "reading", "alert"]
    assert lines[2]["ended"] is None
    assert lines[5]["ended"] == 4.0
    for _ in range(400):
        monitor.update()
    assert path.with_name("monitor.jsonl.1").stat().st_size < 4096 + 300
    assert len(list(tmp_path.iterdir())) <= 2


def test_numbers_that_json_lacks(tmp_path: Path):
    path = tmp_path / "monitor.jsonl"
    JsonLinesSink(path).reading(Reading(1.0, {"temperature": math.nan, "host_cpu": math.inf}))
    (line,) = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["temperature"] is None


def test_a_file_that_cannot_be_written(tmp_path: Path):
    with pytest.raises(OSError, match="No such file"):
        JsonLinesSink(tmp_path / "missing" / "x.jsonl")


def test_prometheus_and_its_rules():
    yaml = pytest.importorskip("yaml")
    sink = PrometheusSink()
    monitor = watching(Trace([0.75, 0.25]), AlertRule("memory_usage", 0.5, for_seconds=0), sinks=[sink])
    monitor.update()
    text = prometheus_client.generate_latest(sink.registry).decode()
    assert "capibara_memory_usage 0.75" in text
    assert 'capibara_alert{metric="memory_usage"} 1.0' in text
    assert "capibara_temperature NaN" in text
    monitor.update()
    text = prometheus_client.generate_latest(sink.registry).decode()
    assert 'capibara_alert{metric="memory_usage"} 0.0' in text
    shipped = resources.files(monitor_package).joinpath("prometheus_alerts.yml").read_text(encoding="utf-8")
    exported = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    document = yaml.safe_load(shipped)
    assert set(document) == {"groups"}
    names = []
    for group in document["groups"]:
        assert set(group) == {"name", "rules"}
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert re.fullmatch(r"\d+[smh]", rule.get("for", "1s"))
            assert set(rule["labels"]) == {"severity"}
            named = set(re.findall(r"\bcapibara_\w+", rule["expr"]))
            assert named
            assert named <= exported
            names.append(rule["alert"])
    assert len(set(names)) == len(names) >= 5


def test_prometheus_knows_each_device_and_every_rule_of_a_metric():
    sink = PrometheusSink()
    rules = [AlertRule("memory_usage", bound, for_seconds=0) for bound in (0.5, 0.8)]
    monitor = watching(Trace([0.9, 0.7, 0.1]), *rules, sinks=[sink])
    shown = []
    for _ in range(3):
        monitor.update()
        shown.append(sink.registry.get_sample_value("capibara_alert", {"metric": "memory_usage"}))
    assert shown == [1, 1, 0]  # with the second value one of the two lasts
    sink.reading(Reading(1.0, {}, devices=[DeviceReading("GPU_1", "X", 1, 4, None, 50.0)]))
    found = [
        sink.registry.get_sample_value(f"capibara_device_{name}", {"device": "GPU_1"})
        for name in ("memory_usage", "utilization", "temperature")
    ]
    assert found == [0.25, pytest.approx(math.nan, nan_ok=True), 50.0]


def test_prometheus_over_http():
    sink = PrometheusSink(0)
    watching(Trace([0.5]), sinks=[sink]).update()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{sink.port}/metrics", timeout=30) as answer:
            assert b"capibara_memory_usage 0.5" in answer.read()
        with pytest.raises(OSError):
            PrometheusSink(sink.port)
    finally:
        sink.close()
    assert sink.port is None
    sink.close()


def test_a_sink_that_breaks_still_gets_alerts():
    got: list[Alert] = []

    def broken(reading: Reading) -> None:
        raise KeyError("mine")

    sinks = [CallbackSink(), CallbackSink(got.append, broken)]
    monitor = watching(Trace([0.9]), AlertRule("memory_usage", 0.5, for_seconds=0), sinks=sinks)
    monitor.update()
    assert got == monitor.get_alerts()
    assert monitor.problems == {"CallbackSink 2": "KeyError: 'mine'"}


def test_a_sink_may_ask_and_stop_the_monitor():
    asked = threading.Event()

    def ask(reading: Reading) -> None:
        if threading.current_thread().name == "capibara-monitor":
            assert monitor.get_current_metrics()["memory_usage"] == 0.5
            monitor.stop_monitoring()
            asked.set()

    trace = Trace([0.5])
    monitor = TpuRealTimeMonitor(10, {}, sinks=[CallbackSink(on_reading=ask)], source=trace)
    monitor.start_monitoring()
    assert asked.wait(30)
    monitor.stop_monitoring()
    assert not monitor.problems


def test_a_source_that_never_works():
    class Broken:
        def read(self) -> Reading:
            raise OSError("gone")

    with TpuRealTimeMonitor(10, source=Broken()) as monitor:
        metrics = monitor.get_current_metrics()
    assert {metrics[name] for name in METRICS} == {None}
    assert set(metrics["reasons"].values()) == {"OSError: gone"}
    with pytest.raises(OSError, match="gone"):
        monitor.update()


WRONG: dict[str, Any] = {"text": "fast", "list": [1], "rule": "memory_usage>1"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TpuRealTimeMonitor(1), "update_frequency_ms: got 1, expected milliseconds, at least 10"),
        (lambda: TpuRealTimeMonitor(WRONG["text"]), "update_frequency_ms: got 'fast'"),
        (lambda: TpuRealTimeMonitor(alert_thresholds=WRONG["list"]), r"alert_thresholds: got \[1\]"),
        (
            lambda: TpuRealTimeMonitor(alert_thresholds={"memory": 0.9}),
            r"alert_thresholds\['memory'\]: metric: got",
        ),
        (lambda: TpuRealTimeMonitor(alert_thresholds={"memory_usage": 90}), "expected a share from 0 to 1"),
        (lambda: TpuRealTimeMonitor(alert_thresholds={"temperature": float("nan")}), "bound: got nan"),
        (lambda: TpuRealTimeMonitor(rules=[WRONG["rule"]]), "expected an AlertRule"),
        (lambda: AlertRule("temperature", 80, clears_at=90), "clears_at: got 90, expected a number below"),
        (lambda: AlertRule("temperature", 80, for_seconds=-1), "for_seconds: got -1"),
        (lambda: AlertRule("temperature", 80, clears_at=float("nan")), "clears_at: got nan"),
        (lambda: AlertRule("temperature", 80, clear_seconds=-1), "clear_seconds: got -1"),
        (lambda: AlertRule(WRONG["list"], 80), r"metric: got \[1\]"),
        (lambda: AlertRule("memory_usag", 0.9), "Did you mean 'memory_usage'"),
        (lambda: JsonLinesSink("x", most_bytes=1), "most_bytes: got 1"),
        (lambda: PrometheusSink(99999), "port: got 99999, expected an integer from 0 to 65535"),
    ],
)
def test_bad_input(make: Any, words: str):
    with pytest.raises(MonitorError, match=words):
        make()


def test_alerts_print_well():
    rule = AlertRule("temperature", 80.0)
    text = "temperature 91.5 °C > 80.0 °C for 2.0 s"
    assert str(Alert(rule, 91.5, since=10.0, began=12.0)) == text
    assert str(Alert(rule, 91.5, since=10.0, began=12.0, where="TPU_0")) == f"{text} on TPU_0"
    assert (
        str(Alert(AlertRule("process_cpu", 3.5), 4.0, 1.0, 3.0))
        == "process_cpu 4.00 cores > 3.50 cores for 2.0 s"
    )
    assert str(Alert(rule, 91.5, since=10.0, began=12.0, ended=15.5)).endswith("well again after 3.5 s")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def wide(root: Path) -> Reading:
    return MachineSource(machine_wide=True, root=root).read()


def test_gpus_of_the_machine(tmp_path: Path, nvml: FakeNvml):
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev" / name).touch()
    reading = wide(tmp_path)
    assert [(one.name, one.kind, one.memory_usage, one.temperature) for one in reading.devices] == [
        ("GPU_0", "NVIDIA B", 0.25, 50.0),
        ("GPU_1", "NVIDIA A", 0.5, 51.0),
    ]
    assert reading.devices[1].reasons == {"utilization": "RuntimeError: Not Supported"}
    values = reading.values
    assert (values["memory_usage"], values["utilization"], values["temperature"]) == (0.5, 0.4, 51.0)
    assert reading.where == {"memory_usage": "GPU_1", "temperature": "GPU_1"}
    assert values["process_memory_bytes"] is None
    assert reading.to_dict()["devices"]["GPU_1"]["memory_limit_bytes"] == 4 << 30
    rule = AlertRule("memory_usage", 0.4, for_seconds=0)
    source = MachineSource(machine_wide=True, root=tmp_path)
    monitor = TpuRealTimeMonitor(100, {}, rules=[rule], source=source)
    monitor.update()
    (alert,) = monitor.get_alerts()
    assert str(alert) == "memory_usage 50.0 % > 40.0 % for 0.0 s on GPU_1"


def test_the_library_is_started_once(tmp_path: Path, nvml: FakeNvml):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    source = MachineSource(machine_wide=True, root=tmp_path, clock=iter(range(0, 10_000, 1000)).__next__)
    for _ in range(5):
        assert len(source.read().devices) == 2
    assert nvml.started == 1


def test_gpus_without_their_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    reading = wide(tmp_path)
    (one,) = reading.devices
    assert (one.memory_usage, one.utilization, one.temperature) == (None, None, None)
    assert one.reasons["utilization"].endswith("pip install nvidia-ml-py")
    # Not the CPUs' figures instead.
    assert reading.values["utilization"] is None
    assert reading.reasons["memory_usage"] == one.reasons["memory_usage"]


def test_tpus_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Two chips of a v4, and a network card of the same vendor.
    pci(tmp_path, ("0x1ae0", "0x005e"), ("0x1ae0", "0x0042"), ("0x1ae0", "0x005e"), ("0x8086", "0x005e"))
    libtpu(
        monkeypatch,
        hbm_capacity_total=["33550229504", "33550229504"],
        hbm_capacity_usage=["0", "16775114752"],
        duty_cycle_pct=["0.00", "20.00"],
    )
    reading = wide(tmp_path)
    assert [(one.name, one.memory_usage, one.utilization) for one in reading.devices] == [
        ("TPU_0", 0.0, 0.0),
        ("TPU_1", 0.5, 0.2),
    ]
    assert (reading.values["memory_usage"], reading.values["utilization"]) == (0.5, 0.1)
    assert reading.where["memory_usage"] == "TPU_1"
    assert reading.reasons["temperature"] == "libtpu reports no temperature"


@pytest.mark.parametrize("data", [[], ["nan", "nan"], ["?"]])
def test_tpus_that_report_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: list[str]):
    pci(tmp_path, ("0x1ae0", "0x0062"))
    libtpu(monkeypatch, duty_cycle_pct=data, hbm_capacity_usage=data, hbm_capacity_total=data)
    reading = wide(tmp_path)
    assert [one.name for one in reading.devices] == ["TPU_0"]
    for metric in ("memory_usage", "utilization", "temperature"):
        assert reading.values[metric] is None
        assert reading.reasons[metric]


def test_libtpu_is_not_imported_without_a_tpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pci(tmp_path, ("0x1ae0", "0x0042"))
    monkeypatch.setitem(sys.modules, "libtpu.sdk", None)
    reading = wide(tmp_path)
    assert reading.devices == ()
    assert reading.values["memory_usage"] == reading.values["host_memory_usage"]
    assert "libtpu" not in json.dumps(reading.to_dict())


def test_accelerators_that_jax_has_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pci(tmp_path, ("0x1ae0", "0x005e"))
    monkeypatch.setattr(sources, "backends_started", lambda: False)
    reading = MachineSource(root=tmp_path).read()
    # The CPUs' figures are not those of the devices: low utilization of them is no alert.
    for metric in ("memory_usage", "utilization", "temperature"):
        assert reading.values[metric] is None
        assert "JAX has not started" in reading.reasons[metric]
    assert reading.values["host_memory_usage"] is not None


def test_tpus_of_jax(monkeypatch: pytest.MonkeyPatch):
    # Two devices on each chip.
    devices = [FakeDevice("tpu", number, "TPU v4", 10 * number) for number in range(4)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(sources, "live_array_bytes", lambda exact: 7)
    libtpu(monkeypatch, duty_cycle_pct=["0.00", "20.00"], tpu_throttle_score=["0-0", "1-0"])
    reading = MachineSource().read()
    assert [one.utilization for one in reading.devices] == [0.0, 0.0, 0.2, 0.2]
    assert (reading.values["memory_usage"], reading.where["memory_usage"]) == (0.3, "TPU_3")
    assert reading.values["temperature"] is None
    assert reading.reasons["temperature"].startswith("libtpu reports no temperature")
    assert reading.values["live_array_bytes"] == 7


@pytest.mark.parametrize(
    ("visible", "busy"), [("", 0.4), ("0", 0.4), ("1", None), ("GPU-first", 0.4), ("GPU-second", None)]
)
def test_gpus_of_jax(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, visible: str, busy: float | None):
    # Its first GPU is that which the program is allowed to see, not the machine's.
    monkeypatch.setattr(jax, "local_devices", lambda: [FakeDevice("gpu", 0, "NVIDIA B", 50)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    reading = MachineSource().read()
    assert reading.values["utilization"] == busy
    assert reading.where["memory_usage"] == "GPU_0"
    assert ("utilization" in reading.reasons) == (busy is None)


def test_a_runtime_that_breaks(monkeypatch: pytest.MonkeyPatch):
    def lost() -> Any:
        raise jax.errors.JaxRuntimeError("the device is lost")

    monkeypatch.setattr(jax, "local_devices", lost)
    reading = MachineSource().read()
    assert reading.values["memory_usage"] is None
    assert "the device is lost" in reading.reasons["utilization"]
    assert reading.values["host_memory_usage"] is not None


def test_what_takes_long_is_read_less_often(monkeypatch: pytest.MonkeyPatch):
    counted, spent = 0, [0.0]

    def count(exact: bool) -> int:
        nonlocal counted
        counted += 1
        spent[0] += 0.0625
        return counted

    monkeypatch.setattr(sources, "live_array_bytes", count)
    monkeypatch.setattr(time, "thread_time", lambda: spent[0])
    seconds = iter(range(1000))
    source = MachineSource(clock=lambda: float(next(seconds)))
    values = [source.read().values["live_array_bytes"] for _ in range(201)]
    # 1/16 s of the CPU: again after 31.25 s. The first one, which starts things, aside.
    assert [at for at in range(1, 201) if values[at] != values[at - 1]] == [1, 33, 65, 97, 129, 161, 193]
