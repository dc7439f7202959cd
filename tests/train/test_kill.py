"""Kill a run at random moments: every restart finds a complete checkpoint, and no loss changes by a bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_runs import Campaign
from tiny_run import QUICK_COMPILE, TEXT, TINY

from capibara.train import checkpoint_store, read_losses, read_metrics

ENTRY = Path(__file__).parent.parent / "support" / "tiny_cli.py"


class Runs:
    """Starts ``capibara train`` in own processes, with one text and one cache of compiled programs."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "text.txt").write_text(TEXT)
        self.environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": QUICK_COMPILE,
            "JAX_COMPILATION_CACHE_DIR": str(base / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }

    def start(self, folder: Path, *settings: str) -> subprocess.Popen[bytes]:
        command = [
            sys.executable,
            "-W",
            "error",
            str(ENTRY),
            "train",
            str(self.base / "text.txt"),
            *TINY,
            *settings,
        ]
        with open(self.base / f"{folder.name}.log", "ab") as log:
            return subprocess.Popen(
                [*command, "--directory", str(folder)], stdout=log, stderr=log, env=self.environment
            )

    def finish(self, folder: Path, *settings: str) -> None:
        process = self.start(folder, *settings)
        assert process.wait(timeout=300) == 0, self.log(folder)

    def log(self, folder: Path) -> str:
        return (self.base / f"{folder.name}.log").read_text()


def wait_for_losses(folder: Path, more_than: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the run has written a loss of a step above ``more_than``."""
    while not any(step > more_than for step in read_losses(folder / "metrics.jsonl")):
        assert process.poll() is None, "it ended before it was killed"
        time.sleep(0.01)


def outcome(folder: Path) -> tuple[list[str], list[str]]:
    """Every training loss and every validation, to the last bit."""
    losses = read_losses(folder / "metrics.jsonl")
    assert list(losses) == list(range(1, len(losses) + 1))
    entries = [entry for entry in read_metrics(folder / "metrics.jsonl") if entry["kind"] == "validation"]
    return [loss.hex() for loss in losses.values()], [entry["bits_per_byte"].hex() for entry in entries]


def kill_and_resume(base: Path, kills: int, steps: int, seed: int) -> None:
    runs, chance = Runs(base), random.Random(seed)
    settings = (f"train.steps={steps}", "train.log_every=1", f"train.eval_every={steps // 3}")
    undisturbed, disturbed = base / "undisturbed", base / "disturbed"
    runs.finish(undisturbed, *settings, f"checkpoint.every_steps={steps}")
    expected = outcome(undisturbed)
    assert len(expected[0]) == steps
    assert len(set(expected[0])) > steps // 2

    often = (*settings, "checkpoint.every_steps=2")
    reached = []
    for _ in range(kills):
        process = runs.start(disturbed, *often)
        newest = max(checkpoint_store(disturbed).steps(), default=0)
        # The moments spread over the loop: steps, checkpoints being written, old ones being removed.
        # Some come while the process is still starting.
        if chance.random() < 0.8:
            wait_for_losses(disturbed, newest + chance.choice((0, 2, 3)), process)
            while not reached and not checkpoint_store(disturbed).steps():  # it is written beside the steps
                assert process.poll() is None, "it ended before it was killed"
                time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.5))
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL, runs.log(disturbed)
        reached.append(newest)
    reached.append(max(checkpoint_store(disturbed).steps(), default=0))
    runs.finish(disturbed, *often)

    assert outcome(disturbed) == expected
    log = runs.log(disturbed)
    # What a kill leaves is whole or invisible, so no damaged checkpoint was ever met …
    assert "damaged" not in log
    assert "Traceback" not in log
    # … and the restarts did resume.
    assert reached[-1] > 0
    assert f"resuming after step {reached[-1]} " in log
    assert sorted(os.listdir(disturbed / "checkpoints")) == sorted(
        map(str, checkpoint_store(disturbed).steps())
    )


def test_a_kill_changes_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=1, steps=20, seed=3)


@pytest.mark.slow
def test_ten_kills_change_nothing(tmp_path: Path) -> None:
    kill_and_resume(tmp_path, kills=10, steps=150, seed=2)


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    settings = ("train.steps=12", "train.log_every=1", "checkpoint.every_steps=4")
    runs.finish(tmp_path / "undisturbed", *settings)
    folder = tmp_path / "disturbed"
    runs.environment["KILL_IN_A_SAVE"] = "8"
    for _ in range(2):  # the second time it begins with what the first one left
        process = runs.start(folder, *settings)
        assert process.wait(timeout=300) == -signal.SIGKILL, runs.log(folder)
        assert checkpoint_store(folder).steps() == [4]
        assert [name[:7] for name in os.listdir(folder / "checkpoints") if name != "4"] == [".tmp-8-"]
    del runs.environment["KILL_IN_A_SAVE"]
    runs.finish(folder, *settings)
    assert outcome(folder) == outcome(tmp_path / "undisturbed")
    assert runs.log(folder).count("resuming after step 4 ") == 2
    assert sorted(os.listdir(folder / "checkpoints")) == ["12", "8"]


@pytest.mark.slow
def test_a_checkpoint_that_hangs_is_reported_and_nobody_waits_for_it_for_ever(tmp_path: Path) -> None:
    runs, folder = Runs(tmp_path), tmp_path / "run"
    settings = ("train.steps=1000000", "train.log_every=1", "eval_every=1000000")
    bounds = ("checkpoint.every_steps=200", "checkpoint.slow_seconds=0.01", "checkpoint.wait_seconds=1")
    runs.environment["HANG_IN_A_SAVE"] = "200"
    process = runs.start(folder, *settings, *bounds)
    assert process.wait(timeout=300) == 1, runs.log(folder)
    log = runs.log(folder)
    assert re.search(
        r"the checkpoint of step 200 is being written for .*: its writer is at .*threading\.py", log
    )
    last = log.strip().splitlines()[-1]
    assert re.match(r"capibara: the checkpoint of step 200 is not complete after .* given up", last)
    assert "Traceback" not in log
    assert checkpoint_store(folder).steps() == []
    assert max(read_losses(folder / "metrics.jsonl")) >= 390  # training went on until the next one was due


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_a_polite_signal_saves_the_step_it_reached(tmp_path: Path, number: signal.Signals, code: int) -> None:
    runs, folder = Runs(tmp_path), tmp_path / "run"
    settings = (
        "train.steps=1000000",
        "train.log_every=1",
        "checkpoint.every_steps=1000000",
        "eval_every=1000000",
    )
    process = runs.start(folder, *settings)
    wait_for_losses(folder, 3, process)
    process.send_signal(number)
    assert process.wait(timeout=60) == code, runs.log(folder)
    (step,) = checkpoint_store(folder).steps()
    assert step >= 4
    # The checkpoint and the metrics end at the same step.
    assert max(read_losses(folder / "metrics.jsonl")) == step
    assert f"stopped after step {step:,}; run the same command again" in runs.log(folder)
    assert "Traceback" not in runs.log(folder)


@pytest.mark.slow
@pytest.mark.parametrize("fewer", [False, True], ids=["one mesh", "fewer processes"])
def test_a_launcher_goes_on_after_kills(tmp_path: Path, fewer: bool) -> None:
    # python tests/support/kill_runs.py does it with more.
    outcome = Campaign(tmp_path, kills=4, seed=5, fewer=fewer).run()
    assert sum(outcome.kills.values()) == 4
    assert outcome.bits or fewer
