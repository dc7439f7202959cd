"""The examples run, with warnings as errors, and do what they say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_spirals_learns(tmp_path: Path):
    shown = run(tmp_path, "two_spirals.py")
    losses = [float(text) for text in re.findall(r"loss (\d+\.\d+)", shown)]
    assert losses[-1] < 0.2 * losses[0]
    right = re.search(r"right on ([\d.]+)%", shown)
    assert right is not None
    assert float(right[1]) > 95


@pytest.mark.slow
def test_hybrid_language_model(tmp_path: Path):
    shown = run(tmp_path, "hybrid_language_model.py", "--steps", "4", "--prompt", "Once ")
    assert "ssm/attention" in shown
    assert "finished: 4 steps" in shown
    assert "Once " in shown
    assert (tmp_path / "runs/hybrid/checkpoints/4").is_dir()


def test_every_example_is_tested():
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
