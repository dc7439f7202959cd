"""Where a run's time went: the ledger against an outside clock, and its sums against a simple count."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from capibara.observe.errors import ProfileError
from capibara.observe.goodput import plot_goodput, read_goodput
from capibara.train.ledger import LEDGER, Ledger


class Clock:
    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def ledger(path: Path, clock: Clock, *, began: float) -> Ledger:
    return Ledger(path, began=began, clock=clock, now=clock)


def test_buckets_of_one_process(tmp_path: Path):
    clock = Clock()
    with ledger(tmp_path / LEDGER, clock, began=998.0) as book:
        clock.at += 1
        book.begin(0, devices=4, chip="tpu-v4")
        with book.during("compile"):
            clock.at += 5
        with book.during("step"):
            for step in (1, 2, 3):
                with book.during("input"):
                    clock.at += 0.25
                clock.at += 1
                if step == 2:
                    with book.during("checkpoint"):
                        clock.at += 0.5
                book.spent(step)
        clock.at += 0.125
    found = read_goodput(tmp_path, price_per_hour=3600.0)
    spent = {name: value for name, value in found.seconds.items() if value}
    assert spent == {
        "startup": 3,
        "compile": 5,
        "input": 0.75,
        "step": 3,
        "checkpoint": 0.5,
        "recovery": 0.125,
    }
    assert found.wall_seconds == sum(spent.values())
    assert found.cost == dict(found.seconds)
    assert (found.step, found.processes, found.devices, found.chip) == (3, 1, 4, "tpu-v4")
    assert found.goodput == 3 / found.wall_seconds
    assert "24.2 % goodput" in str(found)
    plot_goodput(found, tmp_path / "goodput.png")
    assert (tmp_path / "goodput.png").read_bytes().startswith(b"\x89PNG")


def test_steps_that_are_taken_again_are_lost(tmp_path: Path):
    clock = Clock()
    with ledger(tmp_path / LEDGER, clock, began=1000.0) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        clock.at += 10
        book.spent(10)
        clock.at += 6
        book.spent(16)
        book.back(13)
        clock.at += 3
        book.spent(16)
    clock.at += 100
    with ledger(tmp_path / LEDGER, clock, began=clock.at - 2) as book:
        book.begin(10, devices=2, chip="x")
        with book.during("step"):
            clock.at += 5
            book.spent(15)
    found = read_goodput(tmp_path)
    assert found.steps_lost == 9
    assert found.seconds["lost"] == pytest.approx(9)
    assert found.seconds["step"] == pytest.approx(15)
    assert found.seconds["down"] == pytest.approx(98)
    assert found.seconds["startup"] == pytest.approx(2)
    assert found.wall_seconds == pytest.approx(sum(found.seconds.values()))
    assert (found.step, found.processes) == (15, 2)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.integers(0, 3), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
@settings(max_examples=100, deadline=None)
def test_the_sum_is_the_wall_time(tmp_path_factory: pytest.TempPathFactory, parts):
    """Random runs of processes that go back: each second of a step counts where its step was the last time."""
    path = tmp_path_factory.mktemp("ledger") / LEDGER
    clock = Clock()
    step, owner, last_of = 0, {}, {}
    book = ledger(path, clock, began=clock.at)
    book.begin(0, devices=1, chip="x")
    second = 0
    for taken, down, back, again in parts:
        with book.during("step"):
            for _ in range(taken):
                clock.at += 1
                second += 1
                step += 1
                owner[second] = last_of[step] = step
            book.spent(step)
        step = max(0, step - back)
        if again:
            book.back(step)
        else:
            book.__exit__()
            clock.at += down
            book = ledger(path, clock, began=clock.at)
            book.begin(step, devices=1, chip="x")
        # Seconds of the steps after this one do not count any more.
        owner = {at: one for at, one in owner.items() if one <= step}
    book.__exit__()
    found = read_goodput(path)
    assert found.wall_seconds == pytest.approx(sum(found.seconds.values()))
    assert found.seconds["step"] == pytest.approx(len(owner))
    assert found.seconds["lost"] == pytest.approx(second - len(owner))


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "nonsense",
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"other": 1}}',
        '{"kind": "spent", "time": -1, "step": 1, "seconds": {}}',
        '{"kind": "spent", "time": NaN, "step": 1, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": "x", "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"step": true}}',
        '{"kind": "end", "time": 1, "step": 1}',
        "[" * 50_000,
    ],
)
def test_a_damaged_ledger(tmp_path: Path, line: str):
    begin = {"kind": "begin", "began": 0, "time": 1, "step": 0, "devices": 1, "chip": "x"}
    (tmp_path / LEDGER).write_text(f"{json.dumps(begin)}\n{line}\n")
    with pytest.raises(ProfileError, match="line 2"):
        read_goodput(tmp_path)


def test_a_line_that_was_not_finished(tmp_path: Path):
    begin = {"kind": "begin", "began": 0, "time": 1, "step": 0, "devices": 1, "chip": "x"}
    (tmp_path / LEDGER).write_text(f'{json.dumps(begin)}\n{{"kind": "spent", "time"')
    assert read_goodput(tmp_path).wall_seconds == 1


def test_bad_input(tmp_path: Path):
    with pytest.raises(ProfileError, match=r"has no ledger\.jsonl"):
        read_goodput(tmp_path)
    (tmp_path / LEDGER).touch()
    with pytest.raises(ProfileError, match="no line yet"):
        read_goodput(tmp_path)
    with pytest.raises(ProfileError, match="price_per_hour"):
        read_goodput(tmp_path, price_per_hour=float("nan"))


def capibara(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "capibara", *arguments]


def test_a_run_that_is_killed(tmp_path: Path):
    """The buckets of a killed and resumed run add up to what a clock outside of it shows."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    small = [
        *("model.embed_dim=32", "model.num_heads=2", "model.num_layers=1", "model.max_sequence_length=64"),
        *("train.sequence_length=32", "train.batch_size=4", "train.log_every=5", "optimizer.warmup_steps=2"),
        "checkpoint.every_steps=20",
    ]
    command = capibara("train", str(text), "--directory", str(tmp_path / "run"), *small)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    began = time.time()
    first = subprocess.Popen(
        [*command, "train.steps=1000000"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    kept = tmp_path / "run" / "checkpoints"
    while first.poll() is None and not any(path.name.isdigit() for path in kept.glob("*")):
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(1)
    newest = max(int(path.name) for path in kept.iterdir() if path.name.isdigit())
    second = subprocess.run(
        [*command, f"train.steps={newest + 40}"], env=environment, capture_output=True, text=True, check=False
    )
    assert second.returncode == 0, second.stderr
    found = read_goodput(tmp_path / "run")
    assert found.processes == 2
    assert found.step == newest + 40
    assert found.wall_seconds == pytest.approx(sum(found.seconds.values()), rel=0.01)
    # From before the first process to its last line, by the clock of the file system.
    outside = (tmp_path / "run" / LEDGER).stat().st_mtime - began
    assert found.wall_seconds == pytest.approx(outside, rel=0.01, abs=0.1)
    assert found.seconds["down"] > 0.9
    assert found.seconds["compile"] > 0
