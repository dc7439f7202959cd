"""Interleaved timing, with a clock that the test turns itself."""

from __future__ import annotations

import gc
import json

import jax.numpy as jnp
import pytest

from capibara.errors import CapibaraError
from capibara.measure import MeasureError, Row, Table, format_machine, interleaved, machine_description
from capibara.measure.memory import memory_snapshot
from capibara.measure.timing import _settle


class Clock:
    """Time that passes only when a function says so."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[str] = []

    def function(self, name: str, *durations: float):
        turns = iter(durations)
        last = durations[-1]

        def run():
            self.calls.append(name)
            self.now += next(turns, last)

        return run


def test_order_medians_and_ratios():
    clock = Clock()
    functions = {"a": clock.function("a", 9.0, 1.0, 2.0, 3.0), "b": clock.function("b", 9.0, 2.0, 4.0, 12.0)}
    table = interleaved(functions, rounds=3, warmup=1, clock=lambda: clock.now)
    # Warm-up first, then A B, B A, A B.
    assert "".join(clock.calls) == "ab" + "ab" + "ba" + "ab"
    assert table["a"].seconds == (1.0, 2.0, 3.0)
    assert table["b"].seconds == (2.0, 4.0, 12.0)
    assert (table["a"].median, table["a"].best) == (2.0, 1.0)
    assert table.ratio("b", "a") == 2.0  # the median of 2, 2, 4
    assert table.ratio("a", "a") == 1.0


def test_a_slow_spell_does_not_change_the_ratio():
    clock = Clock()
    drift = [1.0, 5.0, 1.0, 7.0, 1.0]
    functions = {
        "a": clock.function("a", *drift),
        "b": clock.function("b", *[3 * x for x in drift]),
    }
    table = interleaved(functions, rounds=5, warmup=0, clock=lambda: clock.now)
    assert table.ratio("b", "a") == pytest.approx(3.0)


def test_three_functions_rotate():
    clock = Clock()
    interleaved({n: clock.function(n, 1.0) for n in "abc"}, rounds=3, warmup=0, clock=lambda: clock.now)
    assert "".join(clock.calls) == "abc" + "bca" + "cab"


def test_spread():
    assert Row("a", (1.0,)).spread == 0.0
    assert Row("a", (2.0, 2.0, 2.0)).spread == 0.0
    assert Row("a", (1.0, 2.0, 3.0, 4.0, 5.0)).spread == pytest.approx(2 / 3)
    assert Row("a", (0.0, 0.0)).spread == 0.0


def test_the_table_prints_and_goes_to_json():
    clock = Clock()
    table = interleaved(
        {"one": clock.function("one", 2e-3), "two": clock.function("two", 5e-6)},
        rounds=4,
        warmup=0,
        clock=lambda: clock.now,
    )
    text = str(table)
    assert "2.000 ms" in text
    assert "5.000 us" in text
    assert "4 interleaved rounds" in text
    assert "cores of" in text
    again = json.loads(json.dumps(table.to_dict()))
    assert again["rounds"] == 4
    assert again["rows"]["two"]["ratio_to_one"] == pytest.approx(0.0025)
    assert "python" in again["machine"]["versions"]


def test_times_of_zero_do_not_divide():
    table = Table((Row("a", (0.0, 0.0)), Row("b", (1.0, 1.0))))
    assert table.ratio("b", "a") == float("inf")
    assert "0.0 ns" in str(table)


def test_jax_results_are_waited_for():
    table = interleaved({"x": lambda: {"y": jnp.ones(3) + 1, "z": "text"}}, rounds=2, warmup=1)
    assert len(table["x"].seconds) == 2
    assert all(t > 0 for t in table["x"].seconds)


def test_exceptions_of_the_function_come_through():
    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        interleaved({"a": broken}, rounds=1, warmup=0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"functions": {}}, "functions"),
        ({"functions": {"a": 3}}, "functions['a']"),
        ({"functions": {"a": int}, "rounds": 0}, "rounds"),
        ({"functions": {"a": int}, "rounds": 1.5}, "rounds"),
        ({"functions": {"a": int}, "rounds": True}, "rounds"),
        ({"functions": {"a": int}, "warmup": -1}, "warmup"),
    ],
)
def test_bad_arguments(arguments, expected):
    with pytest.raises(MeasureError) as caught:
        interleaved(**arguments)
    assert expected in str(caught.value)
    assert isinstance(caught.value, CapibaraError)
    assert isinstance(caught.value, ValueError)


def test_unknown_row():
    with pytest.raises(MeasureError, match="Did you mean 'alpha'"):
        Table((Row("alpha", (1.0,)),))["alpa"]


def test_machine_description():
    machine = machine_description()
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert {"python", "jax", "jaxlib", "numpy"} <= set(machine["versions"])
    assert machine["devices"]
    json.dumps(machine)
    line = format_machine(machine)
    assert machine["cpu"] in line
    assert "\n" not in line
    assert "devices" not in machine_description(devices=False)


def test_memory_snapshot():
    gc.collect()  # arrays of earlier tests must not vanish in between
    before = memory_snapshot()
    array = jnp.zeros((64, 64), jnp.float32).block_until_ready()
    after = memory_snapshot()
    assert after.live_arrays - before.live_arrays == array.nbytes
    assert after.host_peak is not None
    assert after.host_peak > 1_000_000
    assert "live arrays" in str(after)


class _Processor:
    """Time, and a second thread that runs until some moment; it is counted by ticks, as systems do."""

    def __init__(self, until: float) -> None:
        self.now, self.until = 0.0, until

    def perf_counter(self) -> float:
        self.now += 1e-4
        return self.now

    def thread_time(self) -> float:
        return self.now

    def process_time(self) -> float:
        tick = 0.004
        return self.now + min(self.now, self.until) // tick * tick


@pytest.mark.parametrize(
    ("until", "least", "most"), [(0.0, 0.01, 0.011), (0.03, 0.03, 0.051), (9.0, 0.1, 0.111)]
)
def test_threads_that_still_run_are_waited_for_but_not_forever(monkeypatch, until, least, most):
    processor = _Processor(until)
    monkeypatch.setattr("capibara.measure.timing.time", processor)
    _settle()
    assert least <= processor.now <= most


def test_every_timed_call_begins_when_the_threads_rest(monkeypatch):
    order = []
    monkeypatch.setattr("capibara.measure.timing._settle", lambda: order.append("settle"))
    interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, rounds=2, warmup=1)
    assert order == ["a", "b", "settle", "a", "settle", "b", "settle", "b", "settle", "a"]
