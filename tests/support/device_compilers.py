"""Compilers for devices that this machine has not, in folders of their own inside the environment.

On the import path such a package makes JAX look for its device in every process; so tests start processes that have
it, and the others have not.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["DeviceCompiler"]


class DeviceCompiler:
    """A package that compiles for a device, installed as others are or in a folder beside them.

    Args:
      package: its import name.
      folder: in the environment's prefix, where ``make`` puts it.
      variables: what a process that compiles with it needs in its environment.
    """

    def __init__(self, package: str, folder: str, **variables: str) -> None:
        self._folder = Path(sys.prefix) / folder
        self._everywhere = importlib.util.find_spec(package) is not None
        self._variables = variables
        self.is_missing = not self._everywhere and not (self._folder / package).is_dir()

    def environment(self, **more: str) -> dict[str, str]:
        """Variables for a process that compiles for the device and runs on the CPU."""
        paths = [] if self._everywhere else [str(self._folder)]
        paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        base = {"PYTHONPATH": os.pathsep.join(paths), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        return {**os.environ, **base, **self._variables, **more}

    def ask(self, script: str, *arguments: str) -> Any:
        """What a script prints last, as JSON; it runs in a process of its own, which has the compiler."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, *arguments],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])
