"""Stopping gracefully: Ctrl-C and SIGTERM ask for a stop, and the loop stops between two steps.

A signal handler may run between any two Python instructions, so it only leaves a note. A second signal does
not
wait: it raises KeyboardInterrupt.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

__all__ = ["StopFlag", "stop_on_signals"]


@dataclass
class StopFlag:
    """Whether a run was asked to stop; ``signal`` is the number of the signal that asked."""

    requested: bool = False
    signal: int | None = None


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn SIGINT and SIGTERM into a :class:`StopFlag` while the context lasts.

    Outside the main thread, where Python lets nobody install handlers, the flag is never set.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handler(number: int, frame: FrameType | None) -> None:
        if flag.requested:
            raise KeyboardInterrupt
        flag.requested, flag.signal = True, number

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield flag
    finally:
        for number, old in before.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
