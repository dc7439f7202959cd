"""The versions that are supported: said in one place, named where others are installed, and kept by every extra."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from argparse import Namespace
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from tpu_compiler import environment as tpu_environment
from tpu_compiler import needs_libtpu

from capibara import jax_versions, startup
from capibara.jax_versions import SUPPORTED, libtpu_problem, required_libtpu, version_problem
from capibara.plan.compiler.environment import Compiler

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
ROOMS = [
    "capibara.jax",
    "capibara.ops",
    "capibara.vq",
    "capibara.core",
    "capibara.plan",
    "capibara.train",
    "capibara.serve",
]


def python(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that imports this tree, after what lies in ``paths``."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_", "PYTHON"))}
    places = os.pathsep.join(map(str, [*paths, ROOT / "src"]))
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env={**kept, "PYTHONPATH": places, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def jax_of_version(folder: Path, version: str) -> Path:
    """A folder with a package that is called jax and can do nothing."""
    (folder / "jax").mkdir()
    (folder / "jax" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    information = folder / f"jax-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: jax\nVersion: {version}\n")
    return folder


# ---- one statement of the range -----------------------------------------------------------------------------------


def test_the_bounds_are_the_same_everywhere():
    bounds = "<{1[0]}.{1[1]},>={0[0]}.{0[1]}".format(*SUPPORTED)
    everything = [
        *PROJECT["dependencies"],
        *(x for extra in PROJECT["optional-dependencies"].values() for x in extra),
    ]
    requirements = [each for each in map(Requirement, everything) if each.name == "jax"]
    assert len(requirements) >= 4  # the base, and the extras gpu, tpu and plan
    assert {str(each.specifier) for each in requirements} == {bounds}
    # The library is built with the headers of the oldest: newer ones take what was built for it.
    (headers,) = (Requirement(x) for x in PYPROJECT["build-system"]["requires"] if x.startswith("jaxlib"))
    assert Version("{}.{}.0".format(*SUPPORTED[0])) in headers.specifier
    assert Version(f"{SUPPORTED[0][0]}.{SUPPORTED[0][1] + 1}.0") not in headers.specifier


def test_tested_versions_are_in_the_range_and_at_its_end():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line.startswith("jax==")]
    for each in ("3.11", "3.12", "3.13"):
        assert PROJECT["requires-python"] == ">=3.11"
        assert f"Programming Language :: Python :: {each}" in PROJECT["classifiers"]
        (pin,) = (p for p in pins if p.marker is None or p.marker.evaluate({"python_version": each}))
        version = next(iter(pin.specifier)).version
        assert version_problem(version) == ("", "")
    # The newest that is tested is of the last supported series, the oldest of the first.
    series = {Version(next(iter(p.specifier)).version).release[:2] for p in pins}
    assert (min(series), max(series)) == (SUPPORTED[0], (SUPPORTED[1][0], SUPPORTED[1][1] - 1))


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("0.9.2", "old"),
        ("0.4.38", "old"),
        ("0.10.0", ""),
        ("0.10.3.dev20260101+abc", ""),
        ("0.12.0.1", ""),
        ("0.13.0", "new"),
        ("1.0", "new"),
        (None, ""),
        ("unknown", ""),
    ],
)
def test_kinds_of_versions(version: str | None, kind: str):
    found, text = version_problem(version)
    assert found == kind
    assert (not text) == (not kind)
    if kind:
        assert str(version) in text
        assert "pip install 'jax>=0.10,<0.13'" in text


# ---- where an unsupported one is named ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["0.9.2", "0.14.0"])
def test_import_names_an_unsupported_jax_once_without_importing_it(tmp_path: Path, version: str):
    code = "import sys, capibara, capibara.errors; print('jax' in sys.modules)"
    done = python(code, jax_of_version(tmp_path, version))
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert done.stderr.count("UnsupportedJaxWarning") == 1
    assert f"JAX {version} is" in done.stderr
    assert "0.10 <= JAX < 0.13" in done.stderr
    assert "pip install 'jax>=0.10,<0.13'" in done.stderr
    # The line that is shown is the user's.
    assert done.stderr.startswith("<string>:1: "), done.stderr


def test_what_needs_jax_refuses_an_old_one(tmp_path: Path):
    code = f"""
import importlib, warnings
warnings.simplefilter("ignore")
for name in {ROOMS}:
    try:
        importlib.import_module(name)
    except ImportError as error:
        print(name, type(error).__name__, error)
from capibara import compose as ml
try:
    ml.JaxBackend()
except ImportError as error:
    print("JaxBackend", type(error).__name__, error)
import numpy as np
compiled = ml.compile(ml.Relu(), ml.NumpyBackend(), shapes={{"input": [2]}})
print(compiled.evaluate({{}}, {{"input": np.array([-1.0, 2.0])}})["output"])
"""
    done = python(code, jax_of_version(tmp_path, "0.9.2"))
    assert done.returncode == 0, done.stderr
    *refusals, result = done.stdout.splitlines()
    assert [line.split()[:2] for line in refusals] == [
        [n, "UnsupportedJaxError"] for n in [*ROOMS, "JaxBackend"]
    ]
    assert all("JAX 0.9.2 is not supported" in line and "pip install" in line for line in refusals)
    assert result == "[0. 2.]"  # what does not compute with JAX goes on


def test_the_doctor_names_an_old_jax(tmp_path: Path):
    done = python(
        "import sys; from capibara.cli import main; sys.exit(main(['doctor', '--json']))",
        jax_of_version(tmp_path, "0.9.2"),
    )
    assert done.returncode == 1, done.stderr
    assert "0.9.2; Capibara needs 0.10 <= JAX < 0.13. pip install 'jax>=0.10,<0.13'" in done.stdout


def test_a_supported_jax_is_not_mentioned_and_importing_stays_light():
    done = python(
        "import sys, capibara; print(sorted({'jax', 'importlib.metadata', 'numpy', 'pathlib'} & set(sys.modules)))"
    )
    assert (done.returncode, done.stderr) == (0, "")
    # site may have imported it for packages in development
    assert done.stdout in ("[]\n", "['pathlib']\n")


def test_the_version_is_found_where_jax_is(tmp_path: Path):
    assert jax_versions.installed_version() == importlib.metadata.version("jax")
    code = "from capibara.jax_versions import installed_version; print(installed_version())"
    assert python(code).stdout.strip() == importlib.metadata.version("jax")
    assert python(code, jax_of_version(tmp_path, "0.11.7")).stdout.strip() == "0.11.7"


def test_a_finder_that_refuses_is_no_reason_to_fail():
    code = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "libtpu", "jax_plugins"):
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Finder())
import capibara
from capibara.jax_versions import installed_version
print(installed_version())
"""
    done = python(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


# ---- the TPU compiler -----------------------------------------------------------------------------------------------


def test_the_extra_takes_what_jax_pins():
    (requirement,) = (Requirement(x) for x in PROJECT["optional-dependencies"]["plan"] if x.startswith("jax"))
    assert requirement.extras == {"tpu"}
    wanted = required_libtpu()
    assert wanted is not None
    # As the standard's own parser reads it.
    (pin,) = (
        each
        for each in map(Requirement, importlib.metadata.requires("jax") or ())
        if each.name == "libtpu" and each.marker is not None and each.marker.evaluate({"extra": "tpu"})
    )
    assert SpecifierSet(f"=={wanted}") == pin.specifier
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for line in (Requirement(line) for line in lines if line.startswith("libtpu")):
        if line.marker is None or line.marker.evaluate():
            assert next(iter(line.specifier)).version.removesuffix(".*") in f"{wanted}." or any(
                pin.specifier.contains(each.version) for each in line.specifier
            )


@pytest.mark.parametrize(
    ("pinned", "version", "right"),
    [
        ("0.0.42.*", "0.0.42.1", True),
        ("0.0.42.*", "0.0.42", True),
        ("0.0.42.*", "0.0.52", False),
        ("0.0.4.*", "0.0.42", False),
        ("0.0.42.1", "0.0.42.1", True),
        ("0.0.42.1", "0.0.42.12", False),
        (None, "0.0.52", True),
        ("0.0.42.*", "unknown", True),
    ],
)
def test_another_compiler_than_the_pinned_one_is_named(
    monkeypatch: pytest.MonkeyPatch, pinned: str | None, version: str, right: bool
):
    monkeypatch.setattr(jax_versions, "required_libtpu", lambda: pinned)
    text = libtpu_problem(version)
    assert (text == "") == right
    notes = Compiler(version, None).notes()
    assert len(notes) == (not right)
    if not right:
        assert version in text
        assert f"pip install 'libtpu=={pinned}'" in text
        assert text in notes[0]


def test_plan_says_at_its_start_that_the_compiler_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from capibara.cli.plan import _show_compiler_notes

    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu" / "libtpu.so").write_bytes(b"")
    (tmp_path / "libtpu-99.0.dist-info").mkdir()
    monkeypatch.setenv("CAPIBARA_LIBTPU", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for topology in ("v4-32", "2xv5e:2x2", "v4-32,v5e-16"):
        _show_compiler_notes(Namespace(topology=topology, view=None, dcn_gbps=None))
    said = capsys.readouterr().err
    assert said.count("\n") == 3
    _show_compiler_notes(Namespace(topology="v4-32", view=None, dcn_gbps=None))
    said = capsys.readouterr().err
    assert said.startswith("capibara plan: figures may be off: libtpu 99.0 is installed")
    assert f"pip install 'libtpu=={required_libtpu()}'" in said


@pytest.mark.parametrize(
    ("files", "variables", "there", "cpu"),
    [
        ([], {}, True, True),
        ([], {}, False, False),
        (["dev/accel0"], {}, True, False),
        (["dev/vfio/0"], {}, True, False),
        (["dev/vfio/vfio"], {}, True, True),  # of any machine that can lend devices to guests
        (["dev/nvidia0"], {}, True, False),
        (["dev/kfd"], {}, True, False),
        ([], {"JAX_PLATFORMS": "tpu"}, True, False),
        ([], {"JAX_PLATFORMS": ""}, True, False),
        ([], {"JAX_FORCE_TPU_INIT": "1"}, True, False),
        ([], {"TPU_WORKER_HOSTNAMES": "a,b"}, True, False),
        ([], {"TPU_SKIP_MDS_QUERY": "1", "TPU_LIBRARY_PATH": "libtpu.so"}, True, True),  # set by JAX itself
    ],
)
def test_only_a_compiler_without_any_device_keeps_jax_to_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    variables: dict[str, str],
    there: bool,
    cpu: bool,
):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name == "libtpu" and there else None
    )
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert startup.keep_to_cpu(variables, str(tmp_path)) is cpu


def test_a_plugin_of_jax_for_another_device_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: object() if name in ("libtpu", "jax_plugins") else None
    )
    assert not startup.keep_to_cpu({}, str(tmp_path))


@pytest.mark.thin(2)
@needs_libtpu
@pytest.mark.skipif(startup.has_tpu(), reason="there is a TPU")
@pytest.mark.parametrize("first", ["import capibara.ops", "import jax; import capibara"])
def test_ordinary_processes_print_nothing_about_tpus(first: str):
    paths = [Path(p) for p in tpu_environment()["PYTHONPATH"].split(os.pathsep) if p]
    code = f"{first}; import capibara.jax as jax; print(jax.numpy.ones(3).sum(), jax.default_backend())"
    done = python(code, *paths)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3.0 cpu\n", "")


# ---- the environment of the newest Python --------------------------------------------------------------------------


def _python(folder: Path, version: str, *, works: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "python"
    # It stands for a Python: what it is asked is whether it has the version that its name says.
    path.write_text(f'#!/bin/sh\ncase "$2" in *"\'{version}\'"*) exit {0 if works else 127};; esac; exit 1\n')
    path.chmod(0o755)
    return path


def _newest(tmp_path: Path, oldest: str) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(ROOT / ".ci/newest-python"), oldest],
        env={"PATH": "/usr/bin:/bin", "PYENV_ROOT": str(tmp_path / "pyenv"), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_the_newest_python_is_found(tmp_path: Path):
    if any(Path(f"{place}/python3.{minor}").exists() for place in ("/usr/bin", "/bin") for minor in (12, 13)):
        pytest.skip("the system's own Python is newer")
    assert _newest(tmp_path, "3.11") == (1, "")
    older = _python(tmp_path / "pyenv/versions/3.12.4/bin", "3.12")
    assert _newest(tmp_path, "3.11") == (0, str(older))
    assert _newest(tmp_path, "3.12") == (1, "")
    _python(tmp_path / "pyenv/versions/3.13.0/bin", "3.13", works=False)
    assert _newest(tmp_path, "3.11") == (0, str(older))
    newest = _python(tmp_path / "pyenv/versions/3.13.1/bin", "3.13")
    assert _newest(tmp_path, "3.11") == (0, str(newest))
    assert _newest(tmp_path, "3.13") == (1, "")


def test_every_extra_is_tried_alone():
    script = (ROOT / ".ci/extras.py").read_text(encoding="utf-8")
    tried = set(re.findall(r"^def (\w+)\(e: Environment\)", script, re.MULTILINE))
    # `gpu` and `tpu` need their devices, `ray` a cluster; `docs` builds this site.
    assert tried == {"base", *PROJECT["optional-dependencies"]} - {"gpu", "tpu", "ray", "docs"}
