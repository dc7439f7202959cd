"""How verbs handle SIGINT (Ctrl-C) and SIGTERM.

By default SIGTERM ends a process between two instructions, and files that are being written stay beside their places.
An exception goes through every ``with`` and ``finally`` on its way out (:func:`raise_on_sigterm`). But it may be raised
between any two instructions of the main thread: before a ``with`` has taken hold of what it is to clear away, or while
a thread is being started, which then nobody waits for properly. Verbs that write large files or leave work on devices
to threads therefore end without an exception: the handler removes their temporary files, and the process is over
(:func:`end_on_signals`).
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from capibara.files import remove_temporaries

__all__ = ["INTERRUPTED", "Terminated", "end_on_signals", "raise_on_sigterm"]

INTERRUPTED = 128 + signal.SIGINT
_AT_ONCE = 1.0  # seconds
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Terminated(SystemExit):
    """SIGTERM was received; the exit code is the one that shells report for it."""

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


@contextlib.contextmanager
def end_on_signals() -> Iterator[None]:
    """Make SIGINT and SIGTERM end this process, its temporary files removed, while the context lasts.

    The exit code is 128 + the signal's number. Signals that are ignored or have a handler of somebody's are left alone.
    For a process that is the verb's own: nothing but the temporary files is cleared away.
    """
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    changed = [number for number, handler in usual.items() if signal.getsignal(number) is handler]
    for number in changed:
        signal.signal(number, _end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, usual[number])


def _end(number: int, frame: FrameType | None) -> None:
    remove_temporaries()
    clear = "\r\x1b[2K\x1b[?25h" if os.isatty(2) else ""  # the progress bar hides the cursor
    with contextlib.suppress(OSError):
        os.write(2, f"{clear}capibara: {_WORDS[signal.Signals(number)]}\n".encode())
    # What was printed before; inside of a print it cannot be done.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        sys.stdout.flush()
    os._exit(128 + number)
