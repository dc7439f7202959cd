"""Processes of one machine: their output, their failures, signals, and that none of them is ever left."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from capibara.errors import ConfigError
from capibara.launch import launch_processes

# Each process writes its number to a file, so that a test finds it after the launcher is gone.
BEGIN = """
import os, pathlib, signal, subprocess, sys, time
me = int(os.environ["CAPIBARA_PROCESS_ID"])
pathlib.Path(sys.argv[1], str(me)).write_text(str(os.getpid()))
def others(count):
    while sum(p.stat().st_size > 0 for p in pathlib.Path(sys.argv[1]).glob("[0-9]")) < count:
        time.sleep(0.005)
"""


def program(tmp_path: Path, body: str) -> list[str]:
    """A Python program, without the modules of site-packages, that runs ``body`` in every process."""
    path = tmp_path / "program.py"
    path.write_text(BEGIN + textwrap.dedent(body))
    (tmp_path / "pids").mkdir()
    return [sys.executable, "-S", str(path), str(tmp_path / "pids")]


def command(count: int, program: list[str], *options: str) -> list[str]:
    return [sys.executable, "-m", "capibara", "launch", "-n", str(count), *options, "--", *program]


def pids(tmp_path: Path, names: str = "*") -> list[int]:
    found = (path.read_text() for path in sorted((tmp_path / "pids").glob(names)))
    return [int(text) for text in found if text]


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # of a zombie only the number is left


def all_gone(tmp_path: Path, count: int, within: float = 10.0) -> bool:
    found = pids(tmp_path)
    assert len(found) == count
    end = time.monotonic() + within
    while any(map(alive, found)) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(map(alive, found))


# Tests in the background (`make test &`) inherit from the shell that SIGINT is ignored, and a launcher keeps it so.
_LISTENING = """
import os, signal, sys
for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(one, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextlib.contextmanager
def started(tmp_path: Path, count: int, body: str, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A launcher in its own process, once all of its processes run."""
    launcher = subprocess.Popen(
        [sys.executable, "-S", "-c", _LISTENING, *command(count, program(tmp_path, body), *options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: launcher.poll() is not None or len(pids(tmp_path, "[0-9]")) == count)
        assert launcher.poll() is None
        yield launcher
    finally:
        for pid in [launcher.pid, *pids(tmp_path)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.communicate()


def launched(tmp_path: Path, count: int, body: str, **options: object) -> tuple[int, list[str], list[str]]:
    """In this process: exit code, and the lines of standard output and of standard error."""
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        code = launch_processes(program(tmp_path, body), count, out=out, err=err, **options)  # pyright: ignore
    return code, (tmp_path / "out").read_text().splitlines(), (tmp_path / "err").read_text().splitlines()


@pytest.mark.parametrize(("given", "told"), [("", "600"), ("30", "30")])
def test_a_launcher_is_patient_unless_it_is_told_otherwise(tmp_path: Path, given: str, told: str) -> None:
    """A variable that is set to nothing is not set, as where it is read."""
    own = {**os.environ, "CAPIBARA_HEARTBEAT_SECONDS": given}
    code, out, _ = launched(
        tmp_path, 1, 'print(os.environ["CAPIBARA_HEARTBEAT_SECONDS"])', environment=own, devices=1
    )
    assert (code, out) == (0, [f"[0] {told}"])


def test_every_process_is_told_its_place_and_its_lines_have_its_number(tmp_path: Path) -> None:
    body = """
        e = os.environ
        print(e["CAPIBARA_COORDINATOR"], e["CAPIBARA_NUM_PROCESSES"], e["XLA_FLAGS"][-2:], e["JAX_PLATFORMS"],
              e["CAPIBARA_HEARTBEAT_SECONDS"])
        print("no end of line", end="", file=sys.stderr)
    """
    code, out, err = launched(tmp_path, 3, body, devices=5, logs=tmp_path / "logs")
    assert code == 0
    assert sorted(line.split()[0] for line in out) == ["[0]", "[1]", "[2]"]
    addresses, *rest = zip(*(line.split()[1:] for line in out), strict=True)
    assert len(set(addresses)) == 1
    assert 0 < int(addresses[0].removeprefix("127.0.0.1:")) < 65536
    assert rest == [("3",) * 3, ("=5",) * 3, ("cpu",) * 3, ("600",) * 3]
    assert sorted(err) == [f"[{n}] no end of line" for n in range(3)]
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in logs] == ["process-0.log", "process-1.log", "process-2.log"]
    assert all("no end of line" in path.read_text() for path in logs)


@pytest.mark.parametrize(
    ("body", "code", "last"),
    [
        # The others would wait for ever, ignore SIGTERM, and fail of it themselves.
        (
            "if me == 1: others(3); print('a reason', file=sys.stderr); sys.exit(7)\ntime.sleep(600)",
            7,
            "capibara launch: process 1 of 3 failed with exit code 7; the others were stopped: a reason",
        ),
        (
            "signal.signal(15, signal.SIG_IGN)\nif me == 2: others(3); os.kill(os.getpid(), 9)\ntime.sleep(600)",
            137,
            "capibara launch: process 2 of 3 was ended by SIGKILL; the others were stopped",
        ),
        (
            "signal.signal(15, lambda *_: sys.exit(3))\nif me == 0: others(3); raise ValueError('its words')\n"
            "time.sleep(600)",
            1,
            "capibara launch: process 0 of 3 failed with exit code 1; the others were stopped: ValueError: its words",
        ),
    ],
)
def test_the_first_failure_ends_all_and_is_the_last_line(
    tmp_path: Path, body: str, code: int, last: str
) -> None:
    found, _, err = launched(tmp_path, 3, body, grace=0.3)
    assert (found, err[-1]) == (code, last)
    assert all_gone(tmp_path, 3)


# Each start adds a byte to a file of its process.
COUNTED = """
tries = pathlib.Path(sys.argv[1], f"tries of {me}")
with open(tries, "a") as stream: stream.write("1")
tries = len(tries.read_text())
print("start", tries, flush=True)
"""


@pytest.mark.parametrize(
    ("body", "restarts", "code", "starts"),
    [
        ("if me == 1 and tries < 3: os.kill(os.getpid(), 9)\nprint('done', tries)", 5, 0, 3),
        ("if me == 1: sys.exit(7)\ntime.sleep(600)", 2, 7, 3),
        ("if me == 0: sys.exit(2)\ntime.sleep(600)", 2, 2, 1),  # invalid input
        ("if me == 0: sys.exit(143)\ntime.sleep(600)", 2, 143, 1),  # asked to stop
        ("sys.exit(0)", 2, 0, 1),
    ],
)
def test_all_are_started_again(tmp_path: Path, body: str, restarts: int, code: int, starts: int) -> None:
    found, out, err = launched(
        tmp_path, 2, COUNTED + body, restarts=restarts, grace=0.2, logs=tmp_path / "logs"
    )
    assert found == code
    # Of the process that fails; others may be stopped before they count.
    assert max(len(path.read_text()) for path in (tmp_path / "pids").glob("tries of *")) == starts
    again = [line for line in err if "starting all again" in line]
    assert again == [
        f"capibara launch: starting all again ({n} of at most {restarts} times)" for n in range(1, starts)
    ]
    if code:
        assert "capibara launch: process" in err[-1]
    elif starts > 1:
        assert f"[1] done {starts}" in out
        assert (
            tmp_path / "logs" / "process-1.log"
        ).read_text() == f"start 1\nstart 2\nstart 3\ndone {starts}\n"


# Of the last process of four the slot is broken.
BROKEN = (
    COUNTED
    + """
count = int(os.environ["CAPIBARA_NUM_PROCESSES"])
print("count", count, os.environ["CAPIBARA_MIN_PROCESSES"], flush=True)
def wait():
    while True: time.sleep(0.05)
"""
)


def test_a_group_goes_on_with_fewer(tmp_path: Path) -> None:
    body = "if count == 4 and me == 3: os.kill(os.getpid(), 9)\nif count == 4: wait()"
    code, out, err = launched(tmp_path, 4, BROKEN + body, min_processes=2, grace=0.2)
    assert code == 0
    assert out.count("[3] start 1") == out.count("[3] start 2") == 1
    counts = {line for line in out if "count" in line}  # some may be stopped before they say theirs
    assert "[3] count 4 2" in counts
    assert {line for line in counts if "count 2" in line} == {"[0] count 2 2", "[1] count 2 2"}
    again = [line.partition("launch: ")[2] for line in err if "starting all again" in line]
    assert again[0] == "starting all again (1 of at most 10 times)"
    assert re.fullmatch(
        r"starting all again \(2 of at most 10 times\), with 2 of 4 processes; process 3 of 4 cannot be replaced: it "
        r"failed \d+ s after its start",
        again[1],
    )
    assert len(again) == 2
    until(lambda: not any(map(alive, pids(tmp_path, "[0-9]"))))


def test_all_are_tried_again_after_a_while(tmp_path: Path) -> None:
    # It is not replaced at all, works the second time, and the two before that stop by a signal.
    body = """
        if count == 2:
            signal.signal(15, lambda *_: sys.exit(143))
            wait()
        if me == 3 and tries == 1: os.kill(os.getpid(), 9)
        others(4)
    """
    code, out, err = launched(
        tmp_path,
        4,
        BROKEN + textwrap.dedent(body),
        restarts=9,
        min_processes=1,
        replacements=0,
        retry=1.0,
        grace=0.2,
    )
    assert code == 0
    again = [line.partition("launch: ")[2] for line in err if "starting all again" in line]
    assert again[0].startswith("starting all again (1 of at most 9 times), with 2 of 4 processes")
    assert again[1:] == ["starting all again, with 4 processes instead of 2"]
    assert "[3] start 2" in out


def test_a_slot_that_stays_broken_does_not_use_up_the_restarts(tmp_path: Path) -> None:
    # It is tried twice again, and the other one goes on after each.
    body = """
        if me == 1: sys.exit(5)
        signal.signal(15, lambda *_: sys.exit(143))
        if count == 2 or tries < 6: wait()
    """
    code, _, err = launched(
        tmp_path,
        2,
        BROKEN + textwrap.dedent(body),
        restarts=1,
        min_processes=1,
        replacements=0,
        retry=0.1,
        grace=0.2,
    )
    assert code == 0
    again = [line.partition("launch: ")[2] for line in err if "starting all again" in line]
    assert sum(line.startswith("starting all again (") for line in again) == 1
    assert (
        sum(line.startswith("starting all again, with 1 of 2 processes; process 1 of 2") for line in again)
        >= 2
    )


def test_where_too_few_are_left_all_are_tried_again(tmp_path: Path) -> None:
    # One is killed while there are four, and two while there are two: after that nothing is wrong.
    body = """
        killed = pathlib.Path(sys.argv[1], "killed of two")
        if count == 2 and me == 1:
            killed.touch()
            os.kill(os.getpid(), 9)
        if not killed.exists():
            if me == 3: os.kill(os.getpid(), 9)
            wait()
    """
    code, _, err = launched(
        tmp_path,
        4,
        BROKEN + textwrap.dedent(body),
        restarts=5,
        min_processes=2,
        replacements=0,
        retry=600.0,
        grace=0.2,
    )
    assert code == 0
    assert sizes_of(err) == [("1", "2"), ("2", "2"), ("3", "4")]
    last = [line for line in err if "starting all again" in line][-1]
    assert last.endswith(", and no divisor of 4 from min_processes=2 on would be left")


def test_a_group_that_stays_broken_ends_with_its_restarts(tmp_path: Path) -> None:
    body = "if me == count - 1: sys.exit(7)\nwait()"
    code, out, err = launched(
        tmp_path, 4, BROKEN + body, restarts=3, min_processes=2, replacements=0, retry=600.0, grace=0.2
    )
    assert code == 7
    assert {line for line in out if "count" in line} >= {"[3] count 4 2", "[1] count 2 2"}
    assert sizes_of(err) == [("1", "2"), ("2", "2"), ("3", "4")]
    assert err[-1].startswith(
        "capibara launch: process 3 of 4 failed with exit code 7; the others were stopped"
    )


def sizes_of(err: list[str]) -> list[tuple[str, ...]]:
    """Of each restart its number, and how many processes it has."""
    found = (re.search(r"starting all again \((\d) of .*\), with (\d) of 4", line) for line in err)
    return [one.groups() for one in found if one is not None]


def test_a_signal_while_all_are_stopped_to_be_more(tmp_path: Path) -> None:
    body = """
        got = []
        signal.signal(15, lambda number, _: got.append(number))
        pathlib.Path(sys.argv[1], f"ready {me} of {count} {tries}").write_text(str(os.getpid()))
        if count == 4 and me == 3: others(4); os.kill(os.getpid(), 9)
        while not got: time.sleep(0.005)
        if count == 4: sys.exit(143)
        pathlib.Path(sys.argv[1], f"asked {me}").write_text(str(os.getpid()))
        time.sleep(0.5)
        print("got", got, flush=True)
        sys.exit(143)
    """
    options = ("--min-processes", "2", "--replacements", "0", "--retry", "0.5", "--grace", "1")
    with started(tmp_path, 4, BROKEN + textwrap.dedent(body), *options) as launcher:
        until(lambda: len(pids(tmp_path, "asked *")) == 2)
        launcher.send_signal(signal.SIGTERM)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 143
    assert [line for line in sorted(out.splitlines()) if "got" in line] == ["[0] got [15]", "[1] got [15]"]
    assert err.splitlines()[-1] == "capibara launch: stopped by SIGTERM"


def test_what_a_process_started_is_gone_with_it(tmp_path: Path) -> None:
    body = """
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
        pathlib.Path(sys.argv[1], f"child {me}").write_text(str(child.pid))
        others(2)
    """
    code, _, _ = launched(tmp_path, 2, body)
    assert code == 0
    assert all_gone(tmp_path, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_process_once(tmp_path: Path, number: signal.Signals) -> None:
    body = """
        got = []
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, lambda number, _: got.append(number))
        pathlib.Path(sys.argv[1], f"ready {me}").write_text(str(os.getpid()))
        while not got: time.sleep(0.005)
        time.sleep(0.2)
        print("got", got, flush=True)
        sys.exit(128 + got[0])
    """
    with started(tmp_path, 4, body) as launcher:
        until(lambda: len(pids(tmp_path, "ready *")) == 4)
        launcher.send_signal(number)
        out, err = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + number
    assert sorted(out.splitlines()) == [f"[{n}] got [{number.value}]" for n in range(4)]
    assert err.splitlines()[-1] == f"capibara launch: stopped by {number.name}"
    assert all_gone(tmp_path, 8)


@pytest.mark.parametrize("grace", [20, 0])
def test_what_a_script_started_has_time_to_end_by_a_signal(tmp_path: Path, grace: int) -> None:
    # The script ends at once by the signal; the training that it started takes longer.
    body = """
        def save(number, _):
            time.sleep(0.3)
            print("saved after", number, flush=True)
            sys.exit(0)
        if sys.argv[2:]:
            signal.signal(15, save)
            pathlib.Path(sys.argv[1], f"ready {me}").write_text(str(os.getpid()))
            time.sleep(600)
        subprocess.run([sys.executable, "-S", *sys.argv, "training"])
    """
    with started(tmp_path, 2, body, "--grace", str(grace)) as launcher:
        until(lambda: len(pids(tmp_path, "ready *")) == 2)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.stdout is not None
        saved = sorted(launcher.stdout.readline() for _ in range(2))
        if grace:
            assert saved == ["[0] saved after 15\n", "[1] saved after 15\n"]
        else:
            assert saved == ["", ""]
            assert launcher.wait(timeout=60) == 143
            assert all_gone(tmp_path, 4)


def test_processes_that_do_not_stop_are_killed_at_the_third_signal(tmp_path: Path) -> None:
    body = """
        signal.signal(15, signal.SIG_IGN)
        pathlib.Path(sys.argv[1], f"ready {me}").write_text(str(os.getpid()))
        time.sleep(600)
    """
    with started(tmp_path, 4, body) as launcher:
        until(lambda: len(pids(tmp_path, "ready *")) == 4)
        for _ in range(3):
            assert launcher.poll() is None
            launcher.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert launcher.wait(timeout=60) == 143
    assert all_gone(tmp_path, 8)


def test_no_process_outlives_a_launcher_that_was_killed(tmp_path: Path) -> None:
    with started(tmp_path, 3, "signal.signal(15, signal.SIG_IGN)\ntime.sleep(600)") as launcher:
        assert all(map(alive, pids(tmp_path)))
        launcher.kill()
        launcher.wait()
        assert all_gone(tmp_path, 3)


def test_a_reader_that_goes_away_ends_all(tmp_path: Path) -> None:
    body = "while True: print('a line'); time.sleep(0.01)"
    with started(tmp_path, 2, body) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.close()
        assert launcher.wait(timeout=60) == 141
        assert all_gone(tmp_path, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "2"], "command: got none"),
        (["--", "train"], "-n: got none"),
        (["-n", "0", "--", "train"], "count=0"),
        (["-n", "2", "--devices", "0", "--", "train"], "devices=0"),
        (["-n", "2", "--grace", "-1", "--", "train"], "grace=-1.0"),
        (["-n", "2", "--restarts", "-1", "--", "train"], "restarts=-1"),
        (
            ["-n", "2", "--min-processes", "3", "--", "train"],
            "min_processes=3: expected an integer from 1 to count=2",
        ),
        (["-n", "2", "--min-processes", "0", "--", "train"], "min_processes=0"),
        (["-n", "2", "--min-processes", "1", "--replacements", "-1", "--", "train"], "replacements=-1"),
        (["-n", "2", "--min-processes", "1", "--retry", "0", "--", "train"], "retry=0.0"),
        (["-n", "2", "--retry", "9", "--", "train"], "--retry is for groups that go on with fewer"),
        (
            ["--jobset", "x", "--image", "y", "--min-processes", "1", "--", "train"],
            "--min-processes is for processes",
        ),
        (["-n", "2", "--", "trian"], "Did you mean 'train'?"),
        (["-n", "2", "--", "launch", "-n", "2"], "'launch'"),
        (["-n", "2", "--logs", "/dev/null/logs", "--", "train"], "could not start process 0"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from capibara.cli import main

    assert main(["launch", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="command: got '/not/there'"):
        launch_processes(["/not/there"], 2)
    with pytest.raises(ConfigError, match="command: got none"):
        launch_processes([], 2)
