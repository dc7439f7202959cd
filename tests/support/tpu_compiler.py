"""The TPU compiler, for tests that compile ahead of time on a machine that has no TPU.

``make`` puts ``libtpu`` into a folder of its own inside the environment: where it is on the import path JAX looks for a
TPU in every process. A test starts a process with :func:`environment`.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

__all__ = ["environment", "needs_libtpu"]

_FOLDER = Path(sys.prefix) / "libtpu"
_INSTALLED = importlib.util.find_spec("libtpu") is not None

needs_libtpu = pytest.mark.skipif(
    not _INSTALLED and not (_FOLDER / "libtpu").is_dir(),
    reason="libtpu, which compiles for TPUs, is not installed",
)


def environment(**more: str) -> dict[str, str]:
    """Variables for a process that compiles for TPUs and runs on the CPU."""
    paths = [] if _INSTALLED else [str(_FOLDER)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "XLA_FLAGS": "",
        **more,
    }
