"""``capibara profile`` of scripts that take traces of their own: they get them, and their profile has all runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

HEAD = """
import sys, tempfile, jax, numpy as np
folder = sys.argv[1]
f = jax.jit(lambda x: x @ x)
x = jax.device_put(np.eye(64, dtype="float32"))
def run(times):
    for _ in range(times):
        f(x).block_until_ready()
"""
FLOPS = 2 * 64**3
# Of each: the script; runs in all; of those, runs that are no part of the profile; and the runs in each of its traces.
SCRIPTS: dict[str, tuple[str, int, int, list[int | None]]] = {
    "around all of it": ("with jax.profiler.trace(folder):\n    run(5)", 5, 0, [5]),
    "of some steps, several times": (
        """
import time
run(1)
for errors in (jax.profiler.stop_trace,):
    try:
        errors()
    except RuntimeError as error:
        print("error:", error)
for times in (2, 3):
    jax.profiler.start_trace(folder)
    try:
        jax.profiler.start_trace(folder)
    except RuntimeError as error:
        print("error:", error)
    run(times)
    jax.profiler.stop_trace()
    time.sleep(1.1)  # JAX names traces after the second
with tempfile.TemporaryDirectory() as other, jax.profiler.trace(other):  # is gone at the end
    f(x)  # nobody waits for it
run(1)
""",
        8,
        0,
        [2, 3],
    ),
    "left open, beside a server": (
        """
import socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
jax.profiler.start_server(port)
run(2)
jax.profiler.start_trace(folder)
run(3)
""",
        5,
        0,
        [3],
    ),
    "that says nothing of operations": (
        """
options = jax.profiler.ProfileOptions()
options.host_tracer_level = 1
run(3)
with jax.profiler.trace(folder, profiler_options=options):
    run(4)
run(2)
""",
        9,
        4,
        [None],  # XLA records some kinds of operations, and not others
    ),
}


def profiled(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "capibara", "profile", *arguments, "--", "python", str(path), "traces"],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=path.parent,
        check=False,
        timeout=300,
    )


def runs_in(path: Path) -> int:
    """Runs of the product that a trace holds, as JAX's own reader sees them."""
    found = set()
    data = ProfileData.from_file(str(path))
    with warnings.catch_warnings():
        # On Python 3.13 the iterators of jax.profiler warn that they do not say their module.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane in data.planes:
            for line in plane.lines:
                for event in line.events:
                    stats = {name: value for name, value in event.stats if name is not None}
                    if "hlo_op" in stats and "lambda" in str(stats.get("hlo_module", "")):
                        found.add(stats.get("run_id"))
    return len(found)


@pytest.mark.thin(4)
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_with_traces_of_its_own(kind: str, tmp_path: Path):
    script, runs, missing, each = SCRIPTS[kind]
    (tmp_path / "s.py").write_text(HEAD + script)
    done = profiled(tmp_path / "s.py", "--json", "-o", str(tmp_path / "kept"))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    # Every run is counted once, in whichever trace it is.
    assert found["total_flops"] == (runs - missing) * FLOPS
    (product,) = [one for one in found["kernels"] if one["flops"]]
    assert product["count"] == runs - missing
    # The script's traces are where it asked for them, with the runs of their time and no marks of ours.
    own = sorted((tmp_path / "traces").glob("**/*.xplane.pb"), key=lambda one: one.stat().st_mtime_ns)
    assert len(own) == len(each)
    assert all(runs in (None, runs_in(one)) for one, runs in zip(own, each, strict=True))
    assert not any(b"capibara_region" in one.read_bytes() for one in own)
    if "error" in script:
        errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
        again = "error: Profile has already been started. Only one profile may be run at a time."
        assert errors == ["error: No profile started", again, again]
    # What is left out is said, and why; the parts do not lie within one another.
    left_out = [one for one in found["traces"] if one["left_out"]]
    assert bool(left_out) == bool(missing)
    assert all("host_tracer_level=1" in one["left_out"] for one in left_out)
    ends = [one["began"] + one["seconds"] for one in found["traces"]]
    assert all(later["began"] >= end for end, later in zip(ends[:-1], found["traces"][1:], strict=True))
    counted = sum(one["seconds"] for one in found["traces"] if not one["left_out"])
    assert counted == pytest.approx(found["wall_time_ms"] / 1e3)
    shown = subprocess.run(
        [sys.executable, "-m", "capibara", "profile", "show", str(tmp_path / "kept")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    assert str(tmp_path / "traces") in shown or left_out
    assert "between them" in shown
    assert ("left out" in shown) == bool(missing)


def test_nothing_to_profile_is_said(tmp_path: Path):
    """All that ran was in a trace that does not say what ran."""
    (tmp_path / "s.py").write_text(
        HEAD
        + """
options = jax.profiler.ProfileOptions()
options.host_tracer_level = 0
jax.profiler.start_trace(folder, profiler_options=options)
run(4)
"""
    )
    done = profiled(tmp_path / "s.py")
    assert done.returncode == 1
    assert "nothing could be profiled: it was taken with host_tracer_level=0" in done.stderr
