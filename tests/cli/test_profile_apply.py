"""``capibara profile --apply``: remedies are tried on a script that knows nothing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = """
import jax
import jax.numpy as jnp
import numpy as np

"""
# Each with what its remedy is, in words.
SCRIPTS = {
    "float64": (
        """
jax.config.update("jax_enable_x64", True)
x = jnp.asarray(np.random.default_rng(0).normal(size=(600, 600)))
step = jax.jit(lambda x: jnp.tanh(x @ x / 25))
for _ in range(12):
    x = step(x)
print(x.dtype.kind, round(float(jnp.abs(x).mean()), 2))
""",
        "jax_enable_x64 is off",
    ),
    "recompilation": (
        """
x = jnp.ones((64, 64))
for _ in range(6):
    x = jax.jit(lambda x: jnp.tanh(x @ x / 64))(x)
print(float(x[0, 0]))
""",
        "each function is jitted once",
    ),
    "callback": (
        """
@jax.jit
def step(x):
    jax.debug.callback(lambda value: sum(range(200_000)), x[0, 0])
    return jnp.tanh(x @ x)

x = jnp.ones((64, 64))
for _ in range(20):
    x = step(x)
print(float(x[0, 0]))
""",
        "jax.debug.print and jax.debug.callback do nothing",
    ),
    "copies": (
        """
write = jax.jit(lambda cache, row, at: jax.lax.dynamic_update_slice(cache, row, (at, 0)))
cache, row = jnp.zeros((20_000, 1024)), jnp.ones((1, 1024))
for at in range(30):
    cache = write(cache, row, at)
print(float(cache.sum()))
""",
        "results take the place of arguments",
    ),
    "dispatch": (
        """
def update(x, turns, name="none"):
    for _ in range(turns):
        x = jnp.tanh(x + 1) * 0.5
    return x

x = jnp.ones(16)
for _ in range(100):
    x = update(x, 80)
print(round(float(x[0]), 4))
""",
        "are under jax.jit",
    ),
}

# Of host and loops: the script, the kind of the bottleneck, what the remedy is in words, what is said of it, and the
# remedies of that kind that do not apply, with the reason.
WAITING: dict[str, tuple[str, str, str, str, dict[str, str]]] = {
    "a step that is waited for": (
        """
step = jax.jit(lambda x: jax.lax.fori_loop(0, 100, lambda _, h: jnp.tanh(h @ h), x))
x = jnp.full((128, 128), 0.01)
for n in range(40):
    x = step(x)
    x.block_until_ready()
    sum(number * number for number in range(150_000))
print(round(float(jnp.abs(x).mean()), 4))
""",
        "idle",
        "block_until_ready does not wait",
        "block_until_ready in line 11 does not wait",
        {"another thread": "no loop of the script goes over an iterator that runs Python"},
    ),
    "batches that come late": (
        """
import time
step = jax.jit(lambda x, b: jax.lax.fori_loop(0, 40, lambda _, h: jnp.tanh(h @ h), x + b))

def batches():
    for number in range(40):
        time.sleep(0.03)
        yield np.full((256, 256), 1e-3 * number, np.float32)

x, losses = jnp.full((256, 256), np.float32(0.01)), []
for batch in batches():
    x = step(x, batch)
    losses.append(float(jnp.abs(x).mean()))
print(losses[-1])
""",
        "idle",
        "prepared by another thread",
        "items of the loop in line 16 are prepared by another thread, 2 ahead",
        {"does not wait": "a result is read in line 18 40 times (float())"},
    ),
    "rows one by one": (
        """
w = jnp.eye(64) * 0.5
step = jax.jit(lambda x: jax.lax.map(lambda row: jnp.tanh(row[None] @ w)[0], x))
x = jnp.ones((4000, 64))
for _ in range(16):
    x = step(x) + 0.1
print(round(float(x.mean()), 5))
""",
        "small_products",
        "computed together (jax.vmap)",
        "lax.map in line 8: 1,024 of its 4,000 turns at once",
        {},
    ),
    "a recurrence": (
        """
w = jnp.eye(16) * 0.9
step = jax.jit(lambda x: jax.lax.scan(lambda h, _: (jnp.tanh(h @ w) + 0.01, None), x, jnp.arange(4000))[0])
x = jnp.ones((4, 16))
for _ in range(20):
    x = step(x)
print(round(float(x.mean()), 5))
""",
        "small_products",
        "unroll=8",
        "lax.scan in line 8: 8 of its 4,000 turns in each of the compiled loop",
        {"jax.vmap": "lax.scan in line 8 was left as it is: each turn takes what the one before gave"},
    ),
    "steps in Python": (
        """
step = jax.jit(lambda x: x * 0.9 + 0.1)
x = jnp.zeros(64)
for _ in range(8000):
    x = step(x)
print(round(float(x.mean()), 5))
""",
        "dispatch",
        "one program each",
        "the loop in line 9 is one program: 8,000 turns of lax.scan",
        {},
    ),
}


def capibara(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "capibara", "profile", *map(str, arguments)],
        **options,
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        check=False,
        timeout=400,
    )


@pytest.mark.thin(6)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_remedy_is_tried(kind: str, tmp_path: Path):
    script, words = SCRIPTS[kind]
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    done = capibara("--apply", "--only", kind, "--repeats", "1", "--json", "--", "python", path)
    assert done.returncode == 0, done.stderr
    applied = json.loads(done.stdout)["applied"]
    (tried,) = [one for one in applied if one["kind"] == kind and words in one["description"]]
    assert tried["same_output"] is True, tried
    assert tried["gain"] == pytest.approx(1 - tried["after"] / tried["before"])
    if kind == "dispatch":
        assert tried["notes"] == ["update is under jax.jit"]


def tried_on(case: str, tmp_path: Path, repeats: int) -> dict[str, Any]:
    """What was tried of a planted script, checked but for the times."""
    script, kind, words, said, others = WAITING[case]
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    done = capibara("--apply", "--only", kind, "--repeats", str(repeats), "--json", "--", "python", path)
    assert done.returncode == 0, done.stderr
    applied = json.loads(done.stdout)["applied"]
    assert {one["kind"] for one in applied} == {kind}
    (tried,) = [one for one in applied if words in one["description"]]
    assert said in tried["notes"], tried
    assert (tried["same_output"], tried["same_results"]) == (True, True), tried
    assert tried["gain"] == pytest.approx(1 - tried["after"] / tried["before"])
    assert 0 < tried["predicted_gain"] <= 1
    for other, reason in others.items():
        (untried,) = [one for one in applied if other in one["description"]]
        assert untried["gain"] is None
        assert any(reason in note for note in untried["notes"]), untried
    return tried


@pytest.mark.slow
@pytest.mark.parametrize("case", WAITING)
def test_a_remedy_of_the_host_or_of_loops_is_tried(case: str, tmp_path: Path):
    tried_on(case, tmp_path, 1)


@pytest.mark.slow  # times of real programs: a machine that does nothing else
@pytest.mark.parametrize("case", [one for one in WAITING if one != "a recurrence"])
def test_a_remedy_saves_what_was_predicted(case: str, tmp_path: Path):
    tried = tried_on(case, tmp_path, 3)
    print(case, tried["before"], tried["after"], tried["gain"], tried["predicted_gain"])
    assert tried["gain"] > 0.1
    assert tried["gain"] == pytest.approx(tried["predicted_gain"], abs=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_each_run_reads_the_same_input(kind: str, tmp_path: Path):
    """From where the file was, and though the program does not read to the end."""
    path, text = tmp_path / "script.py", tmp_path / "input.txt"
    path.write_text(
        HEAD
        + """
import sys
jax.config.update("jax_enable_x64", True)
number = float(sys.stdin.readline())
x = jnp.full((200, 200), number)
for _ in range(30):
    x = jax.jit(lambda x: jnp.tanh(x @ x / 200))(x)
print("number", number)
"""
    )
    text.write_text("not this line\n7\n" + "left over\n" * 10)
    with text.open() as file:
        file.readline()
        os.lseek(file.fileno(), len("not this line\n"), os.SEEK_SET)
        given: dict[str, Any] = (
            {"stdin": file} if kind == "file" else {"input": text.read_text().partition("\n")[2]}
        )
        done = capibara("--apply", "--repeats", "1", "--json", "--", "python", path, **given)
    assert done.returncode == 0, done.stderr
    applied = json.loads(done.stdout)["applied"]
    tried = [one for one in applied if not one["description"].startswith("not tried")]
    assert tried
    assert all(one["gain"] is not None and one["same_output"] for one in tried), applied


def test_what_only_the_author_can_do(tmp_path: Path):
    path = tmp_path / "script.py"
    path.write_text(
        HEAD
        + """
import time
step = jax.jit(lambda x: x * 2)
x = step(jnp.ones(8))
for _ in range(10):
    time.sleep(0.1)
    x = step(x)
"""
    )
    done = capibara("--apply", "--only", "idle", "--repeats", "1", "--", "python", path)
    assert done.returncode == 0, done.stderr
    assert (
        "idle: tried: block_until_ready does not wait\n    the script never calls block_until_ready"
        in done.stdout
    )
    assert (
        "no loop of the script goes over an iterator that runs Python: what it prepares in its body"
        in done.stdout
    )
    assert "recompilation:" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repeats", "0", "--", "python", "x.py"), "--repeats: got 0, expected at least 1"),
        (("--apply", "show", "x"), "--apply: runs a program, which show does not"),
        (
            ("--apply", "--only", "slow", "--", "x.py"),
            "--only: got 'slow', expected one of recompilation, idle",
        ),
        (("--only", "idle", "--", "x.py"), "--only: says which remedies --apply tries: add --apply"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str):
    done = capibara(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
