"""`import mithril` is Capibara's compose where nothing else is called that, and never gets in the way of what is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

THEIRS = "theirs = True\n"
RECORD = "mithril/__init__.py,,\nmithril-9.9.dist-info/METADATA,,\nmithril-9.9.dist-info/WHEEL,,\n"


def _dummy(folder: Path) -> Path:
    """A wheel of a package that is really called mithril."""
    path = folder / "mithril-9.9-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("mithril/__init__.py", THEIRS)
        archive.writestr(
            "mithril-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: mithril\nVersion: 9.9\n"
        )
        archive.writestr(
            "mithril-9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("mithril-9.9.dist-info/RECORD", RECORD + "mithril-9.9.dist-info/RECORD,,\n")
    return path


class Environment:
    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False)
        self.python = folder / "bin" / "python"
        (self.site,) = folder.glob("lib/python*/site-packages")
        # What Capibara needs comes from the environment of the tests; a line of a .pth adds the folder, and does
        # not read the .pth files in it.
        (self.site / "zz-rest.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "pip", "--python", str(self.python), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", "-q", str(wheel))

    def run(self, code: str) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        command = [str(self.python), "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def mithril(self) -> str:
        return self.run("import mithril; print('theirs' if hasattr(mithril, 'theirs') else mithril.__file__)")


@pytest.mark.parametrize("ours_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_real_mithril_wins_and_is_left_alone(wheel: Path, tmp_path: Path, ours_first: bool):
    env = Environment(tmp_path / "env")
    dummy = _dummy(tmp_path)
    for each in (wheel, dummy) if ours_first else (dummy, wheel):
        env.install(each)
    assert env.mithril() == "theirs"
    assert (env.site / "mithril" / "__init__.py").read_text() == THEIRS
    env.pip("uninstall", "-y", "-q", "mithril")
    assert env.mithril() == str(env.site / "capibara_compat" / "mithril" / "__init__.py")
    env.install(dummy)
    env.pip("uninstall", "-y", "-q", "capibara-jax")
    assert env.mithril() == "theirs"
    assert not list((env.site / "capibara_compat").rglob("*"))  # pip may leave the empty folder
    assert not (env.site / "capibara-compat.pth").exists()


def test_without_one_the_name_is_compose(wheel: Path, tmp_path: Path):
    env = Environment(tmp_path / "env")
    env.install(wheel)
    code = """
import mithril as ml
import capibara.compose as compose
from mithril.models import Linear, Model
assert issubclass(ml.JaxBackend, compose.JaxBackend) and issubclass(ml.Model, compose.Model)
assert issubclass(Linear, compose.Model) and ml.Linear is Linear and Model is ml.Model and ml.float32 is compose.float32
assert set(compose.__all__) <= set(dir(ml))
print("same")
"""
    assert env.run(code) == "same"


def test_without_one_independent_core_is_compress(wheel: Path, tmp_path: Path):
    env = Environment(tmp_path / "env")
    env.install(wheel)
    code = """
import capibara.compress.system as system
from independent_core.compression_systems import system_integration_coordinator as coordinator
from independent_core.compression_systems.strategies import compression_strategy
from independent_core.compression_systems.tropical import unified_performance_monitor as monitor
from independent_core.compression_systems.model_compression_api import CompressionProfile, ModelCompressionAPI
import independent_core
assert coordinator.SystemConfiguration is system.SystemConfiguration
assert coordinator.SystemIntegrationCoordinator is system.SystemIntegrationCoordinator
assert compression_strategy.StrategySelector is system.StrategySelector
assert monitor.UnifiedPerformanceMonitor is system.UnifiedPerformanceMonitor
assert ModelCompressionAPI(CompressionProfile()).profile.mode == "balanced"
print(independent_core.__file__)
"""
    assert env.run(code) == str(env.site / "capibara_compat" / "independent_core" / "__init__.py")
    # A real package of that name wins, and is left alone.
    theirs = env.site / "independent_core"
    theirs.mkdir()
    (theirs / "__init__.py").write_text(THEIRS)
    assert env.run("import independent_core; print(independent_core.theirs)") == "True"
    env.pip("uninstall", "-y", "-q", "capibara-jax")
    assert (theirs / "__init__.py").read_text() == THEIRS
    assert env.run("import independent_core; print(independent_core.theirs)") == "True"
