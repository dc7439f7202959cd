"""``capibara health``: what it prints, as tables and as JSON, and its exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import jax
import pytest
from emulation import emulated

from capibara.cli import main
from capibara.observe import diagnostics
from capibara.observe.health import (
    AxisHealth,
    DeviceHealth,
    HealthReport,
    MemoryHealth,
    ProductHealth,
    Temperature,
    check_health,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A check of little memory."""
    monkeypatch.setattr(
        diagnostics, "check_health", lambda **given: check_health(**{**given, "memory_limit_bytes": 2**18})
    )


def test_tables_and_exit_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["health", "--quick"]) == 0
    shown = capsys.readouterr()
    assert "Nothing failed" in shown.out
    assert "all_chips_online" in shown.out
    assert str(jax.devices()[0]) in shown.out
    assert "10 exact" in shown.out
    assert "\x1b[" not in shown.out
    assert shown.err == ""


def test_rates_in_the_units_of_their_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    device = DeviceHealth(
        id=0,
        name="tpu:0",
        kind="TPU v4",
        platform="tpu",
        process=0,
        online=True,
        seconds=0.25,
        products=ProductHealth(10, rates={"bfloat16": 220e12, "float32": 30e12}),
        memory=MemoryHealth(2**30, bandwidth=600e9),
        temperature=Temperature(True, 61.0),
        peak_flops={"bfloat16": 275e12},
        peak_bandwidth=1200e9,
    )
    axis = AxisHealth("x", 4, 2**24, True, (), True, (), 80e9, 40e9, 50e9)
    report = HealthReport({}, {}, devices=(device,), axes=(axis,))
    monkeypatch.setattr(diagnostics, "check_health", lambda **given: report)
    assert main(["health"]) == 0
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "tpu:0 250 ms 10 exact 220 (80 %) 30 1.00 GiB 600 (50 %) 61" in rows
    assert "x 4 exact 80 exact 40 (80 %)" in rows


def test_json_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["health", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is True
    assert len(report["devices"]) == len(jax.devices())


def test_a_missing_device_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    expected = len(jax.devices()) + 1
    assert main(["health", "--quick", "--expected", str(expected)]) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out
    assert f"all_chips_online: devices: 1 missing: JAX lists {expected - 1}, {expected} expected" in out
    assert "1 fault (" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--memory-fraction", "2"], "memory_fraction: got 2.0"),
        (["--expected", "0"], "expected_devices: got 0"),
        (["--timeout", "-1"], "timeout: got -1.0"),
        (["--timeout", "1e10"], "timeout: got 10000000000.0, expected a number above 0 and at most 86,400"),
        (["--expected", "many"], "invalid int value: 'many'"),
    ],
)
def test_invalid_arguments(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["health", *arguments]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.out == ""


HANGS = """
import sys, threading
import jax
from capibara.cli import main
from capibara.observe.health import DeviceWork
from capibara.observe.health.deadline import Task

class Short(Task):
    def wait(self, seconds):
        return super().wait(0.2)

def start(self, name, device, function):
    if device is not None and device.id == 1:
        return Short(threading.Event().wait, name)
    return Task(function, name)

DeviceWork.start = start
sys.exit(main(["health", "--quick"]))
"""


def test_the_command_ends_when_a_device_hangs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HANGS],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(2), "COLUMNS": "200"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "cpu:1: does not answer: a small computation did not finish" in done.stdout
    assert "1 fault (" in done.stdout


BUSY = """
import sys, threading
import jax
from capibara.cli import main
from capibara.observe.health import DeviceWork

mistaken, computing = "mistaken" in sys.argv, threading.Event()
loop = jax.jit(lambda x: jax.lax.while_loop(lambda n: n[0] < 3_000_000, lambda n: (n[0] + 1, n[1] + x), (0, x)))

def answer(self, array):
    if next(iter(array.devices())).id == 0:
        computing.wait()
        if mistaken:
            raise TypeError("a mistake")
        return array.sum()
    jax.block_until_ready(loop(1.0))  # compiled now
    print("busy", flush=True)
    computing.set()
    for _ in range(20):
        jax.block_until_ready(loop(1.0))
    return array.sum()

DeviceWork.answer = answer
sys.argv = ["capibara", "health", "--quick"]
sys.exit(main())
"""


def start_busy(*words: str) -> subprocess.Popen[str]:
    """The command with two devices, on one of which a thread is inside JAX for seconds."""
    return subprocess.Popen(
        [sys.executable, "-c", BUSY, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(2)},
    )


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGINT, 130, "capibara: interrupted\n"), (signal.SIGTERM, 143, "capibara: terminated\n")],
)
def test_a_signal_ends_the_command_while_a_device_computes(number: int, code: int, words: str) -> None:
    with start_busy() as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (code, words)


def test_an_error_of_our_own_ends_the_command_while_a_device_computes() -> None:
    with start_busy("mistaken") as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 1, errors
    assert errors.endswith("TypeError: a mistake\n")


def test_several_processes_report_together() -> None:
    command = [sys.executable, "-m", "capibara"]
    done = subprocess.run(
        [*command, "launch", "-n", "2", "--devices", "2", "--", *command, "health", "--quick", "--json"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [line[4:] for line in done.stdout.splitlines() if line.startswith("[0] ")]
    report = json.loads("\n".join(lines[lines.index("{") :]))
    assert report["healthy"] is True
    assert [device["process"] for device in report["devices"]] == [0, 0, 1, 1]
    assert {axis["permute"] for axis in report["axes"]} == {True}
