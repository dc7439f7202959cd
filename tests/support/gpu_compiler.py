"""The compiler for NVIDIA GPUs, for tests that compile ahead of time on a machine that has none.

It is in two packages, ``jax-cuda13-plugin`` and ``jax-cuda13-pjrt`` (``make gpu-compiler``). They need no driver to
compile for the chip that the planner's ``h100.txtpb`` describes: an H100 SXM, as XLA's text form has it. The memory
figures are the compiler's; nothing runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from device_compilers import DeviceCompiler

from capibara.plan import gpus

__all__ = ["TARGET", "ask", "environment", "needs_gpu_compiler"]

TARGET = Path(gpus.__file__).with_name("h100.txtpb")
_COMPILER = DeviceCompiler("jax_cuda13_plugin", "cuda")
environment, ask = _COMPILER.environment, _COMPILER.ask
needs_gpu_compiler = pytest.mark.skipif(
    _COMPILER.is_missing,
    reason="jax-cuda13-plugin and jax-cuda13-pjrt, which compile for GPUs, are not installed",
)
