"""The monitor keeps what it is told, says nothing of what it was not, and raises alerts at its thresholds."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.compress.errors import CompressError
from capibara.compress.system.monitor import Alert, MetricType, PipelineType, UnifiedPerformanceMonitor


def test_the_documented_metrics() -> None:
    assert {"JAX_COMPILATION", "JAX_CACHE_HITS", "JAX_MEMORY_POOL"} <= set(MetricType.__members__)
    assert "JAX" in PipelineType.__members__


def test_nothing_recorded_is_no_figure() -> None:
    monitor = UnifiedPerformanceMonitor()
    assert all(monitor.latest(metric) is None for metric in MetricType)
    assert monitor.statistics("throughput", "jax") is None
    assert monitor.report()["metrics"] == {}


@settings(deadline=None, max_examples=50)
@given(values=st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=60), keep=st.integers(1, 20))
def test_statistics(values: list[float], keep: int) -> None:
    monitor = UnifiedPerformanceMonitor(keep=keep)
    for value in values:
        monitor.record(MetricType.THROUGHPUT, value, PipelineType.NATIVE)
    found = monitor.statistics("throughput", "native")
    assert found is not None
    assert (found.count, found.last) == (len(values), values[-1])
    assert (found.minimum, found.maximum) == (min(values), max(values))
    np.testing.assert_allclose(found.mean, np.mean(values), rtol=1e-9, atol=1e-3)
    np.testing.assert_allclose(found.median, np.median(values[-keep:]))
    np.testing.assert_allclose(found.p95, np.percentile(values[-keep:], 95))


def test_pipelines_apart_and_together() -> None:
    monitor = UnifiedPerformanceMonitor()
    monitor.record("compression_ratio", 2, "jax")
    monitor.record("COMPRESSION_RATIO", 4, "numpy")
    together, apart = monitor.statistics("compression_ratio"), monitor.statistics("compression_ratio", "jax")
    assert together is not None
    assert apart is not None
    assert (together.count, together.mean, apart.count, apart.mean) == (2, 3, 1, 2)


def test_the_last_value_is_the_one_that_was_recorded_last() -> None:
    monitor = UnifiedPerformanceMonitor(keep=2)
    for value, pipeline in ((1, "jax"), (2, "numpy"), (3, "jax")):
        monitor.record("throughput", value, pipeline)
        together = monitor.statistics("throughput")
        assert together is not None
        assert together.last == monitor.latest("throughput") == value
    apart = monitor.statistics("throughput", "numpy")
    assert apart is not None
    assert apart.last == 2
    with pytest.raises(CompressError, match="metric: got 'thruput'"):
        monitor.latest("thruput")


def test_an_exception_of_the_users_function_stops_nothing() -> None:
    def fail(alert: Alert) -> None:
        raise KeyError(alert.value)

    monitor = UnifiedPerformanceMonitor(on_alert=fail)
    monitor.set_threshold("throughput", 1)
    monitor.set_threshold("throughput", 9, above=False)
    with pytest.warns(RuntimeWarning, match=r"on_alert: .*fail raised KeyError: 5.*throughput") as heard:
        monitor.record("throughput", 5)
    assert len(heard) == len(monitor.alerts) == 2  # of both thresholds
    assert Path(heard[0].filename).name == Path(__file__).name
    assert monitor.latest("throughput") == 5


def test_thresholds_and_alerts() -> None:
    heard: list[Alert] = []
    monitor = UnifiedPerformanceMonitor(on_alert=heard.append, most_alerts=2)
    monitor.set_threshold(MetricType.JAX_COMPILATION, 100)
    monitor.set_threshold(MetricType.JAX_CACHE_HITS, 0.5, above=False, after=2)
    for value in (100, 100.5):
        monitor.record(MetricType.JAX_COMPILATION, value, PipelineType.JAX)
    for rate in (0, 0, 0.5, 0.4):
        monitor.record(MetricType.JAX_CACHE_HITS, rate, PipelineType.JAX)
    assert [(a.metric, a.value, a.limit) for a in heard] == [
        (MetricType.JAX_COMPILATION, 100.5, 100),
        (MetricType.JAX_CACHE_HITS, 0.4, 0.5),
    ]
    assert monitor.alerts == tuple(heard)
    assert "jax_compilation_cache_size" in heard[1].remedy
    monitor.record(MetricType.JAX_COMPILATION, 200)
    assert len(heard) == 3
    assert monitor.alerts == tuple(heard[1:])  # two are kept
    monitor.remove_threshold("jax_compilation")
    monitor.clear_alerts()
    monitor.record(MetricType.JAX_COMPILATION, 200)
    assert monitor.alerts == ()


def test_track_records_what_went_well() -> None:
    monitor = UnifiedPerformanceMonitor()
    with monitor.track(MetricType.COMPRESSION_TIME, PipelineType.TORCH):
        pass
    with pytest.raises(KeyError), monitor.track(MetricType.COMPRESSION_TIME, PipelineType.TORCH):
        raise KeyError
    found = monitor.statistics(MetricType.COMPRESSION_TIME, PipelineType.TORCH)
    assert found is not None
    assert found.count == 1
    assert found.last >= 0


def test_a_report_is_json_with_what_sources_say(tmp_path: Path) -> None:
    monitor = UnifiedPerformanceMonitor()
    monitor.set_threshold(MetricType.RELATIVE_ERROR, 0.1)
    monitor.record(MetricType.RELATIVE_ERROR, 0.2)
    monitor.attach("more", lambda: {"answer": 42})
    monitor.save(tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["metrics"]["relative_error"]["system"]["last"] == 0.2
    assert report["alerts"][0]["limit"] == 0.1
    assert report["more"] == {"answer": 42}
    monitor.detach("more")
    assert "more" not in monitor.report()


def test_several_threads() -> None:
    monitor = UnifiedPerformanceMonitor()

    def work() -> None:
        for i in range(500):
            monitor.record(MetricType.THROUGHPUT, i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = monitor.statistics(MetricType.THROUGHPUT)
    assert found is not None
    assert (found.count, found.total) == (2000, 4 * sum(range(500)))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: m.record("jax_cash_hits", 1), "Did you mean 'jax_cache_hits'"),
        (lambda m: m.record(MetricType.THROUGHPUT, float("nan")), "value: got nan"),
        (lambda m: m.record(MetricType.THROUGHPUT, "much"), "value: got 'much'"),
        (lambda m: m.record(MetricType.THROUGHPUT, 1, "cuda"), "pipeline: got 'cuda'"),
        (lambda m: m.set_threshold("throughput", True), "limit: got True"),
        (lambda m: m.set_threshold("throughput", float("inf")), "limit: got inf, expected a finite number"),
        (lambda m: m.set_threshold("throughput", -float("inf"), above=False), "limit: got -inf"),
        (lambda m: m.set_threshold("throughput", float("nan")), "limit: got nan"),
        (lambda m: m.set_threshold("throughput", 10**400), "limit: got 1000"),
        (lambda m: m.record(MetricType.THROUGHPUT, 10**400), "value: got 1000"),
        (lambda m: m.set_threshold("throughput", 1, after=-1), "after: got -1"),
        (lambda m: m.statistics(3), "metric: got 3"),
        (lambda m: UnifiedPerformanceMonitor(keep=0), "keep: got 0"),
    ],
)
def test_bad_arguments(call: Any, words: str) -> None:
    with pytest.raises(CompressError, match=words.replace("(", r"\(")):
        call(UnifiedPerformanceMonitor())
