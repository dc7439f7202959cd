"""A fixture that runs code in a fresh interpreter: what an import does can only be seen in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
from emulation import emulated


@pytest.fixture(scope="session")
def fresh_python() -> Callable[..., Any]:
    """``fresh_python(code, devices=None)``: run ``code``, return what it printed last, read as JSON."""

    def run(code: str, *, devices: int | None = None, arguments: tuple[str, ...] = ()) -> Any:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONHASHSEED": "0"}
        if devices is not None:
            environment["XLA_FLAGS"] = emulated(devices)
        command = [sys.executable, "-W", "error", *arguments, "-c", textwrap.dedent(code)]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture
def no_compilation_cache() -> Iterator[None]:
    """As where nobody has chosen a folder for compiled programs; `make test` has."""
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    jax.config.update("jax_compilation_cache_dir", before)
