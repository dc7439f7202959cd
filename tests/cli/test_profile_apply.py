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


@pytest.mark.thin(2)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_remedy_is_tried(kind: str, tmp_path: Path):
    script, words = SCRIPTS[kind]
    path = tmp_path / "script.py"
    path.write_text(HEAD + script)
    done = capibara("--apply", "--repeats", "1", "--json", "--", "python", path)
    assert done.returncode == 0, done.stderr
    applied = json.loads(done.stdout)["applied"]
    (tried,) = [one for one in applied if one["kind"] == kind and words in one["description"]]
    assert tried["same_output"] is True, tried
    assert tried["gain"] == pytest.approx(1 - tried["after"] / tried["before"])
    if kind == "dispatch":
        assert tried["notes"] == ["update is under jax.jit"]


@pytest.mark.parametrize("kind", ["pipe", pytest.param("file", marks=pytest.mark.slow)])
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
    done = capibara("--apply", "--repeats", "1", "--", "python", path)
    assert done.returncode == 0, done.stderr
    assert "idle: not tried: what it takes has to be written into the program" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--repeats", "0", "--", "python", "x.py"), "--repeats: got 0, expected at least 1"),
        (("--apply", "show", "x"), "--apply: runs a program, which show does not"),
    ],
)
def test_bad_input(arguments: tuple[str, ...], words: str):
    done = capibara(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
