"""The threads that chunks are coded and decoded on: as many as there are processors, kept for the next archive."""

from __future__ import annotations

import contextvars
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
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


def ahead(
    work: Callable[[Given], Made],
    items: Iterable[Given],
    small: Callable[[Given], bool] | None = None,
    most: int = WORKERS,
) -> Iterator[Made]:
    """Results in order, ``most`` of them at work at a time: so many are in memory, besides the one in hand.

    What ``items`` raises comes after the results of the items before.

    Args:
      work: done on the threads of the pool.
      items: taken one by one.
      small: says of an item that handing it to a thread would take longer than doing it; done when it is its turn.
      most: how many at a time.
    """
    waiting: deque[Callable[[], Made]] = deque()
    futures: deque[Future[Made]] = deque()
    error: Exception | None = None
    source = iter(items)
    try:
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            if small is not None and small(item):
                waiting.append(partial(work, item))
            else:
                futures.append(submit(work, item))
                waiting.append(futures[-1].result)
            while len(futures) > most or len(waiting) > 32 * most:
                yield _first(waiting, futures)
        while waiting:
            yield _first(waiting, futures)
    finally:
        # After an error or an early end: nothing goes on behind the caller's back.
        for future in futures:
            if not future.cancel():
                future.exception()
    if error is not None:
        raise error


def _first(waiting: deque[Callable[[], Made]], futures: deque[Future[Made]]) -> Made:
    result = waiting.popleft()
    if futures and result == futures[0].result:
        futures.popleft()
    return result()
