"""Everything of the system without JAX, and without PyTorch too: processes in which they cannot be imported."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BLOCKER = """
import importlib.abc, os, sys, warnings
import numpy as np

class NotInstalled(importlib.abc.MetaPathFinder):
    blocked = os.environ["BLOCKED"].split()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
"""

HAS_TORCH = importlib.util.find_spec("torch") is not None
WITHOUT = [
    pytest.param("jax jaxlib", marks=pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")),
    "jax jaxlib torch ml_dtypes",
]

SYSTEM = """
from independent_core.compression_systems.system_integration_coordinator import (
    SystemIntegrationCoordinator, SystemConfiguration
)
with warnings.catch_warnings(record=True) as heard:
    warnings.simplefilter("always")
    for _ in range(2):
        config = SystemConfiguration(enable_jax=True, jax_backend="gpu")
        system = SystemIntegrationCoordinator(config)
        chosen = system.get_component("strategy_selector").select(np.zeros(3), strategy="jax")
        values = np.random.default_rng(0).normal(size=(96, 64)).astype(np.float32)
        if "torch" not in os.environ["BLOCKED"]:
            import torch
            values = torch.from_numpy(values)
        exact, small = system.compress(values), system.compress(values, ratio=5)
        back = system.decompress(exact)
        assert type(back) is type(values) and bool((back == values).all())
        product = system.get_component("tropical_engine").matmul(values, values.T)
        assert type(product) is type(values)
        status = system.get_system_status()
        system.shutdown()
assert len(heard) == 1, [str(w.message) for w in heard]
assert "JAX does not run here" in str(heard[0].message)
assert not any(name.startswith("jax") for name in status["components"])
assert "jax" not in sys.modules
print(status["engine"], "No module named" in status["jax"]["problem"], small.compression_ratio > 4.8, exact.engine)
"""

FILES = """
import json
from capibara.compress.archive_files import compress_files, decompress_files, plan_compress, plan_decompress
header = {"w": {"dtype": "BF16", "shape": [64, 96], "data_offsets": [0, 64 * 96 * 2]}}
text = json.dumps(header).encode()
data = (np.random.default_rng(0).normal(size=64 * 96).astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
with open("m.safetensors", "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text + data)
compress_files(plan_compress("m.safetensors", "m.capi"))
decompress_files(plan_decompress("m.capi", "again.safetensors"))
again = open("again.safetensors", "rb").read()
print(again.endswith(data), os.path.getsize("m.capi") < 0.8 * len(data), "jax" in sys.modules)
"""


def python(code: str, blocked: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKER + code],
        cwd=folder,
        env={**os.environ, "BLOCKED": blocked},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.thin(2)
@pytest.mark.parametrize("blocked", WITHOUT)
def test_the_system(tmp_path: Path, blocked: str) -> None:
    done = python(SYSTEM, blocked, tmp_path)
    assert done.returncode == 0, done.stderr
    engine, *rest = done.stdout.split()
    assert engine == ("numpy" if "torch" in blocked else "torch")
    assert rest[:2] == ["True", "True"]
    assert rest[2] in ("native", "numpy")


@pytest.mark.parametrize("blocked", WITHOUT)
def test_files(tmp_path: Path, blocked: str) -> None:
    done = python(FILES, blocked, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True", "False"]


@pytest.mark.thin(2)
@pytest.mark.parametrize("blocked", WITHOUT)
def test_the_integration_test(tmp_path: Path, blocked: str) -> None:
    code = (
        "from independent_core.compression_systems.test_jax_integration import main; raise SystemExit(main())"
    )
    done = python(code, blocked, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 of 5 checks passed" in done.stdout
    assert "jax: not here" in done.stdout


@pytest.mark.parametrize("blocked", WITHOUT)
def test_every_module_that_needs_no_jax_can_be_imported(tmp_path: Path, blocked: str) -> None:
    code = """
import importlib, pkgutil, capibara.compress
for module in pkgutil.walk_packages(capibara.compress.__path__, "capibara.compress."):
    last = module.name.rpartition(".")[2]
    # What decodes, multiplies or keeps arrays on a device needs JAX.
    if not last.startswith(("jax_", "torch_")) and last not in ("device_memory", "direct", "on_device"):
        importlib.import_module(module.name)
assert "jax" not in sys.modules and "torch" not in sys.modules
"""
    done = python(code, blocked, tmp_path)
    assert done.returncode == 0, done.stderr


def test_tensors_of_packages_that_are_not_here(tmp_path: Path) -> None:
    code = """
from capibara.compress.system import CompressedTensor, MissingEngineError, SystemConfiguration
from capibara.compress.system import SystemIntegrationCoordinator
import dataclasses
with SystemIntegrationCoordinator(SystemConfiguration(enable_jax=False)) as system:
    made = system.compress(np.arange(9.0))
    for kind in ("jax", "torch"):
        other = dataclasses.replace(made, kind=kind, device="cuda:0")
        assert type(system.decompress(other)) is np.ndarray
        try:
            system.decompress(other, kind=kind)
        except MissingEngineError as error:
            assert isinstance(error, ImportError) and f"pip install {kind}" in str(error)
        else:
            raise AssertionError
"""
    done = python(code, "jax jaxlib torch", tmp_path)
    assert done.returncode == 0, done.stderr
