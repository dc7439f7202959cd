"""A profile begins when no device is at work, whoever gave it the work."""

from __future__ import annotations

import _thread
import hashlib
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from capibara.observe.profile import settling
from capibara.observe.profile.settling import settle


def products(x, n):
    return jax.lax.fori_loop(0, n, lambda _, h: jnp.tanh(h @ x), x)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch):
    """Results that JAX no longer finds among its arrays; returned to be asked afterwards."""
    compiled, x = jax.jit(products), jnp.ones((256, 256))
    compiled(x, 1).block_until_ready()
    monkeypatch.setattr(jax, "live_arrays", list)
    return [compiled(x, 100) for _ in range(4)]


def test_dropped_results_are_there(dropped: list[Any]):
    assert not dropped[-1].is_ready()
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
    began.wait()
    settle(set())
    assert ended


def test_work_that_nobody_sees_awake_is_counted(dropped: list[Any], monkeypatch: pytest.MonkeyPatch):
    """Threads are looked at one after the other: work can go from one to another in between."""
    if not settling._work({threading.get_native_id()}):
        pytest.skip("this kernel does not count the time of threads")
    monkeypatch.setattr(settling, "_awake", lambda _: False)
    settle(set())
    assert all(result.is_ready() for result in dropped)


def test_threads_that_always_work_a_little_end_the_wait(monkeypatch: pytest.MonkeyPatch):
    """Another library's, that are never seen awake: as they might, for moments."""
    work = iter(range(10**6))
    monkeypatch.setattr(settling, "_awake", lambda _: False)
    monkeypatch.setattr(settling, "_work", lambda _: {1: next(work) * 10**9})
    monkeypatch.setattr(settling, "_MOST_DOUBTS", 5)
    began = time.perf_counter()
    assert settling._sleeping(set()) - began < 0.1  # when they were first asleep, not when that was believed
    assert next(work) == 10


def test_a_thread_that_threading_did_not_make_does_not_wait_for_itself():
    found: list[set[int]] = []
    ended = threading.Event()

    def look():
        found.append(settling._foreign() & {threading.get_native_id()})
        ended.set()

    _thread.start_new_thread(look, ())
    assert ended.wait(60)
    assert found == [set()]
