"""Keep Orbax and TensorStore from printing what is reported properly here."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import re
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["causes", "dropping_readers", "quiet_orbax"]

_ORBAX = re.compile(r"[/\\](orbax|tensorstore)[/\\]")


@contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keep Orbax from printing a traceback for an error that is reported properly here."""
    loggers = [logging.getLogger("absl"), logging.getLogger("asyncio")]

    # A filter of its own: several threads may be in here, and leave in any order. Others may log there meanwhile.
    def not_orbax(record: logging.LogRecord) -> bool:
        if record.name == "asyncio":  # a future that nobody waits for
            return "was never retrieved" not in record.getMessage()
        return not _ORBAX.search(record.pathname)

    for logger in loggers:
        logger.addFilter(not_orbax)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(not_orbax)


@contextmanager
def dropping_readers() -> Iterator[None]:
    """Let go of Orbax's readers of other arrays when one fails: each of them prints a traceback when it is let go of.

    TensorStore's threads go on reading, and call the loop of events that Orbax has closed by then: that prints, too,
    at any time later.
    """
    hook = sys.unraisablehook

    def quiet(unraisable: Any) -> None:
        of_a_loop = unraisable.object is None and "Event loop is closed" in str(unraisable.exc_value)
        if not (of_a_loop or inspect.iscoroutine(unraisable.object)):
            hook(unraisable)

    sys.unraisablehook = quiet
    try:
        yield
    except Exception as error:
        for seen in causes(error):
            for frame, _ in traceback.walk_tb(seen.__traceback__):
                for value in frame.f_locals.values():
                    if isinstance(value, asyncio.AbstractEventLoop) and value.is_closed():
                        # What would be called has been let go of.
                        vars(value)["call_soon_threadsafe"] = _nothing
            traceback.clear_frames(seen.__traceback__)
        gc.collect()
        # For a thread that had begun its call before.
        time.sleep(0.05)
        raise
    finally:
        sys.unraisablehook = hook


def causes(error: BaseException) -> list[BaseException]:
    """``error``, and all that it came of."""
    found: list[BaseException] = []
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is not None and not any(one is other for other in found):
            found.append(one)
            waiting += [one.__cause__, one.__context__]
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return found


def _nothing(*_: Any, **__: Any) -> None:
    pass
