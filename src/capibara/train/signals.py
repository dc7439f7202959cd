"""Stopping gracefully: Ctrl-C and SIGTERM ask for a stop, and the loop stops between two steps.

A signal handler may run between any two Python instructions, so it only leaves a note. A second signal does not wait:
it raises KeyboardInterrupt. Of several processes it may be any that is asked; all stop before the same step
(:class:`capibara.train.processes.Ballots`).
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopFlag", "stop_on_signals"]

_AT_ONCE = 0.5  # seconds


@dataclass
class StopFlag:
    """Whether a run was asked to stop; ``signal`` is the number of the signal that asked."""

    requested: bool = False
    signal: int | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn SIGINT and SIGTERM into a :class:`StopFlag` while the context lasts.

    A signal within half a second of the one before is the same wish: a service manager sends it to a launcher, which
    passes it on, and to its processes. Outside the main thread, where Python lets nobody install handlers, the flag is
    never set.
    """
    flag, last = StopFlag(), -math.inf
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if before > -math.inf and last - before > _AT_ONCE:
            raise KeyboardInterrupt
        flag.requested, flag.signal = True, number

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
