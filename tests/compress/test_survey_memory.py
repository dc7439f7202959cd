"""Looking at a tensor that lies in a memory map takes bounded memory, whatever its size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, threading
import numpy as np
from pathlib import Path
from capibara.compress.allocation import allocate, survey
from capibara.compress.formats import get_format
from capibara.compress.models.source import Tensors

path, count, form = Path(sys.argv[1]), int(sys.argv[2]), get_format("BF16")
source = np.memmap(path, np.uint16, "w+", shape=(count,))
some = (np.random.default_rng(0).normal(size=1 << 20).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
for at in range(0, count, 1 << 20):
    source[at : at + (1 << 20)] = some
del source

def anonymous():
    # Pages of files come and go; what the process itself holds is this.
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

peak, stop = 0, threading.Event()

def watch():
    global peak
    while not stop.wait(0.005):
        peak = max(peak, anonymous())

source = np.memmap(path, np.uint16, "r")
before, thread = anonymous(), threading.Thread(target=watch)
thread.start()
found = survey(Tensors({"x": (form, (count // 1024, 1024))}, lambda name: source))
allocation = allocate(found, 4.0)
stop.set()
thread.join()
print(peak - before, found.total / allocation.size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_survey_holds_some_chunks_of_a_tensor(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "raw"), str(3 << 26)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, ratio = map(float, done.stdout.split())
    assert peak < 300 << 20 < 2 * (3 << 26)
    assert ratio == pytest.approx(4, rel=0.02)
