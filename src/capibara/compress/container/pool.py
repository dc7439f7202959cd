"""The thread pool for encoding and decoding chunks: one thread per processor, shared by all archives."""

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
    """Reusable buffers: memory returned to the system has to be cleared, page by page, before it is used again.

    Thread-safe.

    Args:
      most: maximum number of bytes to keep for reuse.
    """

    def __init__(self, most: int = ROOM) -> None:
        self._most = most
        self._free: dict[int, list[np.ndarray]] = {}
        self._kept = 0
        self._lock = threading.Lock()

    def take(self, size: int) -> np.ndarray:
        """Take a buffer of at least that many bytes, uint8."""
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
        """Return a buffer; the caller must not use it afterwards."""
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
    """Run ``work(item)`` on a thread with this thread's context (the engine of codecs …)."""
    return _pool().submit(contextvars.copy_context().run, work, item)


def ahead(
    work: Callable[[Given], Made], items: Iterable[Given], size: Callable[[Given], int], room: int = ROOM
) -> Iterator[Made]:
    """Yield results in order, computing several at a time.

    Errors of ``items`` are raised after the results of the previous items.

    Args:
      work: runs on the threads of the pool or, for small items (which is faster), on the caller's.
      items: consumed one by one.
      size: the approximate bytes of an item while it is processed, and of its result afterwards.
      room: maximum total of these bytes; one more item than threads is always allowed.
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
    """Run ``work`` on each item, on the threads of the pool; raises the first error once all are done."""
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
