"""The fuzzer runs, and finds nothing in a few seconds; ``make fuzz`` gives it minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fuzz_archive import Coverage, fuzz, read

from capibara.compress.container import Archive


def test_no_findings(tmp_path: Path) -> None:
    assert fuzz(seconds=6, seed=1, findings=tmp_path / "findings", most=400) == 0
    assert not (tmp_path / "findings").exists()


def test_findings_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Archive, "read", wrong)
    with pytest.raises(ZeroDivisionError):
        fuzz(seconds=1, seed=1, findings=tmp_path / "findings", most=10)


def test_new_lines_are_counted_once(tmp_path: Path) -> None:
    coverage = Coverage()
    assert coverage.new(lambda: read(tmp_path / "x", b"nothing")) > 0
    assert coverage.new(lambda: read(tmp_path / "x", b"nothing")) == 0
