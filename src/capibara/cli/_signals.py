"""SIGTERM as an exception: what a verb has begun is cleared away before it ends.

By default SIGTERM ends a process between two instructions, and files that are being written stay beside their places.
An exception goes through every ``with`` and ``finally`` on its way out, as Ctrl-C does.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

__all__ = ["Terminated", "raise_on_sigterm"]

_AT_ONCE = 1.0  # seconds


class Terminated(SystemExit):
    """SIGTERM came; the exit code is the one that shells give to a process which that ended."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextlib.contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Make SIGTERM raise :class:`Terminated` while the context lasts.

    One that comes within a second of another does nothing, so that it does not come between what the first began:
    ``timeout``, for one, sends two. A handler that is there already, or a signal that is ignored, was somebody's wish
    and stays; outside the main thread, where Python lets nobody install handlers, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    last = -math.inf

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > _AT_ONCE:
            raise Terminated

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
