"""What planning a step function takes of this process's devices: nothing. Each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from capibara.plan.isolated import can_copy

needs_copies = pytest.mark.skipif(not can_copy(), reason="processes cannot be copied here")

# A platform that JAX would prefer to the CPU, and that tells when it is started.
_START = """
import pathlib, sys
import jax
from jax.extend import backend
from capibara.plan import PlanError, plan, step_work
from capibara.plan.isolated import isolated, backends_started

taken = pathlib.Path(sys.argv[1]) / "taken"

def take():
    taken.write_text("taken")
    raise RuntimeError("no such device")

backend.register_backend_factory("pretended", take, priority=900, fail_quietly=True)

def step(params, x):
    return jax.tree.map(lambda p: p - 0.1 * (x.T @ (x @ p)), params), (x @ params["w"]).sum()

args = {"w": jax.ShapeDtypeStruct((128, 256), "float32")}, jax.ShapeDtypeStruct((64, 128), "float32")
"""


def in_new_process(code: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _START + code, str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _environment() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}


@needs_copies
def test_a_planned_step_starts_no_backend(tmp_path):
    code = """
work = step_work(step, args, folder=taken.parent)
found = plan(work, "v5e:2x2", compile=False)
assert work.flops == 3 * 2 * 64 * 128 * 256, work.flops
assert work.path.stat().st_size > 500
assert not backends_started()
assert not taken.exists()
jax.config.update("jax_num_cpu_devices", 3)  # refused by JAX once it has started
print(jax.device_count("cpu"))
assert taken.exists()  # the check can fail
assert backends_started()
assert jax.config.jax_num_cpu_devices == 3
"""
    assert in_new_process(code, tmp_path).strip() == "3"


@needs_copies
def test_a_step_that_asks_for_devices_while_it_is_traced_gets_the_cpu(tmp_path):
    code = """
def asking(x):
    print("traced on", jax.default_backend())
    return x * jax.device_count()

step_work(asking, (args[1],), folder=taken.parent)
assert not backends_started() and not taken.exists()
"""
    said = in_new_process(code, tmp_path).split("\n")
    assert "traced on cpu" in said


@needs_copies
def test_errors_come_back_from_the_copy(tmp_path):
    code = """
import os, time
import numpy as np

def refused(match, function, *rest, **named):
    try:
        function(*rest, **named)
    except PlanError as error:
        assert match in str(error), error
    else:
        raise AssertionError(match)

large = np.zeros((256, 256), "float32")
rows = (jax.ShapeDtypeStruct((4, 256), "float32"),)
refused("closes over 1 concrete arrays (float32[256, 256]", step_work, lambda x: x @ large, rows, folder=taken.parent)
refused("cannot be traced", step_work, lambda x: x @ x, rows, folder=taken.parent)
refused("something ended its process (3) without", isolated, lambda: os._exit(3), what="something")
refused("something took longer than 0 s", isolated, lambda: time.sleep(60), what="something", timeout=0.2)
refused("ZeroDivisionError", isolated, lambda: 1 / 0, what="something")
large_answer = isolated(lambda: ({"n": 1}, b"x" * 3_000_000), what="something")
assert large_answer == ({"n": 1}, b"x" * 3_000_000)
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("none left")
assert not backends_started() and not taken.exists()
"""
    assert in_new_process(code, tmp_path).strip() == "none left"


def test_with_its_devices_taken_a_process_works_by_itself():
    import os

    import jax

    from capibara.plan.isolated import backends_started, isolated

    assert jax.devices()
    assert backends_started()
    assert isolated(lambda: ({"process": os.getpid()}, b"y"), what="it") == ({"process": os.getpid()}, b"y")
