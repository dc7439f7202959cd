"""The threads that chunks are coded and decoded on: as many as there are processors, kept for the next archive."""

from __future__ import annotations

import contextlib
import contextvars
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np

__all__ = ["ROOM", "WORKERS", "Buffers", "ahead", "run_all", "submit"]

WORKERS = os.cpu_count() or 1
ROOM = 32 << 20  # bytes: deep enough that threads need not wait for the one that collects what they made
_SMALL = 1 << 14  # bytes
_STEP = 1 << 16  # bytes: buffers of about the same size can stand for one another
_PAGE = 2 << 20  # bytes of a large page
_MOST_WAITING = 512


class Buffers:
    """Memory that is used again: what is given back to the system has to be cleared, page by page, to come back.

    Several threads may take and give back.

    Args:
      most: bytes that are kept for the next who wants some.
    """

    def __init__(self, most: int = ROOM) -> None:
        self._most = most
        self._free: dict[int, list[np.ndarray]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """At least that many bytes, uint8."""
        step = _STEP if size < _PAGE else _PAGE
        room = -(-size // step) * step
        with self._lock:
            if free := self._free.get(room):
                self._kept -= room
                return free.pop()
        # Not of the heap, which may keep for itself what was given back to it.
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if step == _PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without large pages
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, np.uint8)

    def give(self, buffer: np.ndarray) -> None:
        """Back; the caller uses it no more."""
        with self._lock:
            if self._kept + len(buffer) <= self._most:
                self._kept += len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)


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
    work: Callable[[Given], Made], items: Iterable[Given], size: Callable[[Given], int], room: int = ROOM
) -> Iterator[Made]:
    """Results in order, several of them at work at a time.

    What ``items`` raises comes after the results of the items before.

    Args:
      work: done on the threads of the pool, or for small items (that is quicker) when it is their turn.
      items: taken one by one.
      size: about how many bytes an item takes while it is at work, and its result afterwards.
      room: how many bytes that may be together; one more item than there are threads always may.
    """
    waiting: deque[Callable[[], Made]] = deque()
    futures: deque[tuple[Future[Made], int]] = deque()
    error: Exception | None = None
    source, held = iter(items), 0

    def first() -> Made:
        nonlocal held
        result = waiting.popleft()
        if futures and result == futures[0][0].result:
            held -= futures.popleft()[1]
        return result()

    try:
        while True:
            try:
                item = next(source)
            except StopIteration:
                break
            except Exception as raised:
                error = raised
                break
            if (bytes_ := size(item)) < _SMALL:
                waiting.append(partial(work, item))
            else:
                futures.append((submit(work, item), bytes_))
                waiting.append(futures[-1][0].result)
                held += bytes_
            while (len(futures) > WORKERS and held > room) or len(waiting) > _MOST_WAITING:
                yield first()
        while waiting:
            yield first()
    finally:
        # After an error or an early end: nothing goes on behind the caller's back.
        _settle(future for future, _ in futures)
    if error is not None:
        raise error


def run_all(work: Callable[[Given], object], items: Iterable[Given]) -> None:
    """``work`` of each, on the threads of the pool; raises the first of the errors when all are through."""
    futures = [submit(work, item) for item in items]
    try:
        for future in futures:
            future.result()
    finally:
        _settle(futures)


def _settle(futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        if not future.cancel():
            future.exception()
