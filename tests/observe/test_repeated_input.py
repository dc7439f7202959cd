"""The standard input of a program that is run several times."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from capibara.observe.bottlenecks.repeated_input import RepeatedInput

LINE, ALL = "import sys; print(sys.stdin.readline().strip())", "import sys; print(len(sys.stdin.read()))"
NOTHING = "print('done')"


def said(program: str, source: int | None) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], stdin=source, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_what_a_pipe_had_is_there_again():
    reads, writes = os.pipe()
    text = b"first\n" + b"x" * 1_000_000

    def write() -> None:
        rest = text
        while rest:
            rest = rest[os.write(writes, rest) :]
        os.close(writes)

    writer = threading.Thread(target=write)
    writer.start()
    with RepeatedInput(reads) as again:
        assert [said(ALL, again.next()) for _ in range(3)] == [str(len(text))] * 3
    writer.join()
    os.close(reads)


def test_a_pipe_that_nobody_closes_holds_nothing_up():
    reads, writes = os.pipe()
    os.write(writes, b"first\nsecond\n")
    with RepeatedInput(reads) as again:
        assert said(LINE, again.next()) == "first"
        assert said(NOTHING, again.next()) == "done"
        assert said(LINE, again.next()) == "first"
    os.close(writes)
    os.close(reads)


def test_a_file_is_read_from_the_same_place(tmp_path: Path):
    (tmp_path / "a").write_text("first\nsecond\n")
    with (tmp_path / "a").open("rb", buffering=0) as file:
        file.seek(6)
        with RepeatedInput(file.fileno()) as again:
            assert [said(LINE, again.next()) for _ in range(2)] == ["second"] * 2


@pytest.mark.parametrize("closed", [False, True])
def test_others_are_left_to_the_program(closed: bool):
    device = os.open(os.devnull, os.O_RDONLY)
    if closed:
        os.close(device)
    with RepeatedInput(device) as again:
        assert again.next() is None
    if not closed:
        os.close(device)
