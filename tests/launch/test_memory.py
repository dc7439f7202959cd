"""Memory of the launcher that its processes write into, and those in their place read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from capibara.launch import launch_processes, read_memory
from capibara.launch.memory import held_memory, memory_variables

PROGRAM = """
import os, signal, sys
files = [int(text) for text in os.environ["CAPIBARA_MEMORY"].split(",") if text]
me = os.environ["CAPIBARA_PROCESS_ID"].encode()
seen = [os.pread(file, 100, 0) for file in files]
with open(sys.argv[1] + "/" + me.decode(), "a") as log:
    log.write(repr(seen))
if not any(seen) and files:
    os.pwrite(files[1], b"of " + me, 0)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has files in memory")
def test_what_a_killed_process_wrote_is_there_for_the_next(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for restarts, code in ((1, 0), (0, 0)):
        with open(os.devnull, "wb") as nowhere:
            command = [sys.executable, "-S", "-c", PROGRAM, str(tmp_path)]
            found = launch_processes(command, 1, restarts=restarts, out=nowhere, err=nowhere)
        assert found == code
    assert (tmp_path / "0").read_text() == "[b'', b''][b'', b'of 0'][]"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has files in memory")
def test_only_the_launchers_files_are_taken(tmp_path: Path) -> None:
    with held_memory(2) as held:
        assert len({one for files in held for one in files}) == 4
        assert read_memory(memory_variables(held[1])) == held[1]
        with open(tmp_path / "mine", "wb") as other:
            assert read_memory({"CAPIBARA_MEMORY": f"{held[0][0]},{other.fileno()}"}) == ()
    assert read_memory(memory_variables(held[1])) == ()  # they are closed
    for text in ("", "3", "a,b", "1,2,3", "-1,2", "999999,999998"):
        assert read_memory({"CAPIBARA_MEMORY": text}) == ()
    assert read_memory({}) == ()


def test_without_such_files_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with held_memory(3) as held:
        assert held == [(), (), ()]
    assert memory_variables(()) == {"CAPIBARA_MEMORY": ""}
