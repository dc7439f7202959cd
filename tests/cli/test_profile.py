"""``capibara profile``: a script that knows nothing of it, what is kept, and the difference of two."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
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
    # As the installed command does, which looks for no modules in the current folder.
    return subprocess.run(
        [sys.executable, "-P", "-m", "capibara", "profile", *map(str, arguments)],
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


def test_the_difference_names_the_argument(tmp_path: Path):
    script = tmp_path / "sizes.py"
    script.write_text(
        "import sys\n"
        "import jax, jax.numpy as jnp\n"
        "def step(x, scale):\n"
        "    return x * scale\n"
        "step = jax.jit(step, static_argnames='scale')\n"
        "for scale in sys.argv[1:]:\n"
        "    step(jnp.ones(8), scale=int(scale)).block_until_ready()\n"
    )
    for name, scales in (("before", [2]), ("after", [2, 3, 4])):
        done = capibara("-o", tmp_path / name, "--", script, *scales)
        assert done.returncode == 0, done.stderr
    done = capibara("diff", tmp_path / "before", tmp_path / "after", "--json")
    assert done.returncode == 0, done.stderr
    (again,) = [one for one in json.loads(done.stdout)["recompiled"] if one["program"] == "jit_step"]
    assert (again["reason"], again["times"]) == ("arguments", 2)
    assert again["changes"] == [{"where": "scale", "what": "static value", "before": "2", "after": "3"}]
    words = capibara("diff", tmp_path / "before", tmp_path / "after").stdout
    assert "jit_step" in words
    assert "scale: static value 2 -> 3" in words
    figures = json.loads(capibara("show", tmp_path / "after", "--json").stdout)
    assert [one["program"] for one in figures["recompilations"] if one["function"]] == ["jit_step"]


def test_beside_a_plan(kept: list[Path], tmp_path: Path):
    made = subprocess.run(
        [sys.executable, "-m", "capibara", "plan", "--no-compile", "--json", "--topology", "v4-8"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    plan = tmp_path / "plan.json"
    plan.write_text(made.stdout)
    best = json.loads(made.stdout)["candidates"][0]
    done = capibara("show", kept[0], "--plan", plan, "--json")
    assert done.returncode == 0, done.stderr
    beside = json.loads(done.stdout)["plan"]
    assert beside["plan"]["seconds"] == best["step_seconds"]
    assert beside["flops"] == 5 * 2 * 64**3  # of one run
    assert beside["ratios"]["seconds"] == pytest.approx(beside["seconds"] / best["step_seconds"])
    assert "predicted" in capibara("show", kept[0], "--plan", plan).stdout
    done = capibara("diff", *kept, "--plan", plan, "--json")
    assert set(json.loads(done.stdout)["plan"]) == {"before", "after"}
    assert "after, beside the plan:" in capibara("diff", *kept, "--plan", plan).stdout


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


@pytest.mark.slow
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


@pytest.mark.thin(3)
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
        (["--plan", "/nowhere.json", "--", __file__], "plan: '/nowhere.json' cannot be read"),
        (["--plan", __file__, "show", "x"], "is not a valid plan file"),
        (["diff", "a"], "expected two"),
        (["diff", "a", "b", "--plot", "x.png"], "--plot: a comparison is printed"),
        (["--plot", "/", "--", __file__], "--plot: got the folder '/'"),
        (["--", "python_train.py"], "'python_train.py' is not a file"),
        (["--", "python3.99", __file__], "'python3.99' cannot be run"),
    ],
)
def test_bad_input(arguments: list[str], words: str):
    done = capibara(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


AS_ALONE = """
import atexit, os, pickle, sys, threading
os.environ["JAX_ENABLE_X64"] = "1"  # read when JAX is imported
seen = [__file__, sys.argv, __name__, sys.path[0]]
assert not any(name.startswith("jax") for name in sys.modules)
import importlib.util
assert importlib.util.find_spec("jax") is not None  # as libraries see whether it is there
import jax, jax.numpy as jnp
class Own: pass
atexit.register(lambda: print("at exit", pickle.loads(pickle.dumps(Own())).__class__ is Own, seen))
f = jax.jit(lambda x: x @ x)
f(jnp.ones((64, 64))).block_until_ready()
def more():
    import time
    time.sleep(0.3)
    for _ in range(9):
        f(jnp.ones((64, 64))).block_until_ready()
    pickle.dumps(Own())
threading.Thread(target=more).start()
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)  # whose workers wait until Python ends
print(pool.submit(lambda: "from a pool").result())
print(f(jnp.ones((2, 2))).dtype, os.path.exists(__file__))
os.makedirs("elsewhere", exist_ok=True)
os.chdir("elsewhere")
"""


def test_a_script_runs_as_it_does_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "script.py").write_text(AS_ALONE)
    # Modules of the current folder, which a script in another folder does not see.
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "queue.py").write_text("raise SystemExit('the wrong one')")
    monkeypatch.chdir(tmp_path / "here")
    alone = subprocess.run(
        [sys.executable, "../script.py", "a", "b"], capture_output=True, text=True, check=False, timeout=120
    )
    assert alone.returncode == 0, alone.stderr
    done = capibara("-o", "kept", "--json", "--", "python", "../script.py", "a", "b")
    assert done.returncode == 0, done.stderr
    # What the script prints goes to standard error where figures are asked for.
    assert alone.stdout.splitlines() == done.stderr.splitlines()[: len(alone.stdout.splitlines())]
    assert "float64 True" in alone.stdout
    assert "at exit True" in alone.stdout
    assert (tmp_path / "here" / "kept" / "profile.json").is_file()
    # What the thread computed after the end of the script, too.
    assert json.loads(done.stdout)["total_flops"] == 10 * 2 * 64**3 + 2 * 2**3


def test_what_a_script_ends_with(tmp_path: Path):
    (tmp_path / "s.py").write_text("import sys; sys.exit(ValueError('of no use'))")
    done = capibara("--", "python", tmp_path / "s.py")
    assert (done.returncode, done.stderr) == (1, "of no use\n")


def test_a_failure_keeps_an_earlier_profile(script: Path, tmp_path: Path):
    folder = tmp_path / "kept"
    assert capibara("-o", folder, "--", "python", script, 1, 0).returncode == 0
    before = (folder / "profile.json").read_bytes()
    (tmp_path / "t.py").write_text(
        "import jax, jax.numpy as jnp\njax.jit(lambda x: x @ x)(jnp.ones((8, 8))).block_until_ready()\n"
        "jax.monitoring.clear_event_listeners()\nraise RuntimeError('too bad')\n"
    )
    done = capibara("-o", folder, "--", "python", tmp_path / "t.py")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: too bad")
    assert (folder / "profile.json").read_bytes() == before


def test_a_signal_ends_the_script(tmp_path: Path):
    (tmp_path / "s.py").write_text("""
import signal, sys, time
def end(*_):
    print("ended", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("busy", flush=True)
time.sleep(60)
""")
    with subprocess.Popen(
        [sys.executable, "-m", "capibara", "profile", "--", "python", str(tmp_path / "s.py")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        process.terminate()
        rest, _ = process.communicate(timeout=120)
    assert (process.returncode, rest) == (143, "ended\n")


def test_an_interrupt_is_the_scripts(tmp_path: Path):
    """It may have something to keep; its profile is kept, too."""
    (tmp_path / "s.py").write_text("""
import sys, time
import jax, jax.numpy as jnp
jax.jit(lambda x: x @ x)(jnp.ones((64, 64))).block_until_ready()
try:
    print("busy", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    time.sleep(1)
    print("saved")
    sys.exit(3)
""")
    with subprocess.Popen(
        [sys.executable, "-m", "capibara", "profile", "--", "python", str(tmp_path / "s.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "busy\n"
        time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        rest, _ = process.communicate(timeout=120)
    assert process.returncode == 3
    assert rest.startswith("saved\n")
    assert "s.py: " in rest
