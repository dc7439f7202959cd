"""The moments at which no device is at work, between which a profile is taken."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import NamedTuple

__all__ = ["Settled", "settle"]

# Seconds for which a thread must be awake without a break to be taken for one that never sleeps.
_RESTLESS = 10.0
# And for which threads are waited for at all.
_LONGEST_WAIT = 15.0
# Share of the time for which threads that are seen asleep may work: some wake up now and then.
_AT_REST = 0.25
# Times that they may have worked more, until they are taken for another library's.
_MOST_DOUBTS = 2


class Settled(NamedTuple):
    """By ``perf_counter``: when all arrays that are held were there, and since when no device has been at work.

    On CPUs the second may be late: other libraries' threads, such as OpenBLAS's, go on for a while after their work.
    """

    held: float
    quiet: float


def settle(restless: set[int]) -> Settled:
    """Wait until no device is at work.

    Arrays that are held can be waited for. For results that were dropped JAX has no such function: TPUs and GPUs run
    programs in their order, so that one more ends after them; XLA on CPUs does not, but its threads sleep without work.

    Args:
      restless: threads that are not waited for; more are added.

    Raises:
      RuntimeError: a callback failed; everything was waited for.
    """
    import jax

    failed: RuntimeError | None = None
    try:
        jax.effects_barrier()
    except RuntimeError as error:
        failed = error
    settled = _wait(restless)
    if failed is not None:
        raise failed
    return settled


def _wait(restless: set[int]) -> Settled:
    import jax

    for array in jax.live_arrays():
        if not array.is_deleted():
            with contextlib.suppress(RuntimeError):  # donated between the two lines by another thread
                array.block_until_ready()
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return Settled(time.perf_counter(), _sleeping(restless))

    def last() -> float:
        jax.block_until_ready([jax.device_put(0, device) + 1 for device in devices])
        return time.perf_counter()

    end = last()
    end -= last() - end  # the second time only that is done: about a millisecond on a GPU
    return Settled(end, end)


def _sleeping(restless: set[int], quiet: int = 10) -> float:
    """Wait until threads that are not Python's are seen asleep ``quiet`` times in a row; when they were first.

    XLA's have no names of their own, and it makes more of them as it needs them. They are looked at one after the
    other, and work can go from one to another in between: they must not have worked more than ``_AT_REST`` of the time
    meanwhile.

    Other libraries' threads would be waited for as well. Those that never sleep for ``_RESTLESS`` seconds become part
    of ``restless``. Those that always work for moments are let be after ``_MOST_DOUBTS`` such times: XLA's are seen
    awake sooner. If they are XLA's after all, its last operations are missing in the trace, and that is refused. Where
    another thread gives XLA work all the time there is no end to wait for: after ``_LONGEST_WAIT`` seconds, that is
    now.
    """
    began = since = time.perf_counter()
    always: set[int] | None = None
    seen, doubts = 0, 0
    doubted: float | None = None
    at_rest: dict[int, int] = {}
    looked = began
    while True:
        now = time.perf_counter()
        if now - began > _LONGEST_WAIT:
            return now
        threads = _foreign() - restless
        if not threads:
            return since
        awake = {number for number in threads if _awake(Path(f"/proc/self/task/{number}/stat"))}
        always = awake if always is None else always & awake
        if awake:
            since, seen, doubted = time.perf_counter(), 0, None
        else:
            seen += 1
        if seen == 1:
            at_rest, looked = _work(threads), time.perf_counter()
        elif seen >= quiet:
            if _share(at_rest, _work(threads), time.perf_counter() - looked) <= _AT_REST:
                return since
            doubts, doubted = doubts + 1, since if doubted is None else doubted
            if doubts == _MOST_DOUBTS:
                return doubted
            since, seen = time.perf_counter(), 0
        if always and now - began > _RESTLESS:
            restless |= always
            # It was they who were awake all the time: nothing is known of the others yet but what comes.
            since, seen, always = began, 0, set()
        time.sleep(0.0005)


def _foreign() -> set[int]:
    """The threads that are not Python's. XLA's that call Python become its dummies, and are none of its own."""
    own = {
        thread.native_id for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)
    }
    own.add(threading.get_native_id())
    return {int(path.name) for path in Path("/proc/self/task").glob("*")} - own


def _work(threads: set[int]) -> dict[int, int]:
    """Nanoseconds for which each thread has run or waited for a processor; empty where the kernel does not count."""
    found = {}
    for number in threads:
        with contextlib.suppress(OSError, ValueError):
            ran, waited, _ = Path(f"/proc/self/task/{number}/schedstat").read_text().split()
            found[number] = int(ran) + int(waited)
    return found


def _share(before: dict[int, int], after: dict[int, int], seconds: float) -> float:
    """Of a time, the part for which threads worked; those that ended meanwhile are not counted."""
    return sum(done - before.get(number, 0) for number, done in after.items()) / 1e9 / seconds


def _awake(stat: Path) -> bool:
    """Whether a thread runs or waits for a disk; False for one that has ended."""
    try:
        return stat.read_text().rpartition(")")[2][1:2] in ("R", "D")
    except OSError:
        return False
