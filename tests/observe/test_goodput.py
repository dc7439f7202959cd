"""Where a run's time went: the ledger against an outside clock, and its sums against a simple count."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from emulation import emulated
from hypothesis import given, settings
from hypothesis import strategies as st
from other_process import run_apart
from tiny_run import TEXT, TINY

from capibara.cli import main
from capibara.hardware import PriceError
from capibara.observe.errors import ProfileError
from capibara.observe.goodput import Goodput, plot_goodput, read_goodput
from capibara.sharding import Layout
from capibara.train.ledger import LEDGER, Ledger


class Clock:
    def __init__(self, at: float = 1000.0) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def ledger(path: Path, clock: Clock, *, began: float, now: Clock | None = None, warn: Any = None) -> Ledger:
    return Ledger(path, began=began, clock=clock, now=now or clock, warn=warn)


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


BEGIN = {"kind": "begin", "began": 0, "time": 1, "step": 0, "devices": 1, "chip": "x"}
SPENT = {"kind": "spent", "time": 11, "step": 10, "seconds": {"startup": 1, "step": 10}}


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "5",
        "nonsense",
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"other": 1}}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": []}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": null}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"step": 1e400}}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"step": ' + "9" * 4000 + "}}",
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"step": ' + "9" * 5000 + "}}",
        '{"kind": "spent", "time": -1, "step": 1, "seconds": {}}',
        '{"kind": "spent", "time": NaN, "step": 1, "seconds": {}}',
        '{"kind": "spent", "time": 1e400, "step": 1, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": "x", "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": -1, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": 1.5, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": true, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": 9007199254740993, "seconds": {}}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {"step": true}}',
        '{"kind": "spent", "time": 1, "step": 1, "seconds": {}, "reached": "x", "unfinished": true}',
        '{"kind": "end", "time": 1, "step": 1}',
        '{"kind": ["begin"], "time": 1, "step": 1}',
        '{"kind": "moved", "time": 1, "step": 1, "devices": 0}',
        '{"kind": "moved", "time": 1, "step": 1, "devices": 1e400}',
        '{"kind": "moved", "time": 1, "step": 1}',
        '{"kind": "begin", "began": 1, "time": 1, "step": 0, "devices": "four", "chip": "x"}',
        "[" * 50_000,
        "x" * 200_000,
        "\0" * 100,
        '{"kind": "spent", "time": 1, "st',
    ],
)
def test_a_damaged_line_is_left_out(tmp_path: Path, line: str):
    (tmp_path / LEDGER).write_text(f"{json.dumps(BEGIN)}\n{line}\n{json.dumps(SPENT)}\n")
    found = read_goodput(tmp_path)
    assert (found.damaged, found.step, found.seconds["step"], found.wall_seconds) == (1, 10, 10, 11)
    assert "1 damaged lines of the ledger were left out" in str(found)
    assert found.to_dict()["damaged_lines"] == 1


@pytest.mark.parametrize("left", ["\0" * 4096, '{"kind": "spent", "ti', "\n\n"])
def test_a_line_behind_what_a_power_cut_left(tmp_path: Path, left: str):
    (tmp_path / LEDGER).write_text(f"{left}{json.dumps(BEGIN)}\n{json.dumps(SPENT)}\n")
    found = read_goodput(tmp_path)
    assert (found.seconds["step"], found.damaged) == (10, int("\n" not in left))


def test_lines_before_the_first_beginning_say_nothing(tmp_path: Path):
    moved = {"kind": "moved", "time": 1, "step": 1, "devices": 8}
    text = "".join(json.dumps(one) + "\n" for one in (SPENT, moved, BEGIN, SPENT))
    (tmp_path / LEDGER).write_text(text)
    found = read_goodput(tmp_path)
    assert (found.damaged, found.devices, found.seconds["step"], found.wall_seconds) == (2, 1, 10, 11)
    (tmp_path / LEDGER).write_text(json.dumps(SPENT) + "\n")
    with pytest.raises(ProfileError, match="1 lines that are none of a ledger"):
        read_goodput(tmp_path)


@given(
    st.lists(st.binary(max_size=30) | st.sampled_from([json.dumps(one).encode() for one in (BEGIN, SPENT)]))
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[bytes]):
    path = tmp_path_factory.mktemp("ledger") / LEDGER
    path.write_bytes(b"\n".join(parts) + b"\n")
    with contextlib.suppress(ProfileError):
        found = read_goodput(path)
        assert found.wall_seconds == pytest.approx(sum(found.seconds.values()))
        str(found)


def test_a_chip_with_codes_for_terminals(tmp_path: Path):
    (tmp_path / LEDGER).write_text(json.dumps({**BEGIN, "chip": "tpu\x1b[31m" + "v" * 500}) + "\n")
    found = read_goodput(tmp_path)
    assert found.chip == "tpu[31m" + "v" * 92
    assert str(found).isprintable() or "\x1b" not in str(found)


def test_a_ledger_of_no_time_is_drawn(tmp_path: Path):
    (tmp_path / LEDGER).write_text(json.dumps({**BEGIN, "time": 0}) + "\n")
    found = read_goodput(tmp_path)
    assert (found.wall_seconds, found.goodput) == (0, 0)
    plot_goodput(found, tmp_path / "x.png")


def test_a_figure_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / LEDGER).write_text(json.dumps(BEGIN) + "\n")
    assert main(["report", str(tmp_path), "--plot", str(tmp_path / "none" / "x.png")]) == 2
    assert "the figure cannot be written" in capsys.readouterr().err


def test_a_fifo_in_place_of_a_ledger(tmp_path: Path):
    os.mkfifo(tmp_path / LEDGER)
    with pytest.raises(ProfileError, match="is not a regular file"):
        read_goodput(tmp_path)
    heard: list[str] = []
    with ledger(tmp_path / LEDGER, Clock(), began=999.0, warn=heard.append) as book:
        book.begin(0, devices=1, chip="x")
    assert "is not a regular file" in heard[0]


@pytest.mark.parametrize("forward", [True, False])
def test_a_clock_that_is_set(tmp_path: Path, forward: bool):
    """By a day, while a process trains and between two: what was measured does not change."""
    clock, wall = Clock(), Clock(5e8)
    with ledger(tmp_path / LEDGER, clock, began=5e8 - 2, now=wall) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        clock.at += 10
        book.spent(10)
        wall.at += 86_400 if forward else -86_400
        clock.at += 10
        book.spent(20)
    wall.at += 23
    with ledger(tmp_path / LEDGER, clock, began=wall.at - 1, now=wall) as book, book.during("step"):
        book.begin(20, devices=1, chip="x")
        clock.at += 5
        book.spent(25)
    found = read_goodput(tmp_path)
    assert found.seconds["step"] == pytest.approx(25)
    assert found.seconds["startup"] == pytest.approx(3)
    assert found.seconds["down"] == pytest.approx(86_400 + 2 if forward else 0)
    assert found.wall_seconds == pytest.approx(sum(found.seconds.values()))
    assert found.wall_seconds == pytest.approx(86_400 + 30 if forward else 28)


def test_time_of_which_nothing_is_said(tmp_path: Path):
    """Of an older ledger, whose clock was set forward by a minute, and one whose clock was set back."""
    late = {**SPENT, "time": 71}
    (tmp_path / LEDGER).write_text(f"{json.dumps(BEGIN)}\n{json.dumps(late)}\n")
    found = read_goodput(tmp_path)
    assert (found.seconds["unaccounted"], found.wall_seconds) == (60, 71)
    assert found.device_seconds["x"]["unaccounted"] == 60
    (tmp_path / LEDGER).write_text(f"{json.dumps(BEGIN)}\n{json.dumps({**SPENT, 'time': 3})}\n")
    found = read_goodput(tmp_path)
    assert (found.seconds["unaccounted"], found.wall_seconds) == (0, 11)


def test_steps_since_the_last_line_are_lost(tmp_path: Path):
    clock = Clock()
    with (
        pytest.raises(RuntimeError),
        ledger(tmp_path / LEDGER, clock, began=1000.0) as book,
        book.during("step"),
    ):
        book.begin(0, devices=1, chip="x")
        clock.at += 20
        book.spent(20)
        for step in (21, 22, 23):
            book.reach(step)
            clock.at += 1
        book.back(10)
        book.reach(11)
        clock.at += 1
        raise RuntimeError
    found = read_goodput(tmp_path)
    # Ten that had a line, three that had none, and the one in which the run failed.
    assert (found.steps_lost, found.seconds["lost"], found.step) == (14, 14, 10)
    assert "(14 steps)" in str(found)


@pytest.mark.parametrize("place", ["a folder", "a folder that is missing"])
def test_a_ledger_that_cannot_be_opened_ends_no_run(tmp_path: Path, place: str):
    """It warns once, and is written once that can be done."""
    path = tmp_path / "run" / LEDGER
    if place == "a folder":
        path.mkdir(parents=True)
    clock, heard = Clock(), []
    with ledger(path, clock, began=1000.0, warn=heard.append) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        clock.at += 5
        book.spent(5)
        if place == "a folder":
            path.rmdir()
        else:
            path.parent.mkdir()
        clock.at += 2
    assert len(heard) == 1
    assert "cannot be written" in heard[0]
    found = read_goodput(path)
    assert (found.seconds["step"], found.wall_seconds, found.damaged) == (7, 7, 0)


def test_a_disk_that_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half a line is written, and nothing more for two; then all of it."""
    clock, heard, real = Clock(), [], os.pwrite
    full: list[bool | str] = [False]

    def pwrite(file: int, content: bytes, at: int) -> int:
        if not full[0]:
            return real(file, content, at)
        if full[0] is True:
            full[0] = "entirely"
            return real(file, content[: len(content) // 2], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with ledger(tmp_path / LEDGER, clock, began=1000.0, warn=heard.append) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        for step in range(1, 6):
            full[0] = {2: True, 3: "entirely"}.get(step, False)
            clock.at += 1
            book.spent(step)
            assert (tmp_path / LEDGER).read_bytes().endswith(b"\n")
    assert len(heard) == 1
    found = read_goodput(tmp_path)
    assert (found.seconds["step"], found.step, found.damaged) == (5, 5, 0)


def test_a_second_run_of_a_process_began_when_it_began(tmp_path: Path):
    started = """
import sys, time
from pathlib import Path
from capibara.train.ledger import Ledger
time.sleep(0.5)
for number in (1, 2):
    with Ledger(Path(sys.argv[1]) / f"{number}.jsonl") as book:
        book.begin(0, devices=1, chip="x")
    time.sleep(0.3)
"""
    subprocess.run([sys.executable, "-c", started, str(tmp_path)], check=True)
    assert read_goodput(tmp_path / "1.jsonl").seconds["startup"] > 0.5
    assert read_goodput(tmp_path / "2.jsonl").seconds["startup"] < 0.1


def test_an_old_ledger_of_which_the_end_is_no_line(tmp_path: Path):
    """More than any line has: it is kept, and what follows it is read."""
    path, clock = tmp_path / LEDGER, Clock()
    path.write_text("x" * 100_000)
    with ledger(path, clock, began=1000.0) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        clock.at += 5
        book.spent(5)
    found = read_goodput(path)
    assert path.read_bytes().startswith(b"x" * 100_000 + b"\n")
    assert (found.seconds["step"], found.damaged) == (5, 1)


def test_a_line_that_was_not_finished(tmp_path: Path):
    (tmp_path / LEDGER).write_text(f'{json.dumps(BEGIN)}\n{{"kind": "spent", "time"')
    assert read_goodput(tmp_path).wall_seconds == 1


def test_bad_input(tmp_path: Path):
    with pytest.raises(ProfileError, match=r"has no ledger\.jsonl"):
        read_goodput(tmp_path)
    (tmp_path / LEDGER).touch()
    with pytest.raises(ProfileError, match="no line yet"):
        read_goodput(tmp_path)
    wrong: Any
    for wrong in (float("nan"), -1.0, True, "3.22"):
        with pytest.raises(ProfileError, match=f"price_per_hour: got {wrong!r}"):
            read_goodput(tmp_path, price_per_hour=wrong)


def killed(book: Ledger) -> None:
    """What SIGKILL leaves: the file without a last line."""
    assert book._file is not None
    os.close(book._file)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / LEDGER).read_text().splitlines()]


def test_a_process_that_is_killed_while_it_compiles(tmp_path: Path):
    """Its start was time of the run, which another process goes on with."""
    clock = Clock()
    book = ledger(tmp_path / LEDGER, clock, began=990.0)
    book.begin(0, devices=2, chip="x")
    clock.at += 30
    killed(book)
    with ledger(tmp_path / LEDGER, clock, began=clock.at - 5) as book, book.during("step"):
        book.begin(0, devices=2, chip="x")
        clock.at += 7
        book.spent(1)
    found = read_goodput(tmp_path)
    spent = {name: value for name, value in found.seconds.items() if value}
    assert spent == {"startup": 15, "down": 25, "step": 7}
    assert found.wall_seconds == 47


def test_steps_of_a_failure_are_lost(tmp_path: Path):
    """Those since the last line, too, whether the process goes back itself or ends."""
    clock = Clock()
    with pytest.raises(RuntimeError), ledger(tmp_path / LEDGER, clock, began=1000.0) as book:
        book.begin(0, devices=1, chip="x")
        with book.during("step"):
            clock.at += 10
            book.spent(10)
            clock.at += 3  # three steps, the third of which diverges
        book.back(10)
        with book.during("step"):
            clock.at += 5
            book.spent(15)
            clock.at += 4
            raise RuntimeError
    found = read_goodput(tmp_path)
    assert (found.seconds["step"], found.seconds["lost"], found.wall_seconds) == (15, 7, 22)


def test_a_process_that_begins_before_the_one_before_has_ended(tmp_path: Path):
    clock = Clock()
    with ledger(tmp_path / LEDGER, clock, began=1000.0) as book, book.during("step"):
        book.begin(0, devices=1, chip="x")
        clock.at += 10
        book.spent(10)
    clock.at += 1  # startup of 4 s, 3 of which are those of the one before
    with ledger(tmp_path / LEDGER, clock, began=1007.0) as book, book.during("step"):
        book.begin(10, devices=1, chip="x")
        clock.at += 5
        book.spent(15)
    found = read_goodput(tmp_path)
    assert found.wall_seconds == 16 == sum(found.seconds.values())
    assert (found.seconds["startup"], found.seconds["down"]) == (1, 0)


def test_a_line_that_a_full_disk_cut(tmp_path: Path):
    clock = Clock()
    with ledger(tmp_path / LEDGER, clock, began=1000.0) as book:
        book.begin(0, devices=1, chip="x")
    with open(tmp_path / LEDGER, "a") as stream:
        stream.write('{"kind": "spe')
    with ledger(tmp_path / LEDGER, clock, began=1000.0) as book:
        book.begin(0, devices=1, chip="x")
    assert read_goodput(tmp_path).processes == 2


process = st.tuples(
    st.integers(0, 4),  # startup
    st.integers(1, 4),  # devices
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 4)), max_size=4),
    st.sampled_from(["ends", "fails", "is killed"]),
    st.integers(0, 6),  # until the next one
)


@given(st.lists(process, min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_every_second_counts_once_with_its_devices(tmp_path_factory: pytest.TempPathFactory, parts):
    """Random processes that are killed, fail, or move to other devices, against a plain list of seconds."""
    path = tmp_path_factory.mktemp("ledger") / LEDGER
    clock = Clock()
    devices_of: list[int] = []  # of each second that a line tells of, from the first process's start
    step, before = 0, 0
    for startup, devices, moves, end, down in parts:
        began = clock.at
        clock.at += startup
        book = ledger(path, clock, began=began)
        book.begin(step, devices=devices, chip="tpu-v4")
        written = clock.at
        here = [devices] * startup
        for seconds, moved, more in moves:
            with book.during("step"):
                clock.at += seconds
                step += 1
                book.spent(step)
            here += [devices] * seconds
            if moved:
                clock.at += more
                here += [devices] * more
                devices += 1
                book.moved(devices)
            written = clock.at
        devices_of += [before] * int(began - 1000 - len(devices_of)) + here
        clock.at += 2
        if end == "is killed":
            killed(book)
        else:
            book.__exit__(*((RuntimeError, RuntimeError(), None) if end == "fails" else ()))
            written = clock.at
            devices_of += [devices] * 2
        clock.at += down
        before = devices
        assert len(devices_of) == written - 1000
    found = read_goodput(path)
    assert found.wall_seconds == len(devices_of)
    assert sum(found.seconds.values()) == pytest.approx(len(devices_of))
    (spent,) = found.device_seconds.values()
    assert sum(spent.values()) == pytest.approx(sum(devices_of))
    assert found.devices == before


PRICES = """
[[price]]
chip = "tpu-v4"
region = "here"
term = "on-demand"
usd_per_chip_hour = 3600.0
as_of = 2026-11-01
source = "our contract"
[[price]]
chip = "tpu-v4"
region = "here"
term = "spot"
usd_per_chip_hour = 360.0
as_of = 2026-11-01
source = "our contract"
[[price]]
chip = "tpu-v3"
region = "here"
term = "on-demand"
usd_per_chip_hour = 7200.0
as_of = 2026-11-01
source = "our contract"
"""


def two_chips(path: Path, first: str = "tpu-v4", second: str = "tpu-v3-core") -> None:
    clock = Clock()
    with ledger(path / LEDGER, clock, began=998.0) as book, book.during("step"):
        book.begin(0, devices=4, chip=first)
        clock.at += 10
        book.spent(10)
        book.moved(2)
        clock.at += 5
        book.spent(15)
    clock.at += 3
    with ledger(path / LEDGER, clock, began=clock.at) as book, book.during("step"):
        book.begin(10, devices=8, chip=second)
        clock.at += 1
        book.spent(11)


def test_cost_follows_the_devices_and_the_catalogue(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    two_chips(tmp_path)
    own = tmp_path / "prices.toml"
    own.write_text(PRICES)
    found = read_goodput(tmp_path, prices=own, region="here")
    # A dollar a second for a v4, two for a v3, which has two cores: eight devices are four chips.
    cost = {"startup": 2.0 * 4, "step": 10.0 * 4 + 1.0 * 8, "lost": 5.0 * 2, "down": 3.0 * 2}
    assert found.cost is not None
    assert {name: value for name, value in found.cost.items() if value} == pytest.approx(cost)
    assert found.device_seconds["tpu-v3-core"]["step"] == 8
    assert "cost: $72.00 ($3600 per chip-hour: tpu-v4, here, on-demand" in str(found)
    assert main(["report", str(tmp_path), "--prices", str(own), "--region", "here", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cost"] == pytest.approx(found.cost)
    assert "our contract" in shown["price"]
    given_price = read_goodput(tmp_path, price_per_hour=3600.0)
    assert given_price.cost == dict(given_price.seconds)
    assert "as given" in str(given_price)
    with pytest.raises(PriceError, match="term: got 'monthly'"):
        read_goodput(tmp_path, term="monthly")


def test_the_packaged_price(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CAPIBARA_PRICES", raising=False)
    two_chips(tmp_path, second="tpu-v4")
    found = read_goodput(tmp_path, region="us-central2")
    assert found.cost is not None
    # 4 devices for 12 s, 2 for 8 s, 8 for 1 s, each a chip of $3.22 an hour.
    assert sum(found.cost.values()) == pytest.approx(3.22 / 3600 * (48 + 16 + 8))


@pytest.mark.parametrize("chip", ["cpu-amd", "NVIDIA Unheard"])
def test_a_price_that_is_not_known(tmp_path: Path, chip: str, capsys: pytest.CaptureFixture[str]):
    two_chips(tmp_path, second=chip)
    found = read_goodput(tmp_path)
    assert found.cost is None
    assert chip in found.price_note
    assert main(["report", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "cost: unknown: " in text
    assert "--price-per-hour" in text
    assert "$" not in text
    assert found.to_dict()["price_note"] == found.price_note


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


TINY_CLI = Path(__file__).parent.parent / "support" / "tiny_cli.py"


def adds_up(found: Goodput, outside: float) -> None:
    """Buckets, wall time and a clock outside agree within 1 %; every second has its devices."""
    assert found.wall_seconds == pytest.approx(sum(found.seconds.values()), rel=0.01)
    assert found.wall_seconds == pytest.approx(outside, rel=0.01, abs=0.1)


def mesh(**sizes: int) -> list[str]:
    return Layout(mesh=tuple(sizes.items())).overrides()


@pytest.mark.slow
def test_a_run_that_is_killed_and_goes_on_with_another_mesh(tmp_path: Path):
    """SIGKILL while it trains on four devices, SIGKILL while it compiles for two, and an end on one."""
    (tmp_path / "text.txt").write_text(TEXT)
    run = tmp_path / "run"

    def start(devices: int, steps: int, *layout: str) -> subprocess.Popen[bytes]:
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": emulated(devices, quick=True)}
        arguments = [str(TINY_CLI), "train", str(tmp_path / "text.txt"), *TINY, *layout]
        with open(tmp_path / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *arguments, "--directory", str(run), f"train.steps={steps}"],
                env={**os.environ, **flags},
                stdout=log,
                stderr=log,
            )

    def kill_when(process: subprocess.Popen[bytes], happened: Any) -> None:
        deadline = time.monotonic() + 120
        while not happened():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL

    def checkpoints() -> list[int]:
        return [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()]

    began = time.time()
    kill_when(start(4, 1_000_000, *mesh(data=4)), lambda: checkpoints())
    time.sleep(0.5)
    kill_when(
        start(2, 1_000_000, *mesh(model=2)),
        lambda: sum(line["kind"] == "begin" for line in lines(run)) == 2,
    )
    last = start(1, max(checkpoints()) + 10)
    assert last.wait(timeout=120) == 0, (tmp_path / "log").read_text()
    found = read_goodput(run)
    adds_up(found, (run / LEDGER).stat().st_mtime - began)
    assert (found.processes, found.devices) == (3, 1)
    assert [line["devices"] for line in lines(run) if line["kind"] == "begin"] == [4, 2, 1]
    assert found.seconds["down"] > 0.5
    assert min(found.seconds[name] for name in ("startup", "compile", "step", "checkpoint")) > 0
    assert "layout changed since step" in (tmp_path / "log").read_text()


MOVES = """
import json, sys, time
from pathlib import Path
import jax
from tiny_model import TinyModel
from tiny_run import tiny_config, tiny_corpus
from capibara.jax.tpu_v4.autoscaling import TpuAutoScaler
from capibara.train import train

looked = 0

def devices():
    global looked
    looked += 1
    return jax.devices()[: 4 if looked <= 3 or looked > 6 else 2]

config = tiny_config(sys.argv[1], *json.loads(sys.argv[2]))
scaler = TpuAutoScaler(1, 4, 0.8, None, "utilization", devices=devices, cooldown=0.0, every=1000)
with scaler.managed_scaling():
    train(config, TinyModel(config), tiny_corpus(), measure_utilisation=False)
print("RESULT", json.dumps([d.after for d in scaler.decisions]))
"""


@pytest.mark.slow
def test_a_run_that_moves_to_other_devices(tmp_path: Path):
    settings = ["train.steps=12", "batch_size=8", *mesh(data=2, model=2)]
    began = time.time()
    moves = run_apart(MOVES, str(tmp_path), json.dumps(settings), XLA_FLAGS=emulated(4, quick=True))
    assert moves == [2, 4]
    found = read_goodput(tmp_path)
    assert [line["devices"] for line in lines(tmp_path) if line["kind"] == "moved"] == [2, 4]
    adds_up(found, (tmp_path / LEDGER).stat().st_mtime - began)
    assert found.seconds["recovery"] > 0
    (spent,) = found.device_seconds.values()
    # Between what two devices and what four would have had.
    assert 2 * found.wall_seconds < sum(spent.values()) < 4 * found.wall_seconds


@pytest.mark.slow
def test_a_group_of_which_a_process_is_killed(tmp_path: Path):
    """The launcher starts both again; process 0 alone writes, whichever is killed."""
    (tmp_path / "text.txt").write_text(TEXT)
    run, log = tmp_path / "run", tmp_path / "log"
    layout = [*mesh(data=2), "train.steps=60", "train.log_every=1", "batch_size=8"]
    command = [
        *capibara("launch", "-n", "2", "--devices", "1", "--restarts", "2", "--grace", "0.2", "--"),
        *(str(TINY_CLI), "train", str(tmp_path / "text.txt"), *TINY, *layout, "--directory", str(run)),
    ]
    began = time.time()
    with open(log, "wb") as stream:
        flags = {"XLA_FLAGS": emulated(1, quick=True), "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(command, env={**os.environ, **flags}, stdout=stream, stderr=stream)
    try:
        for number in (1, 2):
            newest = max((line["step"] for line in lines(run)), default=0) if number > 1 else 0
            while not (run / LEDGER).exists() or max(line["step"] for line in lines(run)) < newest + 6:
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[number - 1]), signal.SIGKILL)
            while f"starting all again ({number} of" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.01)
        assert process.wait(timeout=300) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    found = read_goodput(run)
    adds_up(found, (run / LEDGER).stat().st_mtime - began)
    assert (found.processes, found.devices, found.step) == (3, 2, 60)
    assert found.seconds["lost"] + found.seconds["down"] > 0
