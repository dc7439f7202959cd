"""A profile begins when no device is at work, whoever gave it the work."""

from __future__ import annotations

import _thread
import hashlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from other_process import run_apart

from capibara.observe.profile import TpuPerformanceProfiler, settling
from capibara.observe.profile.settling import settle

pytestmark = pytest.mark.usefixtures("without_the_persistent_cache")


def products(x, n):
    return jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ x), x)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch):
    """Results that JAX no longer finds among its arrays, as dropped ones; returned to be asked afterwards."""
    compiled, x = jax.jit(products), jnp.ones((256, 256))
    compiled(x, 1).block_until_ready()
    monkeypatch.setattr(jax, "live_arrays", list)
    return [compiled(x, 100) for _ in range(4)]


def test_dropped_results_are_there(dropped: list[Any]):
    settle(set())
    assert all(result.is_ready() for result in dropped)


def test_a_failed_callback_does_not_end_the_wait(dropped: list[Any], monkeypatch: pytest.MonkeyPatch):
    def fail():
        raise RuntimeError("of an earlier program")

    monkeypatch.setattr(jax, "effects_barrier", fail)
    with pytest.raises(RuntimeError, match="of an earlier program"):
        settle(set())
    assert all(result.is_ready() for result in dropped)


@pytest.mark.parametrize("known", [False, True], ids=["unknown to Python", "seen by Python"])
def test_threads_that_call_python_are_waited_for(known: bool):
    """As XLA's do in callbacks: ``threading`` lists them from then on."""
    began, ended = threading.Event(), []

    def work():
        if known:
            threading.current_thread()
        began.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # which leaves the interpreter's lock to others
        ended.append(True)

    _thread.start_new_thread(work, ())
    assert began.wait(60)
    settle(set())
    assert ended


@pytest.mark.slow  # the kernel counts a wait for a busy processor at its end; here nobody sees the thread awake before
def test_work_that_nobody_sees_awake_is_counted(dropped: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Threads are looked at one after the other: work can go from one to another in between."""
    if not settling._work({threading.get_native_id()}):
        pytest.skip("this kernel does not count the time of threads")
    monkeypatch.setattr(settling, "_awake", lambda _: False)
    monkeypatch.setattr(settling, "_MOST_DOUBTS", 10**6)
    settle(set())
    assert all(result.is_ready() for result in dropped)


def test_threads_that_always_work_a_little_end_the_wait(monkeypatch: pytest.MonkeyPatch):
    """Another library's, that are never seen awake: as they might, for moments."""
    looks: list[float] = []

    def work(_: set[int]) -> dict[int, int]:
        looks.append(time.perf_counter())
        return {1: len(looks) * 10**12}

    monkeypatch.setattr(settling, "_awake", lambda _: False)
    monkeypatch.setattr(settling, "_work", work)
    assert settling._sleeping(set()) < looks[0]  # when they were first asleep, not when that was believed
    assert len(looks) == 2 * settling._MOST_DOUBTS


def test_a_thread_that_threading_did_not_make_does_not_wait_for_itself():
    found: list[set[int]] = []
    ended = threading.Event()

    def look():
        found.append(settling._foreign() & {threading.get_native_id()})
        ended.set()

    _thread.start_new_thread(look, ())
    assert ended.wait(60)
    assert found == [set()]


def test_results_that_are_dropped_are_waited_for():
    compiled = jax.jit(products)
    x = jnp.ones((256, 256))
    compiled(x, 40).block_until_ready()
    profiler = TpuPerformanceProfiler()
    with profiler.profile_context("dropped"):
        for _ in range(4):
            compiled(x, 40)
    assert profiler.profile().flops == 4 * 40 * 2 * 256**3


def test_work_of_before_is_not_counted():
    compiled = jax.jit(products)
    x = jnp.ones((256, 256))
    compiled(x, 1).block_until_ready()
    profiler = TpuPerformanceProfiler()
    for _ in range(4):
        compiled(x, 100)
    with profiler.profile_context("after"):
        compiled(x, 1).block_until_ready()
    assert profiler.profile().flops == 2 * 256**3


SPINNING = r"""
import ctypes, json, pathlib, subprocess, sys, time, warnings
warnings.simplefilter("error")
folder = pathlib.Path(sys.argv[1])
(folder / "spin.c").write_text(
    "#include <pthread.h>\n"
    "static void* spin(void* a) { volatile long x = 0; for (;;) ++x; return a; }\n"
    "void begin(void) { pthread_t t; pthread_create(&t, 0, spin, 0); }\n"
)
subprocess.run(["cc", "-shared", "-fPIC", "-pthread", "-o", folder / "spin.so", folder / "spin.c"], check=True)
import jax, jax.numpy as jnp
from capibara.observe.profile import TpuPerformanceProfiler
from capibara.observe.profile import settling
settling._RESTLESS = 0.5
square = jax.jit(lambda x: x @ x)
x = jnp.ones((64, 64))
square(x).block_until_ready()
ctypes.CDLL(str(folder / "spin.so")).begin()
profiler = TpuPerformanceProfiler()
with profiler.profile_context("spinning"):
    square(x).block_until_ready()
    time.sleep(0.2)
found = profiler.profile()
print("RESULT", json.dumps([found.flops, found.wall_seconds]))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_thread_that_never_sleeps_is_not_waited_for(tmp_path: Path):
    flops, wall = run_apart(SPINNING, str(tmp_path))
    assert flops == 2 * 64**3
    assert 0.2 <= wall < 0.5
