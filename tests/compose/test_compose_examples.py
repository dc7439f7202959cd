"""The examples of compose run as a user runs them, with warnings as errors, and what they show is so."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples/compose"


def run(folder: Path, name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / name), *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "XLA_FLAGS": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, text: str) -> list[float]:
    return [float(found) for found in re.findall(pattern + r" ?(\d[\d.]*(?:e[-+]\d+)?)", text)]


def entropy_of_letters() -> float:
    """Nats a letter that knowing how often each occurs leaves: who has learned more than that does better."""
    from pydoc_data.topics import topics

    counts = np.bincount(np.frombuffer("\n".join(topics.values()).encode("ascii", "ignore"), "uint8"))
    share = counts[counts > 0] / counts.sum()
    return float(-(share * np.log(share)).sum())


@pytest.mark.slow
def test_digits_are_recognised(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    shown = run(tmp_path, "digits.py", "--steps", "150", "--plot", "digits.png")
    losses = numbers("loss", shown)
    assert len(losses) == 7
    assert losses[-1] < 0.2 * losses[0]
    (accuracy,) = numbers("right on", shown)
    assert 95 < accuracy <= 100
    assert "450 new digits" in shown
    assert (tmp_path / "digits.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_lstm_learns_to_write(tmp_path: Path) -> None:
    shown = run(
        tmp_path, "lstm.py", "--steps=100", "--hidden=64", "--time=32", "--prompt=The ", "--length=50"
    )
    (before,) = numbers("before training:", shown)
    after = numbers("on text not seen", shown)
    assert abs(before - 4.852) < 0.05  # the entropy of a guess among 128 letters
    assert after[-1] < after[0]
    assert after[-1] < entropy_of_letters() - 0.3
    written = shown.partition("\nThe ")[2]
    assert len(written) == 51  # and the end of the line


@pytest.mark.slow
def test_gpt_learns_to_write(tmp_path: Path) -> None:
    shown = run(tmp_path, "gpt.py", "--steps=80", "--size=48", "--prompt=A class ", "--length=50")
    (before,) = numbers("before training:", shown)
    after = numbers("on text not seen", shown)
    assert abs(before - 4.852) < 0.1
    assert after[-1] < after[0]
    assert after[-1] < entropy_of_letters() - 0.3
    assert len(shown.partition("\nA class ")[2]) == 51


@pytest.mark.slow
def test_two_backends_learn_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    shown = run(tmp_path, "two_backends.py", "--steps", "60")
    on_jax, on_torch = numbers("JAX", shown), numbers("PyTorch", shown)
    assert len(on_jax) == len(on_torch) == 5
    assert on_jax[-1] < 0.5 * on_jax[0]
    assert on_jax == pytest.approx(on_torch, rel=1e-9)
    (losses,) = numbers("the losses differ by", shown)
    (params,) = numbers("after 60 steps by", shown)
    assert losses < 1e-13
    assert params < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "part"), [("2x2", "(16, 128)"), ("4x8", "(8, 32)")])
def test_a_mesh_learns_what_one_device_learns(tmp_path: Path, mesh: str, part: str) -> None:
    shown = run(tmp_path, "sharded_mlp.py", "--mesh", mesh, "--steps", "10")
    assert re.search(rf"layer_0.weight +\(32, 256\) +P\('data', 'model'\) +{re.escape(part)} on each", shown)
    assert re.search(r"layer_1.weight +\(256, 128\) +P\('model', 'data'\)", shown)
    assert "all lie as proposed: True" in shown
    alone, together = numbers("one device", shown), numbers(r"\d devices", shown)
    assert len(alone) == len(together) == 5
    assert together == pytest.approx(alone, rel=1e-5)
    assert alone[-1] < 0.8 * alone[0]
    (apart,) = numbers("differ by", shown)
    assert apart < 1e-5


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in tested] == []
