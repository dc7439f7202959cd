"""``python -m benchmarks``, run as a user does, over benchmarks made for the purpose."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

QUICK = '''
"""A quick one."""
def run():
    print("noise on standard output")
    return [{"what": "a | b", "peer": "c", "ratio": 1.5, "seconds": 0.25}]
'''
BROKEN = '''
"""One that fails."""
def run():
    raise RuntimeError("out of luck")
'''
EMPTY = '''
"""One without a ratio."""
def run():
    return [{"what": "x", "peer": "y", "ratio": float("nan")}]
'''
HELPER = "def helper(): pass\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    package = tmp_path / "benchmarks"
    package.mkdir()
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "benchmarks" / name, package)
    (package / "quick.py").write_text(QUICK)
    (package / "helper.py").write_text(HELPER)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def test_rows_are_written_and_printed(folder: Path):
    done = run(folder, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["rows"] == [
        {"benchmark": "quick", "what": "a | b", "peer": "c", "ratio": 1.5, "seconds": 0.25}
    ]
    assert report["machine"]["versions"]["python"]
    assert report["failed"] == {}
    assert json.loads((folder / "bench-results/benchmarks.json").read_text()) == report
    page = (folder / "bench-results/benchmarks.md").read_text()
    assert "| quick | a \\| b |  | c | 1.5 | seconds 0.25 |" in page
    assert sorted(path.name for path in (folder / "bench-results").iterdir()) == [
        "benchmarks.json",
        "benchmarks.md",
    ]


@pytest.mark.slow
def test_long_ones_run_when_named(folder: Path):
    (folder / "benchmarks/long.py").write_text('"""Long."""\nLONG = "an hour"\n' + QUICK.split('"""', 2)[2])
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert "not run: long (an hour); python -m benchmarks long" in done.stdout
    for arguments in (["--json", "long"], ["--json", "--all"]):
        named = {row["benchmark"] for row in json.loads(run(folder, *arguments).stdout)["rows"]}
        assert "long" in named
        assert ("quick" in named) == ("--all" in arguments)


@pytest.mark.slow
def test_one_that_fails_does_not_stop_the_others(folder: Path):
    (folder / "benchmarks/broken.py").write_text(BROKEN)
    (folder / "benchmarks/empty.py").write_text(EMPTY)
    done = run(folder)
    assert done.returncode == 1
    assert "out of luck" in done.stderr
    assert "ratio: got nan" in done.stderr
    assert "broken failed" in done.stdout
    assert "1.5" in done.stdout
    report = json.loads((folder / "bench-results/benchmarks.json").read_text())
    assert set(report["failed"]) == {"broken", "empty"}
    assert len(report["rows"]) == 1


def test_a_misspelt_name(folder: Path):
    done = run(folder, "quik")
    assert done.returncode == 2
    assert "Did you mean 'quick'?" in done.stderr


def test_the_real_ones_are_found():
    done = run(ROOT, "--help")
    assert done.returncode == 0
    for name in ("train_step", "compile_time", "import_cost"):
        assert f"  {name}" in done.stdout
    assert "torch_decoder" not in done.stdout
