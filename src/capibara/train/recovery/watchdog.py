"""A thread that says so when a run does nothing any more, and where it stands.

How long a step may take is not known before it was done once: then it is what the setting says, or ten times the
longest of its kind so far, if that is longer. What is printed are the stacks of all threads, by :mod:`faulthandler`.
Where a library holds the interpreter, so that no Python thread gets a turn, faulthandler's own thread prints them.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import jax

__all__ = ["EXIT_STUCK", "Watchdog"]

EXIT_STUCK = 75
"""Exit code of a process that ended itself because it was stuck (``EX_TEMPFAIL``: worth another try)."""

_TIMES = 10
# What was not done before may take so many times the shortest silence that is reported.
_FIRST = 60
# Seconds after which others act, should the watching thread be unable to.
_LAST = 5.0


class Watchdog:
    """Watches that something happens; a context manager.

    Args:
      seconds: the shortest silence that is reported; 0: none is.
      end: end the process then, with code :data:`EXIT_STUCK`.
      warn: told in one line, besides the stacks that go to ``stream``.
      stream: where stacks go; a file with a descriptor, by default standard error.
    """

    def __init__(
        self,
        seconds: float,
        *,
        end: bool = False,
        warn: Callable[[str], None] | None = None,
        stream: TextIO | None = None,
    ) -> None:
        self.seconds, self.end, self.warn = seconds, end, warn
        self._stream = stream
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._what, self._kind = "it started", "start"
        self._longest: dict[str, float] = {}
        self._since = time.monotonic()
        self._parts = 1
        self._reported = False

    def __enter__(self) -> Watchdog:
        if self.seconds > 0:
            self._stop.clear()
            self._since = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="capibara-watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def beat(self, what: str, kind: str = "step") -> None:
        """Something was finished; what follows is ``what``, of a ``kind`` whose times are alike."""
        with self._lock:
            now = time.monotonic()
            took = (now - self._since) / self._parts
            self._longest[self._kind] = max(self._longest.get(self._kind, 0.0), took)
            self._what, self._kind, self._since, self._parts, self._reported = what, kind, now, 1, False

    @contextmanager
    def during(self, what: str, kind: str, parts: int = 1) -> Iterator[None]:
        """Something of another kind; of ``parts`` parts, whose times are compared."""
        before = self._what
        self.beat(what, kind)
        self._parts = max(1, parts)
        try:
            yield
        finally:
            self.beat(before)

    @property
    def allowed(self) -> float:
        """Seconds that what goes on now may take."""
        if (longest := self._longest.get(self._kind)) is None:
            return _FIRST * self.seconds
        return max(self.seconds, _TIMES * longest * self._parts)

    def _watch(self) -> None:
        stream = self._stream or sys.stderr
        try:
            while not self._stop.wait(min(1.0, self.seconds / 4)):
                with self._lock:
                    silent, what = time.monotonic() - self._since, self._what
                    stuck = silent > self.allowed and not self._reported
                    self._reported |= stuck
                    left = None if self._reported else self.allowed - silent
                if stuck:
                    self._report(what, silent)
                _call_for_help(stream, left, end=self.end)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self, what: str, silent: float) -> None:
        stream = self._stream or sys.stderr
        who = f"process {jax.process_index()} of {jax.process_count()} ({socket.gethostname()}, pid {os.getpid()})"
        text = f"{who} seems stuck: nothing for {silent:.1f} s while {what}."
        if self.end:  # also if nobody reads what is written here
            last = threading.Timer(_LAST, os._exit, (EXIT_STUCK,))
            last.daemon = True
            last.start()
        print(f"WARNING: {text} The stacks of its threads:", file=stream, flush=True)
        try:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        except (ValueError, OSError, AttributeError):  # a stream without a descriptor, as in a notebook
            print("; ".join(_lines()), file=stream, flush=True)
        if self.warn is not None:
            self.warn(text)
        if self.end:
            os._exit(EXIT_STUCK)


def _call_for_help(stream: TextIO, left: float | None, *, end: bool) -> None:
    """Let a thread that needs no interpreter print the stacks, if this one gets no turn any more."""
    try:
        if left is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(left, 0.0) + _LAST, exit=end, file=stream)
    except (ValueError, OSError, AttributeError):
        return


def _lines() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        stack = traceback.extract_stack(frame)
        places = " < ".join(f"{at.filename}:{at.lineno} in {at.name}" for at in reversed(stack))
        yield f"{names.get(ident, ident)}: {places}"
