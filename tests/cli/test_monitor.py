"""``capibara monitor``: one reading, lines of JSON, alerts and exit codes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from capibara.cli import monitor
from capibara.observe.monitor import MonitorError


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
