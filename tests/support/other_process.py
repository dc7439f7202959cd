"""Code that needs a process of its own: other devices, another compiler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["run_apart"]

SUPPORT = Path(__file__).parent


def run_apart(code: str, *args: str, **env: str) -> Any:
    """Run Python code on the CPU with the modules of this folder; gives what it prints, as JSON, after ``RESULT``."""
    paths = [str(SUPPORT), *filter(None, [env.pop("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **env, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.rpartition("RESULT")[2])
