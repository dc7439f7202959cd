"""Files are replaced whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO

import pytest

from capibara.files import replace_file


@pytest.mark.parametrize("durable", [False, True])
def test_content_of_each_kind(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    for content, expected in (
        ("¿qué?\n", "¿qué?\n".encode()),
        (b"\r\n", b"\r\n"),
        (lambda f: f.write(b"x"), b"x"),
    ):
        replace_file(path, content, durable=durable)
        assert path.read_bytes() == expected
        assert os.listdir(tmp_path) == ["file"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(stream: BinaryIO) -> None:
        stream.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, fail)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        replace_file(tmp_path / "file", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "missing" / "file", "")


def test_a_long_name(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250)
    replace_file(path, "whole")
    assert path.read_text() == "whole"
