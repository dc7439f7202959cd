"""The generated stubs: up to date, and a type checker sees right names and flags typos."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from capibara.jax import _stubgen

SAMPLE = """
import capibara.jax as jax
import capibara.jax.numpy as jnp
import capibara.jax.nn as nn
from capibara.jax import random
import capibara.jax.scipy.linalg
from capibara.jax.experimental import pallas as pl
from capibara.jax.sharding import Mesh, PartitionSpec
from capibara.jax._src.core import TPUv4MeshConfigurations, create_tpu_mesh_config, with_sharding_constraint
from capibara.jax.tpu_v4 import tpu_v4_optimization_context

x: jax.Array = jnp.ones((3,))
nn.relu(x)
random.normal(random.PRNGKey(0), (3,))
jnp.random.normal(jax.random.PRNGKey(0), (3,))
jax.jit(lambda x: x)(x)
jax.numpy.linalg.norm(x)
jax.config.update("jax_debug_mode", True)
jax.config.jax_enable_x64
jax.get_backend_info()["name"].upper()
jax.get_optimization_status()
jax.device_memory_peak() // 2
jax.pjit
jax.__version__.split(".")
jax.diagnostics.check_installation().error_message.upper()
capibara.jax.scipy.linalg.cholesky(x)
pl.pallas_call
"""

TYPOS = """
import capibara.jax as jax
import capibara.jax.numpy as jnp
import capibara.jax.nn as nn
from capibara.jax import randum
from capibara.jax.scipy.linalg import choleski
import capibara.jax.nope

jnp.onez((3,))
nn.rellu(1.0)
jax.jitt
jax.numpy.onez
jax.get_backend_inf()
jnp.random.normall
jax.diagnostics.check_instalation
"""


def test_the_stubs_are_up_to_date():
    first = (_stubgen.HERE / "__init__.pyi").read_text(encoding="utf-8")
    if f"JAX {jax.__version__}." not in first:
        pytest.skip("the stubs in the repository list the modules of another JAX")
    assert _stubgen.differences() == []


def test_write_repairs_what_check_finds(tmp_path, capsys):
    assert _stubgen.write(tmp_path) > 150
    assert _stubgen.differences(tmp_path) == []
    (tmp_path / "nn" / "__init__.pyi").write_text("")
    (tmp_path / "lax" / "__init__.pyi").unlink()
    (tmp_path / "stale").mkdir()
    (tmp_path / "stale" / "__init__.pyi").write_text(_stubgen.HEADER)
    wrong = {"stale: nn/__init__.pyi", "missing: lax/__init__.pyi", "superfluous: stale/__init__.pyi"}
    assert set(_stubgen.differences(tmp_path)) == wrong
    _stubgen.write(tmp_path)
    assert _stubgen.differences(tmp_path) == []


def pyright(tmp_path: Path, **files: str) -> dict[str, dict[int, str]]:
    """Errors by file and line."""
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "standard", "pythonVersion": "3.11"}')
    checker = Path(sys.executable).parent / "pyright"
    if not checker.exists():
        pytest.skip("Pyright is not installed beside this Python")
    command = [str(checker), "--outputjson", "--pythonpath", sys.executable, "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found: dict[str, dict[int, str]] = {name: {} for name in files}
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        if each["severity"] == "error":
            found[Path(each["file"]).stem][each["range"]["start"]["line"] + 1] = each["message"]
    return found


def test_pyright_resolves_right_names_and_flags_typos(tmp_path):
    found = pyright(tmp_path, right=SAMPLE, wrong=TYPOS)
    assert found["right"] == {}
    lines = TYPOS.splitlines()
    expected = {number for number in range(5, len(lines) + 1) if lines[number - 1].strip()}
    assert set(found["wrong"]) == expected


@pytest.mark.slow
def test_pyright_sees_every_name_that_it_sees_in_jax(tmp_path):
    """For each module the names it knows through the stub are those it knows in JAX itself."""
    modules = (
        "",
        ".numpy",
        ".numpy.linalg",
        ".nn",
        ".lax",
        ".random",
        ".tree_util",
        ".sharding",
        ".scipy.special",
    )
    texts = {}
    for prefix in ("jax", "capibara.jax"):
        lines = []
        for number, module in enumerate(modules):
            names = [n for n in dir(importlib.import_module("jax" + module)) if not n.startswith("_")]
            lines += [f"import {prefix}{module} as m{number}", *(f"m{number}.{name}" for name in names)]
        texts["plain" if prefix == "jax" else "ours"] = "\n".join(lines) + "\n"
    found = pyright(tmp_path, **texts)
    lines = texts["ours"].splitlines()
    worse = {lines[line - 1] for line in set(found["ours"]) - set(found["plain"])}
    assert len(lines) > 1000
    assert worse == set()
