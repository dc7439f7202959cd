"""What ``pip install capibara-jax`` without extras can do, and what it says about the rest.

A process in which every package outside the base dependencies, and what those need themselves, cannot be
imported stands in for a fresh environment. Which packages those are is read from ``pyproject.toml`` and from
the installed metadata, so a new import of an undeclared package fails here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

BLOCKER = """
import importlib.abc, json, os, sys

class _NotInstalled(importlib.abc.MetaPathFinder):
    blocked = frozenset(json.loads(os.environ["BLOCKED"]))

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, _NotInstalled())
"""

SMALL = [
    "model.num_layers=1",
    "model.embed_dim=16",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "train.batch_size=2",
    "train.sequence_length=16",
    "train.steps=2",
    "train.eval_batches=1",
    "optimizer.warmup_steps=1",
]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[str]) -> set[str]:
    """The distributions that pip would install, read from what is installed here."""
    found: set[str] = set()
    waiting = [(Requirement(text), frozenset({""})) for text in requirements]
    while waiting:
        requirement, extras = waiting.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": e}) for e in extras):
            continue
        name = canonical(requirement.name)
        if name in found:
            continue
        found.add(name)
        needs = importlib.metadata.distribution(name).requires or []
        waiting += [(Requirement(text), frozenset({"", *requirement.extras})) for text in needs]
    return found


@cache
def outside(base: frozenset[str]) -> frozenset[str]:
    """Names of installed modules that no distribution in ``base`` brings."""
    return frozenset(
        module
        for module, distributions in importlib.metadata.packages_distributions().items()
        if module != "capibara" and not {canonical(name) for name in distributions} & base
    )


@pytest.fixture(scope="module")
def blocked() -> frozenset[str]:
    names = outside(frozenset(closure(PROJECT["dependencies"])))
    # If the closure took in an extra, the tests below would prove nothing.
    assert {"optax", "orbax", "matplotlib", "pytest"} <= names
    assert not names & {"jax", "jaxlib", "numpy", "pydantic", "rich", "tomli_w", "scipy"}
    return names


def python(
    code: str, folder: Path, blocked: frozenset[str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "BLOCKED": json.dumps(sorted(blocked))}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKER + code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def command(folder: Path, blocked: frozenset[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return python("from capibara.cli import main; sys.exit(main())", folder, blocked, *arguments)


def test_every_module_can_be_imported(tmp_path: Path, blocked: frozenset[str]):
    code = """
import importlib, pkgutil, capibara
names = [module.name for module in pkgutil.walk_packages(capibara.__path__, "capibara.")]
names = [name for name in names if importlib.util.find_spec(name).origin.endswith(".py")]
for name in names:
    # What belongs to PyTorch alone says so in its name, and is imported by TorchBackend only; the server is an extra.
    own = name.rpartition(".")[2].startswith("torch_") or name.startswith("capibara.serve.http")
    if not name.endswith("__main__") and not own:
        importlib.import_module(name)
print(json.dumps(names))
"""
    done = python(code, tmp_path, blocked)
    assert done.returncode == 0, done.stderr
    assert {"capibara.train.trainer", "capibara.cli.train", "capibara.jax"} <= set(json.loads(done.stdout))


def test_the_library(tmp_path: Path, blocked: frozenset[str]):
    code = """
import capibara.jax as jax, capibara.jax.numpy as jnp
from capibara import compose as ml
from capibara.config import ModularModelConfig, TPUConfig
from capibara.core import ModularCapibaraModel
from capibara.serve.generate import Generator
from capibara.vq import VQbitLayer

model = ml.Model()
model |= ml.Linear(4)(input="x", output="hidden")
model += ml.Relu()
model += ml.Linear(3)(output="logits")
compiled = ml.compile(model, shapes={"x": [None, 2]})
logits = jax.jit(compiled.apply)(compiled.randomize_params(seed=0), {"x": jnp.ones((5, 2))})["logits"]

config = ModularModelConfig.from_toml("demo", sys.argv[1:] + ["model.num_layers=2", "model.pattern=attention,vq"])
language = ModularCapibaraModel(config)
text = Generator(language, language.params, state=language.state).tokens([1, 2, 3], max_tokens=4, seed=0)
print(json.dumps([logits.shape, len(list(text)), TPUConfig().num_chips, jax.get_backend_info()["name"]]))
"""
    done = python(code, tmp_path, blocked, *SMALL)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[5, 3], 4, 32, "cpu"]


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, ["train", "generate", "doctor", "migrate"]),
        (["--version"], 0, ["capibara 0."]),
        (["doctor"], 0, ["not installed", "Everything that Capibara needs works here."]),
        (["doctor", "--json"], 0, ['"jax_native_available": true']),
        (["migrate", "old.py"], 1, ["jax.tree_map", "jax.tree.map"]),
        (["generate"], 2, ["no checkpoint in", "runs/demo"]),
        (["train", *SMALL], 2, ["'optax'", "pip install 'capibara-jax[train]'"]),
    ],
    ids=["help", "version", "doctor", "doctor-json", "migrate", "generate", "train"],
)
def test_commands(tmp_path: Path, blocked: frozenset[str], arguments: list[str], code: int, words: list[str]):
    (tmp_path / "old.py").write_text("import jax\n\njax.tree_map(abs, [1])\n", encoding="utf-8")
    done = command(tmp_path, blocked, *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("orbax", "orbax-checkpoint"),
        pytest.param("optax", "optax", marks=pytest.mark.slow),
        pytest.param("matplotlib", "matplotlib", marks=pytest.mark.slow),
    ],
)
def test_training_asks_for_what_it_needs_before_it_begins(tmp_path: Path, module: str, package: str):
    """Not at the first checkpoint, after minutes or days."""
    done = command(tmp_path, frozenset({module}), "train", "--directory", "run", *SMALL)
    assert done.returncode == 2, done.stderr
    assert f"{package!r}, which is not installed" in done.stderr
    assert "pip install 'capibara-jax[train]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_the_error_in_python(tmp_path: Path, blocked: frozenset[str]):
    """One type for every part of the extra, also a built-in ImportError."""
    code = """
from pathlib import Path
from capibara.config import ModularModelConfig
from capibara.errors import CapibaraError, MissingExtraError
from capibara.train import CheckpointStore, build_optimizer, plot_losses
Path("metrics.jsonl").write_text("")
seen = []
for call in (
    lambda: build_optimizer(ModularModelConfig.from_toml("demo")),
    lambda: plot_losses(Path("metrics.jsonl"), Path("loss.png")),
    lambda: CheckpointStore(Path("checkpoints")).save(1, {"model": {}}, meta={}, config_toml=""),
):
    try:
        call()
    except MissingExtraError as error:
        assert isinstance(error, ImportError) and isinstance(error, CapibaraError)
        seen.append([error.package, error.extra])
print(json.dumps([seen, sorted(os.listdir("."))]))
"""
    done = python(code, tmp_path, blocked)
    assert done.returncode == 0, done.stderr
    seen, left = json.loads(done.stdout)
    assert seen == [["optax", "train"], ["matplotlib", "train"], ["orbax-checkpoint", "train"]]
    assert "loss.png" not in left


def test_a_broken_package_is_not_called_missing(tmp_path: Path):
    """Something that an installed package lacks itself: its own ImportError says what."""
    (tmp_path / "optax.py").write_text("import a_package_that_is_not_there\n", encoding="utf-8")
    code = """
sys.path.insert(0, os.getcwd())
from capibara.errors import MissingExtraError
from capibara.train import extras
try:
    extras.optax()
except ImportError as error:
    print(json.dumps([isinstance(error, MissingExtraError), error.name]))
"""
    done = python(code, tmp_path, frozenset())
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, "a_package_that_is_not_there"]


def test_every_extra_an_error_may_name_exists():
    """``MissingExtraError(…, extra, …)`` tells users to install that extra."""
    named = set()
    for file in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"capibara-jax\[(\w+)\]", file.read_text(encoding="utf-8")))
        named |= set(re.findall(r"MissingExtraError\([^()]*?, \"(\w+)\"", file.read_text(encoding="utf-8")))
    assert "train" in named
    assert named <= set(PROJECT["optional-dependencies"])
