"""What is installed is what stands in the repository: nothing is left out of the wheel, nothing slips in."""

from __future__ import annotations

import configparser
import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import capibara

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_file_of_the_package_is_in_the_wheel_and_no_other(wheel: Path):
    source = ROOT / "src"
    wanted = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and ".egg-info" not in str(path)
    }
    wanted |= {
        f"capibara_compat/{path.relative_to(ROOT / 'compat').as_posix()}"
        for path in (ROOT / "compat").rglob("*.py")
    }
    wanted.add("capibara-compat.pth")
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == wanted
    for needed in (
        "capibara/py.typed",
        "capibara/jax/__init__.pyi",
        "capibara/config/configs_toml/demo.toml",
        "capibara/config/configs_toml/production/tpu_v4.toml",
        "capibara/hardware/chips.toml",
        "capibara/hardware/prices.toml",
        "capibara/migrate/history.toml",
    ):
        assert needed in found


def test_metadata(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = email.message_from_bytes(archive.read(f"{folder}/METADATA"))
        commands = configparser.ConfigParser()
        commands.read_string(archive.read(f"{folder}/entry_points.txt").decode())
        licence = archive.read(f"{folder}/licenses/LICENSE").decode()
    assert metadata["Name"] == "capibara-jax"
    assert metadata["Version"] == capibara.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in licence
    assert commands["console_scripts"]["capibara"] == "capibara.cli:main"
    assert {"train", "plan", "serve", "torch", "gpu", "tpu", "docs"} <= set(
        metadata.get_all("Provides-Extra", [])
    )


def test_the_wheel_works_on_its_own(wheel: Path, tmp_path: Path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    script = (
        "import capibara, pathlib\n"
        "from capibara.config import ModularModelConfig\n"
        "from capibara.hardware import get_chip, load_prices\n"
        "ModularModelConfig.from_toml('demo')\n"
        "path = 'capibara/config/configs_toml/production/tpu_v4.toml'\n"
        "assert ModularModelConfig.from_toml(path).tpu.mesh_shape == (4, 8)\n"
        "assert get_chip('v4').peak('bfloat16') > 0 and load_prices()\n"
        "print(pathlib.Path(capibara.__file__).parent)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == site / "capibara"


def test_one_version_everywhere():
    assert PROJECT["version"] == capibara.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", capibara.__version__)
    assert "## Unreleased" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
