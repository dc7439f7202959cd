"""``capibara profile``: a script that knows nothing of it, what is kept, and the difference of two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import jax
jax.config.update("jax_platforms", "cpu")  # a script may choose its devices until it uses them
import jax.numpy as jnp

def main():
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 5, lambda _, h: jnp.tanh(h @ h), x))
    x = jnp.ones((64, 64))
    for _ in range(int(sys.argv[1])):
        x = step(x)
    print("mine", x.shape)
    sys.exit(int(sys.argv[2]))

if __name__ == "__main__":
    main()
"""


def capibara(*arguments: str | Path | int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "capibara", "profile", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
        timeout=120,
    )


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "work.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def kept(script: Path) -> list[Path]:
    folders = []
    for runs in (2, 6):
        folder = script.parent / f"runs-{runs}"
        done = capibara("-o", folder, "--", "python", script, runs, 0)
        assert done.returncode == 0, done.stderr
        assert "mine (64, 64)" in done.stdout
        assert "jit__lambda" in done.stdout
        folders.append(folder)
    return folders


def test_json_has_the_flops_of_the_script(kept: list[Path]):
    done = capibara("show", kept[1], "--json")
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["total_flops"] == 6 * 5 * 2 * 64**3
    assert any(kernel["source"].endswith("work.py:8") for kernel in figures["kernels"])


def test_the_difference_names_the_line(kept: list[Path]):
    done = capibara("diff", *kept, "--json")
    assert done.returncode == 0, done.stderr
    changes = {change["place"].rpartition("/")[2]: change for change in json.loads(done.stdout)["changes"]}
    assert changes["work.py:8"]["count_after"] == 3 * changes["work.py:8"]["count_before"]
    assert "work.py:8" in capibara("diff", *kept).stdout


def test_figure_and_page(kept: list[Path], tmp_path: Path):
    done = capibara("show", kept[0], "--plot", tmp_path / "a.png", "--html", tmp_path / "a.html")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "a.html").read_text()
    assert "work.py:8" in page
    assert "http" not in page.replace("http-equiv", "")


def test_the_exit_code_is_the_scripts(script: Path):
    done = capibara("--json", "--", script, 1, 7)
    assert done.returncode == 7
    assert json.loads(done.stdout)["total_flops"] == 5 * 2 * 64**3
    assert "mine" in done.stderr  # standard output is the JSON


def test_files_of_ones_own_stay(script: Path, tmp_path: Path):
    for name in ("plugins", "programs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("mine")
    for _ in range(2):
        done = capibara("-o", tmp_path, "--", script, 1, 0)
        assert done.returncode == 0, done.stderr
    assert {(tmp_path / name / "mine.py").read_text() for name in ("plugins", "programs")} == {"mine"}
    (tmp_path / "profile.json").write_text('{"of": "something else"}')
    done = capibara("-o", tmp_path, "--", script, 1, 0)
    assert done.returncode == 2
    assert "without a profile.json of something else" in done.stderr
    assert "mine (" not in done.stdout  # said before the program runs
    assert (tmp_path / "profile.json").read_text() == '{"of": "something else"}'


def test_a_script_that_forks(tmp_path: Path):
    path = tmp_path / "forks.py"
    path.write_text(
        "import os, sys, warnings\n"
        "import jax.numpy as jnp\n"
        "print(jnp.ones((8, 8)).sum())\n"
        "warnings.simplefilter('ignore')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    sys.exit(0)\n"
        "sys.exit(os.waitpid(child, 0)[1])\n"
    )
    done = capibara("--json", "--", path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["programs"]


def test_a_script_without_jax(tmp_path: Path):
    path = tmp_path / "plain.py"
    path.write_text("print('hello')\n")
    done = capibara("--", path)
    assert done.returncode == 1
    assert "ran no compiled program" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "expected 'capibara profile -- python script.py'"),
        (["--", "nowhere.py"], "'nowhere.py' is not a file"),
        (["--", "python"], "got no file"),
        (["--", "python", "-c", "1"], "got the option '-c'"),
        (["show", "/nowhere"], "holds no profile"),
        (["-o", __file__, "--", __file__], "expected one that can be written to"),
        (["--plot", "/nowhere/x.png", "--", __file__], "--plot: the folder of '/nowhere/x.png' is missing"),
        (["show"], "expected one"),
        (["diff", "a"], "expected two"),
    ],
)
def test_bad_input(arguments: list[str], words: str):
    done = capibara(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
