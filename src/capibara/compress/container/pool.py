"""The threads that chunks are coded and decoded on: as many as there are processors, kept for the next archive."""

from __future__ import annotations

import contextvars
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

__all__ = ["WORKERS", "ahead", "submit"]

WORKERS = os.cpu_count() or 1

Given = TypeVar("Given")
Made = TypeVar("Made")


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix="capibara-archive")


# Threads do not survive a fork: a child that inherited the pool would wait for them for ever.
os.register_at_fork(after_in_child=_pool.cache_clear)


def submit(work: Callable[[Given], Made], item: Given) -> Future[Made]:
    """``work(item)`` on a thread that sees the context of this one (the engine that codecs use …)."""
    return _pool().submit(contextvars.copy_context().run, work, item)


def ahead(work: Callable[[Given], Made], items: Iterable[Given], most: int = WORKERS) -> Iterator[Made]:
    """Results in order, ``most`` of them at work at a time: so many are in memory, besides the one in hand.

    What ``items`` raises comes after the results of the items before.
    """
    waiting: deque[Future[Made]] = deque()
    error: Exception | None = None
    source = iter(items)
    try:
        while True:
            try:
                waiting.append(submit(work, next(source)))
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            if len(waiting) > most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # After an error or an early end: nothing goes on behind the caller's back.
        for future in waiting:
            if not future.cancel():
                future.exception()
    if error is not None:
        raise error
