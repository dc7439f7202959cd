"""A thread that says so when a run does nothing any more, and where it stands.

How long a step may take is not known before: it is what the setting says, or ten times the longest wait so far, if that
is longer. What is printed are the stacks of all threads, by :mod:`faulthandler`, which needs no lock and so also works
while the interpreter is held up in a library.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import jax

__all__ = ["EXIT_STUCK", "Watchdog"]

EXIT_STUCK = 75
"""Exit code of a process that ended itself because it was stuck (``EX_TEMPFAIL``: worth another try)."""

_TIMES = 10


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
        self._what = "starting"
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

    def beat(self, what: str) -> None:
        """Something was finished; what follows is ``what``."""
        with self._lock:
            now = time.monotonic()
            self._longest[self._what] = max(
                self._longest.get(self._what, 0.0), (now - self._since) / self._parts
            )
            self._what, self._since, self._parts, self._reported = what, now, 1, False

    @contextmanager
    def during(self, what: str, parts: int = 1) -> Iterator[None]:
        """Something that takes ``parts`` times as long as a step."""
        before = self._what
        self.beat(what)
        self._parts = max(1, parts)
        try:
            yield
        finally:
            self.beat(before)

    @property
    def allowed(self) -> float:
        """Seconds that what goes on now may take."""
        longest = max(self._longest.values(), default=0.0)
        return max(self.seconds, _TIMES * longest * self._parts)

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self.seconds / 4)):
            with self._lock:
                silent, what = time.monotonic() - self._since, self._what
                stuck = silent > self.allowed and not self._reported
                self._reported |= stuck
            if stuck:
                self._report(what, silent)

    def _report(self, what: str, silent: float) -> None:
        stream = self._stream or sys.stderr
        who = f"process {jax.process_index()} of {jax.process_count()} ({socket.gethostname()}, pid {os.getpid()})"
        text = (
            f"{who} seems stuck: nothing for {silent:.1f} s while {what}. The stacks of its threads follow."
        )
        if self.warn is not None:
            self.warn(text)
        else:
            print(f"WARNING: {text}", file=stream, flush=True)
        try:
            faulthandler.dump_traceback(file=stream, all_threads=True)
        except (ValueError, OSError, AttributeError):  # a stream without a descriptor, as in a notebook
            frames = "; ".join(_lines())
            print(frames, file=stream, flush=True)
        if self.end:
            os._exit(EXIT_STUCK)


def _lines() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"{names.get(ident, ident)}: {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
