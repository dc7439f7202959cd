"""Wait for work on a device only so long: a device that hangs would hold the program forever."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

__all__ = ["DeadlineError", "Task"]

# At the interpreter's end a thread within JAX aborts the process, so it is waited for: not forever, if a device hangs.
_AT_THE_END = 10.0
_unfinished: weakref.WeakSet[Task] = weakref.WeakSet()


@atexit.register
def _wait_for_tasks() -> None:
    until = time.monotonic() + _AT_THE_END
    for task in list(_unfinished):
        task.done.wait(max(0.0, until - time.monotonic()))


class DeadlineError(RuntimeError):
    """The work did not finish in time. Its thread is still waiting for the device."""


class Task:
    """A function that runs in a thread of its own.

    Args:
      function: what to run.
      name: of the work, for messages.

    Attributes:
      done: set when the function has ended. (``Thread.join`` that is interrupted takes the thread for one that ended.)
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function, self._name = function, name
        self._value: Any = None
        self._error: BaseException | None = None
        # A daemon: a thread that waits for a device that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"capibara-health: {name}", daemon=True)
        self.done = threading.Event()
        self._start = time.monotonic()
        _unfinished.add(self)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self.done.set()

    def wait(self, seconds: float) -> Any:
        """The function's result, or its error.

        Args:
          seconds: how long it may take since its start.

        Raises:
          DeadlineError: it is still running.
        """
        if not self.done.wait(max(0.0, seconds - (time.monotonic() - self._start))):
            raise DeadlineError(f"{self._name} did not finish in {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._value
