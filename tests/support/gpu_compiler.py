"""The compiler for NVIDIA GPUs, for tests that compile ahead of time on a machine that has none.

It is in two packages, ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt``, which ``make gpu-compiler`` puts into a folder of
its own inside the environment. They need no driver to compile for the chip that ``h100.txtpb`` describes: an H100 SXM,
as XLA's text form has it. The memory figures are the compiler's; nothing runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

__all__ = ["TARGET", "environment", "needs_gpu_compiler"]

TARGET = Path(__file__).parent / "h100.txtpb"
_FOLDER = Path(sys.prefix) / "cuda"
_INSTALLED = importlib.util.find_spec("jax_cuda13_plugin") is not None

needs_gpu_compiler = pytest.mark.skipif(
    not _INSTALLED and not (_FOLDER / "jax_cuda13_plugin").is_dir(),
    reason="jax-cuda13-plugin and jax-cuda13-pjrt, which compile for GPUs, are not installed",
)


def environment(**more: str) -> dict[str, str]:
    """Variables for a process that compiles for GPUs and runs on the CPU."""
    paths = [] if _INSTALLED else [str(_FOLDER)]
    paths += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "",
        **more,
    }
