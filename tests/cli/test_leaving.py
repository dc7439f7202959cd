"""What a verb says of paths and disks that fail: a line with a remedy, and an exit code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from capibara.cli import main
from capibara.cli._leaving import report_error

LONG = "a" * 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("profile", "show", LONG), "File name too long; give a shorter name"),
        (("profile", "--", f"{LONG}.py"), "File name too long; give a shorter name"),
        (("profile", "-o", LONG, "--", "program.py"), "File name too long"),
        (("profile", "-o", "loop", "--", "program.py"), "choose another one"),
        (
            ("profile", "--html", "program.py/x.html", "--", "program.py"),
            "is missing, or cannot be written to",
        ),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_paths_that_cannot_be(
    arguments: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text("")
    Path("loop").symlink_to("loop")
    assert main(list(arguments)) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("arguments", [("--help",), ("doctor", "--json")], ids=lambda value: value[0])
def test_an_output_that_is_full(arguments: tuple[str, ...], unbuffered: str):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "capibara", *arguments],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
        )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "capibara: the output: No space left on device; free some space, or write to another disk"
    )


def test_another_file_is_not_taken_for_the_output():
    """The system names no file where a write fails; what was printed before still reaches its reader."""
    program = """
from capibara.cli._leaving import report_error
print("result")
try:
    with open("/dev/full", "w") as file:
        file.write("x")
except OSError as error:
    raise SystemExit(0 if report_error(error) is None else 3)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "result\n", "")


@pytest.mark.parametrize("error", ["OSError(28, 'full', 'p')", "ValueError('a fault')"])
def test_a_process_ends_though_nothing_can_be_said(error: str):
    program = f"from capibara.cli._leaving import leave\nleave({error})"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", program], stderr=full, timeout=120)
    assert done.returncode == 1


@pytest.mark.parametrize("code", [errno.EACCES, errno.ENOSPC, errno.EROFS, errno.EIO])
def test_the_machine_may_be_better_next_time(code: int, capsys: pytest.CaptureFixture[str]):
    assert report_error(OSError(code, os.strerror(code), "runs/a")) == 1
    assert f"capibara: 'runs/a': {os.strerror(code)}; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [OSError("of no number"), OSError(errno.EACCES, "of a socket"), FileNotFoundError(errno.ENOENT, "", "a")],
    ids=str,
)
def test_faults_of_the_program_keep_their_traceback(error: OSError):
    assert report_error(error) is None


@pytest.mark.parametrize(("arguments", "code"), [("--version", 0), ("nothing", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_outputs_that_are_closed(arguments: str, code: int, closed: str):
    """The exit code is that of the verb, and what is said of an error is not printed among results."""
    command = f'"{sys.executable}" -m capibara {arguments} {closed}'
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == code
    assert done.stdout.startswith("capibara ") == (code == 0 and not closed.startswith(">"))
    assert ("there is no verb" in done.stderr) == (code == 2 and closed == ">&-")
    assert "Traceback" not in done.stderr
    assert "no verb" not in done.stdout
