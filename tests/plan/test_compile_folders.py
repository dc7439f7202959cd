"""Folders that compilations work in, and what becomes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from capibara.plan.compiler import folders
from capibara.plan.compiler.folders import remove_abandoned, work_folder

pytestmark = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no such locks here")
HOUR = 3600.0


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_cleaned", set())
    return tmp_path


def made(where: Path, name: str, *, hours: float, lock: bool = True) -> Path:
    folder = where / name
    (folder / "dump").mkdir(parents=True)
    (folder / "dump" / "module.txt").write_text("HloModule")
    if lock:
        (folder / "lock").touch()
    then = time.time() - hours * HOUR
    os.utime(folder, (then, then))
    return folder


def test_a_folder_lasts_as_long_as_its_block(temporary):
    with work_folder() as folder:
        assert folder.parent == temporary
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "dump").mkdir()
        then = time.time() - 48 * HOUR
        os.utime(folder, (then, then))
        assert remove_abandoned(temporary) == []  # however old: it is in use
        assert folder.exists()
    assert not list(temporary.iterdir())
    with pytest.raises(KeyboardInterrupt), work_folder():
        raise KeyboardInterrupt
    assert not list(temporary.iterdir())


def test_what_dead_processes_left_goes_at_the_next_start(temporary):
    dead = made(temporary, "capibara-compile-dead0000", hours=0.1)
    with work_folder() as folder:
        assert not dead.exists()
        again = made(temporary, "capibara-compile-later000", hours=0.1)
    assert not folder.exists()
    with work_folder():  # looked for once a process
        assert again.exists()


def test_only_what_is_abandoned_goes(temporary):
    gone = [
        made(temporary, "capibara-compile-dead0000", hours=0.1),
        made(temporary, "capibara-compile-nolock00", hours=25, lock=False),
    ]
    kept = [
        made(temporary, "capibara-compile-young000", hours=0),
        made(temporary, "capibara-compile-recent00", hours=2, lock=False),
        made(temporary, "capibara-compile-cache", hours=99),  # somebody's own, by its name
        made(temporary, "capibara-plan-old00000", hours=99, lock=False),
        made(temporary, "capibara-page-old", hours=99),
        made(temporary, "thesis", hours=99, lock=False),
    ]
    elsewhere = made(temporary, "elsewhere", hours=99)
    (temporary / "capibara-compile-link0000").symlink_to(elsewhere, target_is_directory=True)
    (temporary / "capibara-compile-file0000").write_text("mine")
    if os.getuid() == 0:
        kept.append(made(temporary, "capibara-compile-theirs00", hours=1))
        os.chown(kept[-1], 12345, 12345)
    # A lock that is a link is none of ours.
    kept.append(made(temporary, "capibara-compile-odd00000", hours=1, lock=False))
    (kept[-1] / "lock").symlink_to(elsewhere / "lock")
    then = time.time() - HOUR
    os.utime(kept[-1], (then, then))
    assert sorted(remove_abandoned(temporary)) == sorted(gone)
    assert not any(folder.exists() for folder in gone)
    assert all((folder / "dump" / "module.txt").exists() for folder in (*kept, elsewhere))
    assert (temporary / "capibara-compile-file0000").exists()
    assert remove_abandoned(temporary / "nowhere") == []


def test_the_folder_of_another_process_stays_while_it_lives(temporary):
    code = (
        "import sys, tempfile\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from capibara.plan.compiler.folders import work_folder\n"
        "with work_folder() as folder:\n"
        "    print(folder, flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(temporary)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        then = time.time() - HOUR
        os.utime(folder, (then, then))
        assert remove_abandoned(temporary) == []
        other.kill()
        other.wait()
        os.utime(folder, (then, then))
        assert remove_abandoned(temporary) == [folder]
