"""The TPU compiler, ``libtpu``, for tests that compile ahead of time on a machine that has no TPU."""

from __future__ import annotations

import pytest
from device_compilers import DeviceCompiler

__all__ = ["ask", "environment", "needs_libtpu"]

_COMPILER = DeviceCompiler("libtpu", "libtpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
environment, ask = _COMPILER.environment, _COMPILER.ask
needs_libtpu = pytest.mark.skipif(
    _COMPILER.is_missing, reason="libtpu, which compiles for TPUs, is not installed"
)
