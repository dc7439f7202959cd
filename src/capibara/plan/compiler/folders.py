"""Temporary folders of compilations, which are removed afterwards however the calling process ends.

A folder is removed by the process that created it or, if that one is killed, by its worker, which notices. What both
leave behind (after a power failure, or if all processes are killed together) is removed by the next process that
compiles: the lock file in a folder is locked while its creator lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["remove_abandoned", "remove_folder", "work_folder"]

_PREFIX = "capibara-compile-"
# What tempfile makes of it: a folder of somebody else's that only begins like one is left alone.
_NAME = re.compile(_PREFIX + r"[a-z0-9_]{8}")
_LOCK = "lock"
_YOUNG, _OLD = 60.0, 24 * 3600.0

_cleaning = threading.Lock()
_cleaned: set[str] = set()


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """An empty temporary folder, until the block ends."""
    with _cleaning:
        where = tempfile.gettempdir()
        if where not in _cleaned:
            _cleaned.add(where)
            remove_abandoned(Path(where))
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _try_lock(lock)
        yield folder
    finally:
        os.close(lock)
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder, even while a process that is about to end writes to it."""
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)


def remove_abandoned(where: Path) -> list[Path]:
    """Remove and return the folders of compilations whose process has ended.

    Only folders of this user that are not links and not locked; without a lock file, after a day.
    """
    if not hasattr(os, "getuid"):
        return []
    removed = []
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(where)):
            if not _NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                    folder = Path(entry.path)
                    if _abandoned(folder, time.time() - found.st_mtime):
                        remove_folder(folder)
                        removed.append(folder)
    return removed


def _abandoned(folder: Path, age: float) -> bool:
    if age < _YOUNG:  # its lock may just be being made
        return False
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return age > _OLD
    try:
        return _try_lock(lock)
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Whether this process holds the lock now."""
    try:
        import fcntl
    except ImportError:  # no such locks here, and no TPU compiler either
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
