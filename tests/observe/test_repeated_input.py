"""The standard input of a program that is run several times."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from capibara.errors import ConfigError
from capibara.observe.bottlenecks.repeated_input import RepeatedInput

LINE, ALL = "import sys; print(sys.stdin.readline().strip())", "import sys; print(len(sys.stdin.read()))"
NOTHING = "print('done')"


def said(program: str, source: int | None) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], stdin=source, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def _write_all(writes: int, text: bytes) -> None:
    while text:
        text = text[os.write(writes, text) :]
    os.close(writes)


def test_what_a_pipe_had_is_there_again():
    reads, writes = os.pipe()
    text = b"first\n" + b"x" * 1_000_000
    writer = threading.Thread(target=_write_all, args=(writes, text))
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


def test_a_full_disk_is_said_and_the_first_run_reads_all(monkeypatch: pytest.MonkeyPatch):
    class Full(io.BytesIO):
        """Takes 100,000 bytes, the last block in part."""

        def write(self, block, /) -> int:
            room = 100_000 - self.tell()
            if room <= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(bytes(block[:room]))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: Full())
    reads, writes = os.pipe()
    writer = threading.Thread(target=_write_all, args=(writes, b"x" * 200_000))
    writer.start()
    with RepeatedInput(reads) as again:
        assert said(ALL, again.next()) == "200000"
        with pytest.raises(ConfigError, match=r"cannot be kept .*No space left.*TMPDIR"):
            again.next()
    writer.join()
    os.close(reads)
