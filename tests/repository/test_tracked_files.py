"""What the tracked files may not hold: paths of somebody's machine, pickles, anything large, conflict marks."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The names are put together here, so that this file does not find itself.
MACHINE_PATH = re.compile("/" + "(?:work|root|home/[a-z]|Users/[A-Za-z])" + "/?[A-Za-z0-9_.-]*/")
LARGEST = 512 * 1024


@pytest.fixture(scope="module")
def tracked() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing is tracked")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def test_no_path_of_a_machine(tracked: list[Path]):
    found = []
    for path in tracked:
        text = path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            if match := MACHINE_PATH.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert not found


def test_the_pattern_finds_what_it_should():
    for path in ("/" + "home/ana/models", "/" + "root/.cache/x", "see /" + "Users/Bo/x."):
        assert MACHINE_PATH.search(path)
    for path in ("/tmp/tpu_trace", "https://example.org/homework/", "the home/office", "workspace/x"):
        assert not MACHINE_PATH.search(path)


def test_files_are_small_and_none_is_a_pickle(tracked: list[Path]):
    for path in tracked:
        assert path.stat().st_size <= LARGEST, path
        assert path.suffix not in (".pkl", ".pickle", ".pt", ".pth"), path


def test_no_conflict_marks(tracked: list[Path]):
    mark = re.compile("^(<{7} |>{7} )", re.MULTILINE)
    assert not [path for path in tracked if mark.search(path.read_text(encoding="utf-8", errors="replace"))]
