"""``capibara monitor``: one reading, lines of JSON, alerts and exit codes."""

from __future__ import annotations

import argparse
import json
import socket
import time
import urllib.request
from pathlib import Path

import pytest

from capibara.cli import main, monitor
from capibara.hardware.accelerators import DeviceReading
from capibara.observe.monitor import MonitorError, sources


def call(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    monitor.add_arguments(parser)
    return monitor.run(parser.parse_args(arguments))


def test_one_reading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "160")
    assert call("--once") == 0
    text = capsys.readouterr().out
    assert "host_memory_usage" in text
    assert " %" in text
    assert call("--once", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 < found["host_memory_usage"] < 1
    assert found["alerts"] == []


def test_a_line_for_each_reading(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    slept = 0

    def sleep(seconds: float) -> None:
        nonlocal slept
        slept += 1
        if slept == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    assert call("--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 3
    # They are not those of the program that is watched.
    assert lines[0]["process_memory_bytes"] is None
    assert "not this process" in lines[0]["reasons"]["process_memory_bytes"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    one = DeviceReading("GPU_0", "NVIDIA [X]", 3 << 30, 4 << 30, None, 61.0, {"utilization": "Not Supported"})
    monkeypatch.setattr(sources, "machine_accelerators", lambda nvml, root: (one,))


def test_devices_of_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gpu: None
):
    monkeypatch.setenv("COLUMNS", "160")
    assert call("--once", "--alert", "memory_usage>0.7 for 0s") == 0
    text = capsys.readouterr().out
    for word in ("GPU_0", "NVIDIA [X]", "75.0 %", "61.0 °C", "not reported: Not Supported"):
        assert word in text
    assert "ALERT memory_usage 75.0 % > 70.0 % for 0.0 s on GPU_0" in text
    assert call("--once", "--json", "--alert", "memory_usage>0.7", "--fail-on-alert") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["GPU_0"]["temperature"] == 61.0
    assert found["alerts"] == ["memory_usage 75.0 % > 70.0 % for 0.0 s on GPU_0"]


def test_hotspots_of_a_mesh(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Four accelerators in two rows and two columns: the second column is loaded."""
    monkeypatch.setenv("COLUMNS", "160")
    devices = [
        DeviceReading(f"GPU_{number}", "X", 1, 4, 0.9 if number % 2 else 0.1, 50.0) for number in range(4)
    ]
    monkeypatch.setattr(sources, "machine_accelerators", lambda nvml, root: tuple(devices))
    assert call("--once", "--topology", "2x2") == 0
    text = capsys.readouterr().out
    for words in ("columns: the load differs", "hotspots    (0, 1), (1, 1)", "saves up to 44 %"):
        assert words in text
    options = ["--topology", "2x2", "--load-threshold", "0.95", "--json"]
    assert call("--once", *options) == 0
    found = json.loads(capsys.readouterr().out)["resharding"]
    assert (found["pattern"], found["hotspots"], found["spec"]) == ("columns", [], None)
    assert call("--duration", "0", *options) == 0
    assert json.loads(capsys.readouterr().out)["resharding"]["pattern"] == "columns"
    assert call("--duration", "0", "--topology", "4") == 0
    assert "unclear" in capsys.readouterr().out


def test_readings_and_alerts(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    kept = tmp_path / "readings.jsonl"
    options = ["--json", "--interval", "0.05", "--duration", "0.3", "--jsonl", str(kept)]
    assert call(*options, "--alert", "host_memory_usage > 0.0001 for 0s", "--fail-on-alert") == 1
    text = capsys.readouterr().out
    assert "host_memory_usage" in text
    kinds = [json.loads(line)["kind"] for line in kept.read_text().splitlines()]
    assert kinds[:2] == ["reading", "alert"]
    assert call(*options, "--alert", "host_memory_usage<0.00001", "--fail-on-alert") == 0


def test_the_live_view(capsys: pytest.CaptureFixture[str]):
    assert call("--duration", "0.4", "--interval", "0.1") == 0
    assert "capibara monitor" in capsys.readouterr().out


@pytest.mark.parametrize("rule", ["nonsense", "memory_usage", "memory_usage>x", "memory_usage>0.9 for long"])
def test_bad_rules(rule: str):
    with pytest.raises(MonitorError, match="--alert: got"):
        call("--alert", rule)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--interval", "0"], "--interval: got 0.0, expected seconds, at least 0.01"),
        (["--interval", "nan"], "--interval: got nan"),
        (["--duration", "-1"], "--duration: got -1.0"),
        (["--fail-on-alert"], "--fail-on-alert: got no rule"),
        (["--alert", "memory_usag>0.9"], "Did you mean 'memory_usage'?"),
        (["--alert", "memory_usage>90"], "expected a share from 0 to 1"),
        (["--alert", "process_cpu>1"], "expected a metric of the machine"),
        (["--jsonl", "/nonexistent/x.jsonl"], "--jsonl: cannot write '/nonexistent/x.jsonl': No such file"),
        (["--topology", "2y2"], "--topology: topology: got '2y2'"),
        (["--topology", "64x64"], "--topology: config: got the topology 64x64, which is 4096 devices, but"),
        (["--load-threshold", "80"], "--load-threshold: got 80.0, expected a share from 0 to 1"),
        (["--prometheus", "99999"], "--prometheus: port: got 99999"),
    ],
)
def test_invalid_input(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["monitor", "--once", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("capibara: ")


def test_a_port_that_is_taken(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert main(["monitor", "--once", "--prometheus", str(port)]) == 2
    assert f"--prometheus: cannot answer on port {port}: Address already in use" in capsys.readouterr().err


def test_prometheus(monkeypatch: pytest.MonkeyPatch):
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    def asked(*_: object) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            seen.append(answer.read())

    monkeypatch.setattr(monitor, "_print", asked)
    assert call("--once", "--prometheus", str(port)) == 0
    assert b"capibara_host_memory_usage 0." in seen[0]
    with pytest.raises(OSError):  # it is closed
        asked()


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupted)
    assert call("--json") == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert call("--json", "--alert", "host_memory_usage>0.0001", "--fail-on-alert") == 1
