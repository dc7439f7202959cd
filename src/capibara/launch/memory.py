"""Memory that a launcher holds for each of its processes, and that outlives them.

Each process inherits two files without a name (``memfd_create``) as descriptors. What one writes into them is there for
the one that takes its place. The kernel frees them when the last holder has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["empty_memory", "held_memory", "memory_variables", "read_memory"]

_VARIABLE = "CAPIBARA_MEMORY"
_NAME = "capibara-held"
_FILES = 2  # so that one is whole while the other is written


@contextlib.contextmanager
def held_memory(count: int) -> Iterator[list[tuple[int, ...]]]:
    """Two empty files in memory for each of ``count`` processes; none where the system has no such files."""
    held: list[int] = []
    try:
        with contextlib.suppress(AttributeError, OSError):
            held.extend(os.memfd_create(_NAME) for _ in range(_FILES * count))
        if len(held) < _FILES * count:
            yield [()] * count
        else:
            yield [tuple(held[_FILES * index :][:_FILES]) for index in range(count)]
    finally:
        for descriptor in held:
            os.close(descriptor)


def empty_memory(held: Iterable[tuple[int, ...]]) -> None:
    """Forget what processes have written; none of them may run."""
    for files in held:
        for descriptor in files:
            os.ftruncate(descriptor, 0)


def memory_variables(files: tuple[int, ...]) -> dict[str, str]:
    """The environment variable that :func:`read_memory` reads; empty where there are none."""
    return {_VARIABLE: ",".join(map(str, files))}


def read_memory(environment: Mapping[str, str]) -> tuple[int, ...]:
    """The descriptors that this process has from its launcher; none if it has none, or they are something else."""
    text = environment.get(_VARIABLE, "")
    if not re.fullmatch(r"[0-9]{1,6},[0-9]{1,6}", text):
        return ()
    files = tuple(map(int, text.split(",")))
    for one in files:
        try:
            # A program between the two may have closed them, and opened others.
            name = os.readlink(f"/proc/self/fd/{one}")
            regular = stat.S_ISREG(os.fstat(one).st_mode)
        except OSError:
            return ()
        if not regular or not name.startswith(f"/memfd:{_NAME}"):
            return ()
    return files
