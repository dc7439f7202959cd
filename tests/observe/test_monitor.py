"""The monitor: what it reads, alerts against a plain count, sinks that break, and a day of simulated time."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import tracemalloc
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import run_apart

from capibara.observe import monitor as monitor_package
from capibara.observe.monitor import (
    METRICS,
    Alert,
    AlertRule,
    CallbackSink,
    JsonLinesSink,
    LogSink,
    MachineSource,
    MonitorError,
    PrometheusSink,
    Reading,
    TpuRealTimeMonitor,
)


class Trace:
    """A source that plays values of one metric, one a second."""

    def __init__(self, values: Sequence[float | None], metric: str = "memory_usage") -> None:
        self.values, self.metric, self.at = values, metric, 0

    def read(self) -> Reading:
        value = self.values[self.at % len(self.values)]
        self.at += 1
        return Reading(float(self.at), {self.metric: value})


def played(values: Sequence[float | None], rule: AlertRule) -> TpuRealTimeMonitor:
    monitor = TpuRealTimeMonitor(rules=[rule], source=Trace(values, rule.metric))
    for _ in values:
        monitor.update()
    return monitor


def test_what_this_machine_reports():
    x = jnp.ones(1_000_000)
    x.block_until_ready()
    monitor = TpuRealTimeMonitor()
    before = monitor.get_current_metrics()
    assert set(METRICS) < set(before)
    live = sum(array.nbytes for array in jax.live_arrays())
    assert before["live_array_bytes"] == pytest.approx(live, abs=1_000_000)
    meminfo = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE))
    total, free = int(meminfo["MemTotal"]), int(meminfo["MemAvailable"])
    assert before["host_memory_usage"] == pytest.approx(1 - free / total, abs=0.05)
    status = dict(re.findall(r"^(\w+):\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE))
    resident = int(status["VmRSS"]) * 1024
    assert before["process_memory_bytes"] == pytest.approx(resident, rel=0.1)
    for name in METRICS:
        assert (before[name] is None) == (name in before["reasons"])


def test_an_allocation_is_seen():
    source = MachineSource(clock=iter(range(0, 1000, 10)).__next__)
    before = source.read().values["live_array_bytes"]
    x = jnp.ones(5_000_000).block_until_ready()
    after = source.read().values["live_array_bytes"]
    assert before is not None
    assert after is not None
    assert after - before == x.nbytes


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


@given(
    st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=60),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.booleans(),
)
@settings(max_examples=300, deadline=None)
def test_an_alert_is_due_once_an_event(values: list[float | None], lasts: float, below: bool):
    rule = AlertRule("memory_usage", 0.5, below=below, for_seconds=lasts)
    # The same, counted plainly: a list of (begin, end).
    events, beyond_since, begun = [], None, None
    for at, value in enumerate(values, start=1):
        if value is None:
            continue
        beyond = value < 0.5 if below else value > 0.5
        well = value >= 0.525 if below else value <= 0.475
        if begun is not None:
            if well:
                events.append((begun, at))
                begun = beyond_since = None
            continue
        beyond_since = (at if beyond_since is None else beyond_since) if beyond else None
        if beyond_since is not None and at - beyond_since >= lasts:
            begun = at
    monitor = played(values, rule)
    assert [(a.began, a.ended) for a in monitor.history if a.ended is not None] == events
    assert [alert.began for alert in monitor.get_alerts()] == ([] if begun is None else [begun])
    assert monitor.has_alerts() == (begun is not None)


def test_the_documented_thresholds():
    monitor = TpuRealTimeMonitor(
        100,
        {"memory_usage": 0.9, "temperature": 80.0, "utilization": 0.3},
        source=Trace([0.1], "utilization"),
    )
    for _ in range(10):
        monitor.update()
    assert not monitor.has_alerts()  # a program begins by compiling
    monitor.update()
    (alert,) = monitor.get_alerts()
    assert str(alert) == "utilization 10.0 % < 30.0 % for 10.0 s"


def test_a_day_does_not_grow_memory():
    monitor = TpuRealTimeMonitor(
        rules=[AlertRule("memory_usage", 0.5)], source=Trace([0.1] * 50 + [0.9] * 50)
    )
    for _ in range(20_000):
        monitor.update()
    tracemalloc.start()
    try:
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(66_400):  # with those before, a reading a second for 24 hours
            monitor.update()
        grown = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
    assert len(monitor.history) == 1000
    assert grown < 400_000  # the alerts that are kept, made anew


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
        with TpuRealTimeMonitor(10, rules=[AlertRule("memory_usage", 0.0)], sinks=sinks) as monitor:
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
    monitor = TpuRealTimeMonitor(
        rules=[AlertRule("memory_usage", 0.5, for_seconds=0)],
        source=Trace([0.1, 0.9, 0.9, 0.1]),
        sinks=[JsonLinesSink(path, most_bytes=4096)],
    )
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


def test_prometheus_and_its_rules():
    import prometheus_client

    sink = PrometheusSink()
    monitor = TpuRealTimeMonitor(
        rules=[AlertRule("memory_usage", 0.5, for_seconds=0)], source=Trace([0.75, 0.25]), sinks=[sink]
    )
    monitor.update()
    text = prometheus_client.generate_latest(sink.registry).decode()
    assert "capibara_memory_usage 0.75" in text
    assert 'capibara_alert{metric="memory_usage"} 1.0' in text
    assert "capibara_temperature NaN" in text
    monitor.update()
    text = prometheus_client.generate_latest(sink.registry).decode()
    assert 'capibara_alert{metric="memory_usage"} 0.0' in text
    shipped = resources.files(monitor_package).joinpath("prometheus_alerts.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"\bcapibara_\w+", shipped))
    assert named
    assert named <= set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    assert len(re.findall(r"^ +- alert: ", shipped, re.MULTILINE)) == len(
        re.findall(r"^ +expr: ", shipped, re.MULTILINE)
    )


WRONG: dict[str, Any] = {"text": "fast", "list": [1], "rule": "memory_usage>1"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: TpuRealTimeMonitor(1), "update_frequency_ms: got 1, expected milliseconds, at least 10"),
        (lambda: TpuRealTimeMonitor(WRONG["text"]), "update_frequency_ms: got 'fast'"),
        (lambda: TpuRealTimeMonitor(alert_thresholds=WRONG["list"]), r"alert_thresholds: got \[1\]"),
        (lambda: TpuRealTimeMonitor(alert_thresholds={"memory": 0.9}), "metric: got 'memory'"),
        (lambda: TpuRealTimeMonitor(alert_thresholds={"memory_usage": 90}), "expected a share from 0 to 1"),
        (lambda: TpuRealTimeMonitor(alert_thresholds={"temperature": float("nan")}), "bound: got nan"),
        (lambda: TpuRealTimeMonitor(rules=[WRONG["rule"]]), "expected an AlertRule"),
        (lambda: AlertRule("temperature", 80, clears_at=90), "clears_at: got 90, expected a number below"),
        (lambda: AlertRule("temperature", 80, for_seconds=-1), "for_seconds: got -1"),
        (lambda: JsonLinesSink("x", most_bytes=1), "most_bytes: got 1"),
    ],
)
def test_bad_input(make: Any, words: str):
    with pytest.raises(MonitorError, match=words):
        make()


def test_alerts_print_well():
    rule = AlertRule("temperature", 80.0)
    assert str(Alert(rule, 91.5, since=10.0, began=12.0)) == "temperature 91.5 °C > 80.0 °C for 2.0 s"
    assert str(Alert(rule, 91.5, since=10.0, began=12.0, ended=15.5)).endswith("well again after 3.5 s")
