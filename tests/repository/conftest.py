"""The wheel that several tests look into."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once for all processes that test side by side, with the kernels of the tree where they are current."""
    together = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        together = together.parent
    folder = together / "wheel"
    with open(together / "wheel.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            unfinished = together / "wheel-unfinished"
            command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(unfinished)]
            environment = {**os.environ, "CAPIBARA_REUSE_LIBRARY": "1"}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert done.returncode == 0, done.stdout + done.stderr
            unfinished.rename(folder)
    (built,) = folder.glob("*.whl")
    return built
