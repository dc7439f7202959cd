"""Wait for work on a device only so long: a device that hangs would hold the program forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

__all__ = ["DeadlineError", "Task"]


class DeadlineError(RuntimeError):
    """The work did not finish in time. Its thread is still waiting for the device."""


class Task:
    """A function that runs in a thread of its own.

    Args:
      function: what to run.
      name: of the work, for messages.
    """

    def __init__(self, function: Callable[[], Any], name: str) -> None:
        self._function, self._name = function, name
        self._value: Any = None
        self._error: BaseException | None = None
        # A daemon: a thread that waits for a device that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"capibara-health: {name}", daemon=True)
        self._start = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._function()
        except BaseException as error:
            self._error = error

    def wait(self, seconds: float) -> Any:
        """The function's result, or its error.

        Args:
          seconds: how long it may take since its start.

        Raises:
          DeadlineError: it is still running.
        """
        self._thread.join(max(0.0, seconds - (time.monotonic() - self._start)))
        if self._thread.is_alive():
            raise DeadlineError(f"{self._name} did not finish in {seconds:g} s")
        if self._error is not None:
            raise self._error
        return self._value
