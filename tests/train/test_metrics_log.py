"""metrics.jsonl: exact, and consistent with the checkpoint a run resumes from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from capibara.train.errors import RunWriteError
from capibara.train.metrics import MetricsLog, read_losses, read_metrics
from capibara.train.plot import plot_losses


def train_line(step: int, losses: list[float]) -> dict:
    return {"kind": "train", "step": step, "losses": losses, "bits_per_byte": losses[-1]}


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
def test_losses_keep_every_bit(tmp_path_factory: pytest.TempPathFactory, losses: list[float]) -> None:
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(train_line(len(losses), [float(np.float32(loss)) for loss in losses]))
    read = read_losses(path)
    assert [read[step].hex() for step in range(1, len(losses) + 1)] == [float(loss).hex() for loss in losses]


def test_resuming_drops_what_lies_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write(train_line(2, [1.0, 2.0]))
        log.write({"kind": "validation", "step": 2, "bits_per_byte": 3.0})
        log.write(train_line(4, [3.0, 4.0]))
    before = path.read_text().splitlines()
    with MetricsLog(path, resume_step=2) as log:
        assert path.read_text().splitlines() == before[:2]
        log.write(train_line(3, [9.0]))
    assert read_losses(path) == {1: 1.0, 2: 2.0, 3: 9.0}
    with MetricsLog(path):
        assert path.read_text() == ""


@pytest.mark.parametrize(
    "tail", ['{"kind": "train", "st', "\x00\x00", '{"kind": "train", "step": 9}', "[1]\n", '{"step": "x"}\n']
)
def test_a_cut_off_or_strange_end_is_dropped(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "metrics.jsonl"
    line = json.dumps(train_line(1, [1.0])) + "\n"
    path.write_text(line + tail)
    assert [entry["step"] for entry in read_metrics(path)] == [1]
    MetricsLog(path, resume_step=100).close()
    assert path.read_text() == line


def test_a_missing_file_is_an_empty_one(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path / "none")) == []
    assert not plot_losses(tmp_path / "none", tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_not_a_number_is_not_json(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "m") as log, pytest.raises(ValueError, match="JSON compliant"):
        log.write(train_line(1, [float("nan")]))


def test_a_full_disk_is_a_clear_error() -> None:
    log = MetricsLog.__new__(MetricsLog)
    log.path = Path("/dev/full")
    with open("/dev/full", "w") as log._stream:
        with pytest.raises(RunWriteError, match="No space left on device") as caught:
            log.write(train_line(1, [1.0]))
        assert isinstance(caught.value, OSError)
        with pytest.raises(RunWriteError):
            log.close()


def test_the_plot_is_a_png_of_both_curves(tmp_path: Path) -> None:
    path, image = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    with MetricsLog(path) as log:
        for step in range(1, 5):
            log.write(train_line(step, [5.0 - step]))
            log.write({"kind": "validation", "step": step, "bits_per_byte": 5.5 - step})
    assert plot_losses(path, image, title="a $ title _ with signs")
    first = image.read_bytes()
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    with MetricsLog(path, resume_step=2):
        plot_losses(path, image)
    assert image.read_bytes() != first
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]
